"""Every link of every page leads somewhere, and every stage's marks, skeletons and quotations are in step."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MARKS = ROOT / "common" / "harness" / "practice" / "marks.py"
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def pages() -> list[Path]:
    found = list(ROOT.glob("*.md")) + list(ROOT.glob("docs/**/*.md")) + list(ROOT.glob("0?_*/**/*.md"))
    return [page for page in found if not {"mine", "hunt"} & set(page.relative_to(ROOT).parts)]


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [link.group(1) for link in LINK.finditer(text)]
    return [f"{page.relative_to(ROOT)}: link to {target}, which does not exist"
            for target in targets if "://" not in target and not (page.parent / target).exists()]


def main() -> int:
    problems = [problem for page in pages() for problem in broken_links(page)]
    for cmake in sorted(ROOT.glob("0?_*/CMakeLists.txt")):
        stage = cmake.parent
        check = subprocess.run([sys.executable, MARKS, "check", stage], capture_output=True, text=True)
        if check.returncode:
            problems.append(check.stderr.strip())
        words = len(re.sub(r"```.*?```", "", (stage / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL).split())
        if words > 3300:  # about 2,500 of running text, with tables, hints and answers
            problems.append(f"{stage.name}/README.md: {words} words; a chapter is read in one sitting")
    for problem in problems:
        print(problem)
    print(f"{len(pages())} pages, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

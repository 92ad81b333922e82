"""Links and their anchors lead somewhere; pictures, marks, skeletons, quotations and mutants are in step; no line is
too long."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


def pages() -> list[Path]:
    found = list(ROOT.glob("*.md")) + list(ROOT.glob("docs/**/*.md")) + list(ROOT.glob("0?_*/**/*.md"))
    return [page for page in found if not {"mine", "hunt"} & set(page.relative_to(ROOT).parts)]


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a link may name after '#': the headings, as GitHub spells them."""
    text = re.sub(r"<!--.*?-->|\[([^]]*)\]\([^)]*\)", r"\1", without_code(page), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*?) *$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.finditer(re.sub(r"`[^`\n]*`", "", without_code(page))):
        target, anchor = page.parent / link[1] if link[1] else page, link[2]
        if "://" in link[1]:
            continue
        if not target.exists():
            yield f"{page.relative_to(ROOT)}: link to {link[1]}, which does not exist"
        elif anchor and target.suffix == ".md" and anchor[1:] not in anchors(target):
            yield f"{page.relative_to(ROOT)}: link to {link[1]}{anchor}, and no heading there is called so"


def long_lines() -> list[str]:
    """Comments past 100 columns, which clang-format leaves alone so that it cannot break a diagram."""
    sources = [path for pattern in ("common/**/*.?pp", "0?_*/**/*.?pp", "0?_*/**/*.cu*") for path in ROOT.glob(pattern)]
    return [f"{path.relative_to(ROOT)}:{number}: more than 100 columns"
            for path in sources if not {"mine", "hunt"} & set(path.relative_to(ROOT).parts)
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if len(line) > 100]


def stale_pictures() -> list[str]:
    """A picture of docs/, 05, a warm-up, a ladder, fast/ or ring/ that is not what the program beside it draws."""
    stale = []
    places = ("docs", "05_*", "0?_*/warmup", "0?_*/ladder", "0?_*/fast", "0?_*/ring")
    for program in sorted(program for place in places for program in ROOT.glob(f"{place}/pictures/*.py")):
        spec = importlib.util.spec_from_file_location(program.stem, program)
        assert spec and spec.loader
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        for name, drawn in module.pictures().items():
            picture = program.with_name(name)
            if not picture.exists() or picture.read_text(encoding="utf-8") != drawn:
                stale.append(f"{picture.relative_to(ROOT)}: not what {program.relative_to(ROOT)} draws; run it")
    return stale


def large_steps(ladder: Path) -> Iterator[str]:
    """Rungs of stage 04 that change more than 60 lines of code, by the figures of its map, which said.py checks."""
    page = (ladder / "README.md").read_text(encoding="utf-8")
    steps = re.findall(r'(\d+)<!-- = added\("[^"]+", "([^"]+)", code=1\) -->', page)
    yield from (f"{ladder.name}/{name}: {count} lines of code are new, more than 60"
                for count, name in steps if int(count) > 60)
    told = {Path(name).name for _, name in steps}
    yield from (f"{ladder.name}/{file.name}: README.md does not say how many lines are new"
                for file in sorted(ladder.glob("*.cu")) if file.name not in told)


def long_kernels(stage: Path) -> Iterator[str]:
    """Of 06's ladders: a rung is read in one go, a kernel of the whole contract with its overview."""
    for file in sorted([*stage.glob("forward/*.cu*"), *stage.glob("backward/*.cu*")]):
        limit = 250 if file.name[0].isdigit() or file.suffix == ".cuh" else 330 if file.parent.name == "backward" else 300
        count = len(file.read_text(encoding="utf-8").splitlines())
        if count > limit:
            yield f"{file.relative_to(ROOT)}: {count} lines, more than {limit}"


def words(chapter: str) -> int:
    """Of running text: no tables, code and marks, nor what unfolds on demand, as hints and answers do."""
    text = re.sub(r"```.*?```|^\|[^\n]*$|<!--.*?-->", "", chapter, flags=re.DOTALL | re.M)
    folded = 1
    while folded:
        text, folded = re.subn(r"<details>(?:(?!<details>).)*?</details>", "", text, flags=re.DOTALL)
    return len(text.split())


def main() -> int:
    problems = [problem for page in pages() for problem in broken_links(page)] + long_lines() + stale_pictures()
    problems += large_steps(ROOT / "04_cuda_forward" / "ladder")
    problems += long_kernels(ROOT / "06_optimized")
    for cmake in sorted(ROOT.glob("0?_*/CMakeLists.txt")):
        stage = cmake.parent
        for tool, *args in (("practice/marks.py", stage), ("judge/mutants.py", stage / "check" / "mutants.txt", stage)):
            check = subprocess.run([sys.executable, ROOT / "common" / tool, "check", *args], capture_output=True, text=True)
            if check.returncode:
                problems.append(check.stderr.strip())
        rungs = [(page, 500) for page in sorted((stage / "ladder").glob("*.md"))]
        rungs += [(page, 600) for page in sorted(stage.glob("*ward/[0-9]*.md"))]
        rungs += [(page, 900) for page in [*sorted(stage.glob("beyond/*/README.md")), *sorted(stage.glob("*ward/hopper.md"))]]
        rungs += [(page, 2500) for page in sorted(stage.glob("backward/README.md"))]
        rungs += [(page, 1500) for page in sorted(stage.glob("ring/README.md"))]
        long = [(stage / "README.md", 2500 if stage.name.startswith("06") else 3000), (stage / "ptx" / "on_cpu" / "README.md", 3000)]
        for page, limit in (*long, (stage / "warmup" / "README.md", 2000), *rungs):
            count = words(page.read_text(encoding="utf-8")) if page.is_file() else 0
            if count > limit:
                problems.append(f"{page.relative_to(ROOT)}: {count} words; it is read in one sitting")
    for tool in ("timeline.py", "ab.py"):  # their rules and changes must fit the rungs
        command = [sys.executable, str(ROOT / "06_optimized" / "check" / tool), "check"]
        check = subprocess.run(command, capture_output=True, text=True, check=False)
        if check.returncode:
            problems.append(check.stderr.strip())
    for problem in problems:
        print(problem)
    print(f"{len(pages())} pages, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

"""The best that every cell beside FlashAttention-3 ever had, from the history of a results file, into results/best.txt.

    best.py [06_optimized/results/nvidia-h200.json]

A kernel that gains in one cell may lose in another, and two runs of one kernel differ by 1 to 3 %. So the table of missed
aims says beside each cell what it had in its best recorded run, and of which commit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
PAIRS = {"hopper": "fa3", "best": "fa3", "best_deterministic": "fa3_deterministic"}  # ours, theirs


def cells(text: str) -> dict[str, tuple[float, str]]:
    """pass/ours/N:../d:..: the median of the ratios by round, and the commit that was measured."""
    data = json.loads(text)
    times: dict[str, dict[int, float]] = defaultdict(dict)
    commits: dict[str, str] = {}
    for row in data["benchmarks"]:
        times[row["name"]][row["repetition_index"]] = row["real_time"]
        commits[row["name"]] = row.get("commit", data["context"].get("commit", "?"))
    found = {}
    for name, rounds in times.items():
        stage, what, ours, *rest = name.split("/")
        theirs = times.get("/".join(["peer", what, PAIRS.get(ours, ""), *rest]), {})
        if stage == "stage06" and "G:1" in rest and (ratios := [theirs[i] / rounds[i] for i in rounds if i in theirs]):
            found["/".join([what, ours, *rest])] = median(ratios), commits[name]
    return found


def history(path: Path) -> dict[str, tuple[float, str]]:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    best: dict[str, tuple[float, str]] = {}
    name = path.resolve().relative_to(ROOT).as_posix()
    for commit in git("log", "--format=%h", "--", name).split():
        try:
            recorded = cells(git("show", f"{commit}:{name}"))
        except (subprocess.CalledProcessError, ValueError, KeyError):  # not there yet, or of another form
            continue
        for cell, found in recorded.items():
            best[cell] = max(found, best.get(cell, found))
    return best


def main() -> int:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "06_optimized" / "results" / "nvidia-h200.json"
    lines = [f"{cell} {ratio:.4f} {commit}\n" for cell, (ratio, commit) in sorted(history(path).items())]
    path.with_name("best.txt").write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""clang-tidy over many files in a fraction of the time: `tidy.py FOLDER FILE...`

FOLDER holds a copy of compile_commands.json, since who builds writes that anew, and gets the sources of groups.

Of the three seconds that a file takes alone, most go into the declarations of headers, which every check walks
through. So files of the same flags are included one after the other in a file of their own, and the headers are walked
through once. A file that opens no namespace of ours, as tests do, is included in a namespace, so that its names are
its own. What does not compile with the others of its group (a second main(), the same name twice) goes into the next
group; a file that does not compile alone is a finding.

Exit code 1: a finding, which is printed; 2: wrong use.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

OURS = re.compile(r"^namespace fa|^extern \"C\"|^[a-z].*\bfa::\w+::\w+( =|\()", re.M)  # opens one of our namespaces
GROUP = 8  # files: as much as one call takes while the others take as much
IRRELEVANT = re.compile(r"-O.*|-g.*|-W.*|-w|-m.*|-f.*|--param=.*|-D\w+_EXPORTS")  # -march is given below
TEXTS = re.compile(r"(-DFA_(?:COMPILER|FLAGS|BUILD_TYPE|SOURCE_DIR)=).*")  # any will do
NOISE = re.compile(r"\d+ warnings? (generated|treated)|Suppressed \d+ warnings|Use -header-filter")


def flags_of(command: str) -> list[str]:
    """What decides how a file is read: neither its name nor what only its machine code depends on."""
    kept = []
    words = iter(shlex.split(command)[1:])
    for word in words:
        if word in ("-o", "-c", "-include"):  # the last: headers of tests, which GCC has precompiled for itself
            next(words)
        elif not IRRELEVANT.fullmatch(word):
            kept.append(TEXTS.sub(r'\1""', word))
    return kept


def together(files: list[Path]) -> str:
    """One source of all: their headers, outside of any namespace, then each file."""
    text = []
    for file in files:
        depth = 0
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("#if"):
                depth += 1
            elif line.startswith("#endif"):
                depth -= 1
            elif line.startswith("#include") and depth == 0 and line not in text:
                text.append(line)
    for n, file in enumerate(files):
        # Each program has its own of these two.
        text += [f"#define {name} {name}_{n}" for name in ("main", "register_benchmarks")]
        content = file.read_text(encoding="utf-8")
        if "register_benchmarks(" in content:
            text.append("namespace fa::bench {\nvoid register_benchmarks(Size size);\n}")
        ours = OURS.search(content)
        include = f'#include "{file}"'
        text += [include] if ours else [f"namespace file_{n} {{", include, "}"]
        text += ["#undef main", "#undef register_benchmarks"]
    return "\n".join(text) + "\n"


def unused_aliases(file: Path) -> list[str]:
    """misc-unused-alias-decls, which looks at a main file alone."""
    text = file.read_text(encoding="utf-8")
    names = re.findall(r"^\s*namespace (\w+) = ", text, re.M)
    return [f"{file}: nothing uses the alias {name}" for name in names if len(re.findall(rf"\b{name}\b", text)) == 1]


class Tidy:
    def __init__(self, folder: Path, jobs: int):
        self.out = folder
        self.jobs = jobs
        self.count = 0

    def run(self, files: list[Path], flags: list[str], number: int) -> tuple[int, str]:
        source = files[0]
        if len(files) > 1:
            source = self.out / f"group_{number}.cpp"
            source.write_text(together(files), encoding="utf-8")
        done = subprocess.run(
            ["clang-tidy", "--quiet", "--checks=-bugprone-suspicious-include", str(source), "--", *flags, "-march=x86-64", "-Wno-unknown-warning-option",
             "-Wno-pragma-once-outside-header",
             # Of templates only those that something calls are read, as all of ours are: most of Eigen and of the
             # library is templates that nothing calls.
             "-fdelayed-template-parsing"],
            capture_output=True, text=True)  # fmt: skip
        said = [line for line in (done.stdout + done.stderr).splitlines() if not NOISE.search(line)]
        return done.returncode, "\n".join(said)

    def group(self, files: list[Path], flags: list[str]) -> list[str]:
        """Findings in these files, in as few calls as it takes."""
        self.count += 1
        code, said = self.run(files, flags, self.count)
        clashes = {Path(name).resolve() for name in re.findall(r"^(\S+?):\d+:\d+: error:.*clang-diagnostic-error", said, re.M)}
        apart = [file for file in files if file in clashes]
        if code == 0 or len(files) == 1:
            return [said] if code else []
        if not clashes:
            return [said]
        if not apart or len(apart) == len(files):  # in a header, or in all: each alone
            return [finding for file in files for finding in self.group([file], flags)]
        rest = [file for file in files if file not in clashes]
        return self.group(rest, flags) + self.group(apart, flags)


def main(arguments: list[str]) -> int:
    if len(arguments) < 2 or not (Path(arguments[0]) / "compile_commands.json").is_file():
        print("usage: tidy.py FOLDER FILE...; FOLDER holds compile_commands.json", file=sys.stderr)
        return 2
    folder = Path(arguments[0]).resolve()
    wanted = [Path(name).resolve() for name in arguments[1:]]
    flags: dict[Path, list[str]] = {}
    for entry in json.loads((folder / "compile_commands.json").read_text(encoding="utf-8")):
        # Of a file that is compiled with mutants' or skeletons' headers, too, the first plain command is enough.
        if "_mutant" not in entry["command"] and "_skeleton_" not in entry["command"]:
            flags.setdefault(Path(entry["file"]).resolve(), flags_of(entry["command"]))
    if missing := [name for name in arguments[1:] if not Path(name).is_file()]:
        print(f"there is no {', '.join(missing)}", file=sys.stderr)
        return 2
    most = Counter(tuple(of) for of in flags.values()).most_common(1)[0][0]
    groups: dict[tuple[str, ...], list[Path]] = {}
    for file in wanted:  # what only a test compiles is read like most
        groups.setdefault(tuple(flags.get(file, most)), []).append(file)
    tidy = Tidy(folder, os.cpu_count() or 1)
    tasks = [
        (files[at::parts], list(of))
        for of, files in groups.items()
        for parts in [-(-len(files) // GROUP)]
        for at in range(parts)
    ]
    tasks.sort(key=lambda task: -sum(file.stat().st_size for file in task[0]))
    with ThreadPoolExecutor(tidy.jobs) as pool:
        findings = [f for found in pool.map(lambda task: tidy.group(*task), tasks) for f in found]
    findings += [said for file in wanted for said in unused_aliases(file)]
    print("\n".join(findings) if findings else f"clang-tidy: {len(wanted)} files, nothing found, {tidy.count} calls")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

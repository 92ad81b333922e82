"""Who may see whom: no circle of imports, rooms in one direction, a lesson sees common/core and its own stage alone."""

import ast
import re
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
# A room, and what its files may include besides their own.
ROOMS = {
    "common/core": {"common/emulator/cuda_on_cpu.hpp"},  # in the place of CUDA's own headers
    "common/emulator": {"common/core"},
    "common/judge": {"common/core"},
    "common/measure": {"common/cmake", "common/core", "common/judge"},
    "common/practice": {"common/core", "common/judge"},
}


def sources(*suffixes: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:  # a copy without its history
        found = [path for path in ROOT.glob("*/**/*") if "build" not in path.parts]
    else:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    skipped = {"exercise", "mine", "hunt"}
    return [path for path in found if path.suffix in suffixes and path.is_file()
            and not skipped & set(path.relative_to(ROOT).parts)]


def includes() -> dict[str, set[str]]:
    """Of every C++ and CUDA file: the files of the project that it includes."""
    found = {}
    for path in sources(".cpp", ".hpp", ".cu", ".cuh"):
        names = INCLUDE.findall(path.read_text(encoding="utf-8"))
        targets = {ROOT / name if (ROOT / name).is_file() else (path.parent / name).resolve() for name in names}
        found[str(path.relative_to(ROOT))] = {str(to.relative_to(ROOT)) for to in targets if to.is_file()}
    return found


def imports() -> dict[str, set[str]]:
    """Of every Python file: the project's files of the names that it imports, wherever the import stands."""
    files = sources(".py")
    by_name: dict[str, list[Path]] = {}
    for path in files:
        by_name.setdefault(path.stem, []).append(path)
    found = {}
    for path in files:
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
        targets = set()
        for name in names:
            beside = [other for other in by_name.get(name, []) if other.parent == path.parent]
            targets |= set(beside or by_name.get(name, [])[:1]) - {path}
        found[str(path.relative_to(ROOT))] = {str(to.relative_to(ROOT)) for to in targets}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A path that comes back to where it began; nothing if there is none."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node):], node]
        if node in done:
            return []
        for to in sorted(graph.get(node, ())):
            if found := walk(to, [*path, node]):
                return found
        done.add(node)
        return []
    for start in sorted(graph):
        if found := walk(start, []):
            return found
    return []


class House(unittest.TestCase):
    def test_a_circle_is_found(self) -> None:
        self.assertEqual(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}), ["b", "c", "b"])
        self.assertEqual(circle({"a": {"b", "c"}, "b": {"c"}}), [])

    def test_no_circle_of_imports(self) -> None:
        self.assertEqual(circle(includes()), [])
        graph = imports()
        self.assertIn("common/judge/source.py", graph["common/judge/mutants.py"])  # it does see imports
        self.assertEqual(circle(graph), [])

    def test_rooms_see_each_other_in_one_direction(self) -> None:
        for file, targets in (includes() | imports()).items():
            room = next((name for name in ROOMS if file.startswith(name + "/")), None)
            for to in targets if room else ():
                allowed = to.startswith(room + "/") or any(to == one or to.startswith(one + "/") for one in ROOMS[room])
                # The sweep's test also tests what stage 06 draws of it.
                if not allowed and not (Path(file).name.startswith("test_") and to.startswith("06_optimized/check/")):
                    self.fail(f"{file} may not see {to}")

    def test_a_lesson_sees_core_and_its_own_stage(self) -> None:
        for file, targets in includes().items():
            parts = Path(file).parts
            if not re.fullmatch(r"0\d_\w+", parts[0]) or "check" in parts or parts[1] == "torch":  # which hands all stages to Python
                continue
            # What an instruction means on the CPU is written in the emulator's words.
            meanings = ("common/emulator/block.hpp",) if "on_cpu" in parts else ()
            for to in targets:
                self.assertTrue(to.startswith(("common/core/", parts[0] + "/", *meanings)), f"{file} may not see {to}")


if __name__ == "__main__":
    sys.exit(unittest.main())

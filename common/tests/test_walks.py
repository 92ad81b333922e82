"""06's walks and last rungs stay a short way from the kernels that they come from, and the structs that the walks'
benchmarks hand to C have the fields of the C code. No GPU, no PyTorch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
import unittest
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
BEYOND = ROOT / "06_optimized" / "beyond"
sys.path.insert(0, str(ROOT / "common" / "measure" / "charts"))

from said import changed  # noqa: E402

# Where a walk begins, and how many lines of code may go and may come: its idea, and not much else.
PARENTS = {"tiled.cu": ROOT / "04_cuda_forward" / "tiled.cu", "fa2.cu": ROOT / "06_optimized" / "forward" / "fa2.cu"}
MAY_CHANGE = 60
# Those that go and come in files that take more, each for a reason that its page gives. They may shrink.
MORE_MAY_CHANGE = {"decode/fa2.cu": (100, 235), "weights/fa2.cu": (144, 180)}
# The last step of each ladder before the kernel of the whole contract: as many lines may change.
LAST = ("forward/4_wide_warps.cu", "forward/5_two_loops.cu"), ("forward/13_persistent.cu", "forward/14_longest_first.cu"), \
    ("backward/9_masks.cu", "backward/10_in_order.cu")
KINDS = {"std::int64_t": ctypes.c_int64, "std::uint64_t": ctypes.c_uint64, "double": ctypes.c_double,
         "void": ctypes.c_void_p}


def benches() -> list[Path]:
    return sorted(BEYOND.glob("*/check/*_bench.py"))


def loaded(file: Path) -> ModuleType:
    """With something in PyTorch's place that is never asked."""
    torches = {name: mock.MagicMock() for name in ("torch", "torch.nn", "torch.nn.attention")}
    with mock.patch.dict(sys.modules, torches):
        for name in [name for name in sys.modules if name.endswith("_bench")]:
            del sys.modules[name]
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    return module


def struct_of(folder: Path) -> list[tuple[str, type]] | None:
    """Of fa_NAME_call, in peer.hpp or peer.cpp."""
    for file in (folder / "peer.hpp", folder / "peer.cpp"):
        text = re.sub(r"//.*", "", file.read_text(encoding="utf-8")) if file.is_file() else ""
        if found := re.search(r'extern "C" struct fa_\w+_call \{(.*?)\n\}', text, re.S):
            fields = []
            for line in filter(None, map(str.strip, found[1].split(";"))):
                kind, _, names = line.partition(" ")
                fields += [(name, KINDS[kind]) for name in re.findall(r"\w+", names)]
            return fields
    return None


class Steps(unittest.TestCase):
    def test_the_last_rungs_are_short(self) -> None:
        for before, last in LAST:
            with self.subTest(rung=last):
                go, come = changed(BEYOND.parent / before, BEYOND.parent / last, space=False, code=True)
                self.assertLessEqual(max(go, come), MAY_CHANGE)

    def test_every_walk_is_short(self) -> None:
        walks = sorted(readme.parent for readme in BEYOND.glob("*/README.md"))
        self.assertGreaterEqual(len(walks), 6)
        for walk in walks:
            for name, parent in PARENTS.items():
                file = f"{walk.name}/{name}"
                with self.subTest(file=file):
                    go, come = changed(parent, walk / name, space=False, code=True)
                    may_go, may_come = MORE_MAY_CHANGE.get(file, (MAY_CHANGE, MAY_CHANGE))
                    self.assertLessEqual(go, may_go)
                    self.assertLessEqual(come, may_come)
                    if file in MORE_MAY_CHANGE:
                        self.assertGreater(max(go, come), MAY_CHANGE, "is no exception any more")


class Calls(unittest.TestCase):
    def test_every_struct_is_that_of_c(self) -> None:
        compared = 0
        for file in benches():
            module, fields = loaded(file), struct_of(file.parent)
            call = getattr(module, "Call", None)
            with self.subTest(bench=file.name):
                if fields is None:  # it takes fa_peer_call, which peers.py has
                    self.assertNotIn("_fields_", file.read_text(encoding="utf-8"))
                else:
                    self.assertEqual(call._fields_, fields)
                    compared += 1
        self.assertGreaterEqual(compared, 2)


if __name__ == "__main__":
    unittest.main()

"""The benchmarks of 06's walks hand structs to C: their fields must be those of the C code. No GPU, no PyTorch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
import unittest
from pathlib import Path
from types import ModuleType
from unittest import mock

BEYOND = Path(__file__).resolve().parents[2] / "06_optimized" / "beyond"
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

"""The operator of one page, own_operator.py or the reader's: ./learn torch practice shows these results."""

from __future__ import annotations

import importlib.util
import os
import unittest
from pathlib import Path
from typing import Any

from reference import FOLDER, Case, reference, tensors, torch

FILE = Path(os.environ.get("FA_OWN_OPERATOR") or FOLDER / "own_operator.py")
SIZES: Any = {"Hq": 2, "Hkv": 2, "Nq": 5, "Nk": 7, "d": 4}


def load() -> Any:
    spec = importlib.util.spec_from_file_location("own_operator", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


own = load()


class OwnOperator(Case):
    def test_1_the_fake_tells_shapes_and_types__hole_1(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        for dtype in (torch.float32, torch.float64):
            inputs = tensors(dtype=dtype, **SIZES)
            with FakeTensorMode() as mode:
                fakes = own.attention(*(mode.from_tensor(x) for x in inputs))
            for fake, real in zip(fakes, own.attention(*inputs)):
                self.assertEqual((fake.shape, fake.dtype, fake.stride()), (real.shape, real.dtype, real.stride()))

    def test_2_what_is_saved_is_linear_in_N__hole_2(self) -> None:
        kept: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(tuple(x.shape)), x)[1], lambda x: x):
            own.attention(*tensors(grad=True, **SIZES))
        self.assertEqual(len(kept), 5, f"q, k, v, O and L are saved; saved were {len(kept)} tensors")
        self.assertNotIn((2, 2, 5, 7), kept)

    def gradients(self) -> list[tuple[Any, Any]]:
        inputs = tensors(dtype=torch.float64, grad=True, **SIZES)
        up = torch.linspace(-1, 1, 2 * 2 * 5 * 4, dtype=torch.float64).view(2, 2, 5, 4)
        got = torch.autograd.grad(own.attention(*inputs)[0], inputs, up)
        return list(zip(got, torch.autograd.grad(reference(*inputs), inputs, up)))

    def test_3_dV__holes_2_3_5_and_6(self) -> None:
        self.close(*self.gradients()[2])

    def test_4_dQ_and_dK__holes_2_to_6(self) -> None:
        for ours, theirs in self.gradients()[:2]:
            self.close(ours, theirs)

    def test_5_gradients_against_differences__holes_2_to_6(self) -> None:
        inputs = tensors(dtype=torch.float64, grad=True, **SIZES)
        self.assertTrue(torch.autograd.gradcheck(lambda q, k, v: own.attention(q, k, v)[0], inputs))

    def test_6_opcheck_and_compile__all_holes(self) -> None:
        torch.library.opcheck(own.attention, tensors(grad=True, **SIZES))
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, k, v: own.attention(q, k, v)[0], fullgraph=True, backend="aot_eager")
        self.close(compiled(*tensors(**SIZES)), reference(*tensors(**SIZES)))


@unittest.skipIf(FILE != FOLDER / "own_operator.py", "a reader's file is judged")
class Skeleton(unittest.TestCase):
    def test_as_it_is_it_does_not_pass(self) -> None:
        import subprocess
        import sys
        import tempfile
        sys.path.append(str(FOLDER))
        from practice import HOLE, LESSON, skeleton
        lesson = LESSON.read_text(encoding="utf-8")
        empty = skeleton(lesson)
        self.assertEqual([hole[1] for hole in HOLE.findall(lesson)], list("123456"))
        self.assertEqual(empty.count("# TODO"), 6)
        compile(empty, "skeleton", "exec")
        for _, number, words, code in HOLE.findall(lesson):
            self.assertIn(f"({len(code.splitlines())} line", words, f"hole {number}")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "own_operator.py")
            file.write_text(empty, encoding="utf-8")
            done = subprocess.run([sys.executable, "-m", "unittest", "-v", "test_own_operator.OwnOperator"], capture_output=True,
                                  text=True, check=False, cwd=Path(__file__).parent, env={**os.environ, "FA_OWN_OPERATOR": str(file)})
        self.assertEqual(done.stderr.count("... ok"), 0, done.stderr)


if __name__ == "__main__":
    unittest.main()

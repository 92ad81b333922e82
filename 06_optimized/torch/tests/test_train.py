"""./learn train: what it says and keeps, that it goes on where it was stopped, and that right kernels have one loss."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import shutil
import signal
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from reference import FOLDER, torch

sys.path.append(str(FOLDER))  # train.py lies there; last, for the package beside it is not the one that pip installed
import train  # noqa: E402

TEXT = train.text()
SMALL = ["--context", "16", "--width", "16", "--layers", "2", "--heads", "2", "--batch", "2", "--device", "cpu"]


class Train(unittest.TestCase):
    def setUp(self) -> None:
        self.out = train.ROOT / "build" / "train_of_a_test"  # not where a reader's own runs are kept
        shutil.rmtree(self.out, ignore_errors=True)
        self.addCleanup(shutil.rmtree, self.out, True)
        self.addCleanup(setattr, train, "OUT", train.OUT)
        train.OUT = self.out
        # What takes time and is looked at once: all of the text, the lines that the model writes, and the chart.
        self.whole = {"chart": train.chart, "writes_twice": train.Run.writes_twice}
        for where, name, short in ((train, "text", lambda: TEXT[:30000]), (train, "chart", str),
                                   (train.Run, "writes_twice", lambda run: "")):
            patch = mock.patch.object(where, name, short)
            patch.start()
            self.addCleanup(patch.stop)

    def run_it(self, *words: str) -> tuple[Any, str, str]:
        """Exit code, standard output and standard error."""
        out, err = io.StringIO(), io.StringIO()
        argv = mock.patch.object(sys, "argv", ["train.py", *SMALL, *words])
        with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code: Any = train.main()
            except SystemExit as end:
                code = end.code
        return code, out.getvalue(), err.getvalue()

    def losses(self, name: str) -> list[tuple[int, float]]:
        with open(self.out / f"{name}.csv", encoding="utf-8") as file:
            return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]

    def test_it_learns_and_writes(self) -> None:
        with mock.patch.object(train, "chart", self.whole["chart"]), \
                mock.patch.object(train.Run, "writes_twice", self.whole["writes_twice"]):
            code, out, err = self.run_it("--attention", "03", "--steps", "30")
        self.assertEqual((code, err), (0, ""), out)
        self.assertIn("attention 03 on the CPU", out)
        self.assertRegex(out, r"step 30/30, loss \d\.\d{3}, 0 s left")
        self.assertRegex(out, r"loss \d\.\d{3} on text that it has not seen")
        self.assertIn("the same text", out)  # with a cache, and with all computed again
        self.assertRegex(out, "no chart|build/train_of_a_test/losses.svg shows the losses of 03")
        steps = self.losses("03")
        self.assertEqual([step for step, _ in steps], [10, 20, 30])
        self.assertLess(steps[-1][1], steps[0][1])

    def test_right_kernels_have_one_loss(self) -> None:
        for name in ("sdpa", "00", "03", "02"):
            self.assertEqual(self.run_it("--attention", name, "--steps", "20")[0], 0)
        for name in ("00", "03", "02"):
            for (step, ours), (_, theirs) in zip(self.losses(name), self.losses("sdpa")):
                self.assertAlmostEqual(ours, theirs, delta=2e-3, msg=f"{name}, step {step}")
        self.assertEqual(self.run_it("--attention", "sdpa", "--steps", "20", "--seed", "2")[0], 0)
        self.assertNotEqual(self.losses("sdpa"), self.losses("03"))

    def test_stopped_and_resumed_is_as_never_stopped(self) -> None:
        self.assertEqual(self.run_it("--attention", "03", "--steps", "60")[0], 0)
        whole = self.losses("03")
        one_step = train.Run.one_step

        def stopped_in_the_23rd(run: Any) -> float:
            if run.step == 22:
                os.kill(os.getpid(), signal.SIGINT)
            return one_step(run)

        with mock.patch.object(train.Run, "one_step", stopped_in_the_23rd):
            code, out, _ = self.run_it("--attention", "03", "--steps", "60")
        self.assertEqual(code, 130)
        again = " ".join(SMALL + ["--attention", "03", "--steps", "60", "--resume"])
        self.assertIn(f"stopped after step 23; go on with: ./learn train {again}\n", out)
        code, out, err = self.run_it("--attention", "03", "--steps", "60", "--resume")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual(self.losses("03"), whole)

    def test_stopped_before_it_began(self) -> None:
        with mock.patch.object(train, "Characters", side_effect=KeyboardInterrupt):
            self.assertEqual(self.run_it("--attention", "03"), (130, "", "train: stopped before the first step\n"))

    def test_it_ends_where_the_loss_is_no_number(self) -> None:
        code, _, err = self.run_it("--attention", "03", "--steps", "60", "--rate", "1e30")
        self.assertEqual(code, 1)
        self.assertRegex(err, r"^train: the loss of step \d+ is (nan|inf): the kernel is wrong, or --rate 1e\+30 is too "
                              r"much for it\n$")
        self.assertTrue(self.losses("03"))
        self.assertFalse((self.out / "03.pt").exists())  # weights that are no numbers

    def test_what_another_run_has_left_is_kept(self) -> None:
        self.assertNotIn("is kept", self.run_it("--attention", "03", "--steps", "2")[1])
        left = (self.out / "03.pt").read_bytes()
        code, out, _ = self.run_it("--attention", "03", "--steps", "1")
        self.assertEqual(code, 0)
        self.assertIn("the run before this one is kept in build/train_of_a_test/03.before.pt\n", out)
        self.assertEqual((self.out / "03.before.pt").read_bytes(), left)

    def test_where_a_kernel_runs(self) -> None:
        for name, which in {"03": ("03", "cpu"), "05.on_cpu": ("05", "cpu"), "05": ("05", ""), "06.pingpong": ("06", "")}.items():
            self.assertEqual(train.stage_and_place(name), which, name)
        with mock.patch.object(train, "ROOT", self.out):
            for n, (name, which) in enumerate((("03_tiled_cpu/mine/tiled_cpu.cpp", ("03", "cpu")),
                                               ("05_cuda_backward/mine/tiled_backward.cpp", ("05", "cpu")),
                                               ("05_cuda_backward/mine/dq.cu", ("05", "")),
                                               ("06_optimized/mine/ring/ring.cpp", ("05", "")))):
                (self.out / name).parent.mkdir(parents=True, exist_ok=True)
                (self.out / name).touch()
                os.utime(self.out / name, (n, n))
                self.assertEqual(train.stage_and_place("mine"), which, name)

    def test_words(self) -> None:
        for words, code, sentence in (
                (["--width", "15"], 2, "--width must be a multiple of --heads, got 15 and 2"),
                (["--steps", "0"], 2, "argument --steps: a number from 1 on, got '0'"),
                (["--device", "tpu"], 2, "--device is cpu or cuda, got 'tpu'"),
                (["--attention", "09"], 2, "no kernel is called '09'"),
                (["--resume"], 2, "nothing to resume: build/train_of_a_test/best.pt is not there"),
                *([] if torch.cuda.is_available() else [
                    (["--device", "cuda"], 3, "no GPU answers; --device cpu trains without one"),
                    (["--speed"], 3, "--speed compares kernels of a GPU, and none is there")])):
            got, out, err = self.run_it(*words)
            self.assertEqual((got, out, len(err.splitlines())), (code, "", 1), err)
            self.assertIn(sentence, err)
        self.assertEqual(self.run_it("--attention", "03", "--steps", "1")[0], 0)
        code, _, err = self.run_it("--attention", "03", "--steps", "1", "--resume", "--layers", "1")
        self.assertEqual((code, len(err.splitlines())), (2, 1))
        self.assertIn("is of other options than these: context 16, width 16, layers 2", err)

    @unittest.skipUnless(torch.cuda.is_available(), "no GPU answers")
    def test_on_a_gpu(self) -> None:
        with mock.patch.object(train.Run, "writes_twice", self.whole["writes_twice"]):
            code, out, err = self.run_it("--device", "cuda", "--context", "128", "--width", "128", "--steps", "20")
        self.assertEqual((code, err), (0, ""), out)
        self.assertIn("by the decode walk, with K and V in pages", out)
        import speed
        rows = speed.measure(train.Gpt, train.attention_by_name("best", "cuda", 512)[0], (512,))
        self.assertEqual(rows[0]["attention"], "this course")
        speed.record(rows, self.out / "speed.json")
        self.assertTrue(Path(self.out / "speed.json").is_file())


if __name__ == "__main__":
    unittest.main()

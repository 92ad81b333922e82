"""kernel="mine": a reader's own file is found, built into a library of its stage, and run; the course itself stays as it is."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

from reference import Case, reference, tensors, torch

import flash_from_scratch._choice as choice
from flash_from_scratch import attention
from flash_from_scratch._library import library
from flash_from_scratch._mine import _stage_of, kernel_of, library_of_mine

COURSE = library().source


@unittest.skipUnless(shutil.which("cmake") and (COURSE / "learn").is_file(), "mine is built with cmake, from the course")
class Mine(Case):
    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        for entry in COURSE.iterdir():
            if entry.name in ("build", ".git"):
                continue
            if entry.name.startswith("02_"):
                shutil.copytree(entry, self.root / entry.name, ignore=shutil.ignore_patterns("mine", "hunt"))
            else:
                (self.root / entry.name).symlink_to(entry)
        self.mine = self.root / "02_online_softmax" / "mine"

    def use(self) -> mock._patch:  # the reader's course in the place of the one that the library was built from
        choice.choose.cache_clear()
        self.addCleanup(choice.choose.cache_clear)
        built = lambda _, wanted, device: library_of_mine(self.root, wanted, device)  # noqa: E731
        return mock.patch.object(choice, "library_of_mine", built)

    def test_walks_and_several_gpus_are_no_kernel_of_a_stage(self) -> None:
        course = self.root / "ring" / "course"  # wherever that lies
        for name in ("forward/8_ring.cu", "ring/ring.cpp", "beyond/masks/fa2.cu"):
            file = course / "06_optimized" / "mine" / name
            file.parent.mkdir(parents=True)
            file.touch()
        os.utime(course / "06_optimized" / "mine" / "forward" / "8_ring.cu", (1, 1))  # the oldest
        self.assertEqual(_stage_of(course, "06")[1].name, "8_ring.cu")

    def test_a_file_of_ones_own_runs(self) -> None:
        lesson = (self.root / "02_online_softmax" / "online_softmax.cpp").read_text(encoding="utf-8")
        self.mine.mkdir()
        torch._dynamo.reset()
        with self.use():
            with self.assertRaisesRegex(ValueError, r"nothing in 02_\*/mine of .*; it begins with ./learn practice 02"):
                attention(*tensors(), kernel="02.mine")
            (self.mine / "online_softmax.cpp").write_text("this does not compile\n", encoding="utf-8")
            with self.assertRaisesRegex(ValueError, "02_online_softmax/mine/online_softmax.cpp does not compile: .*error"):
                attention(*tensors(), kernel="02.mine")
            # An O that is twice as large can only come from this file.
            changed = lesson.replace("o[x] / r.l", "2 * o[x] / r.l")
            self.assertNotEqual(changed, lesson)
            (self.mine / "online_softmax.cpp").write_text(changed, encoding="utf-8")
            out = attention(*tensors(), kernel="02.mine", causal=True)
        want = reference(*tensors(), causal=True)
        self.assertGreater((out - want).abs().max().item(), 0.1)
        self.close(attention(*tensors(), kernel="02", causal=True), want)

    def test_which_kernel_a_file_is(self) -> None:
        for file, want in (("02_online_softmax/mine/lanes.cpp", ("forward", "02.lanes")),
                           ("04_cuda_forward/mine/tiled.cu", ("forward", "04.tiled")),
                           ("05_cuda_backward/mine/dq.cu", ("backward", "05.lesson")),
                           ("06_optimized/mine/forward/8_ring.cu", ("forward", "06.ring")),
                           ("06_optimized/mine/backward/1_mma.cu", ("backward", "06.backward_mma"))):
            path = self.root / file
            self.assertEqual(kernel_of(path, self.root / file.split("/mine/")[0] / "mine"), want)
            names = {(one.way, one.name) for one in library().kernels}
            if any(one.stage == 6 for one in library().kernels):
                self.assertIn(want, names)

    def test_the_file_saved_last_is_taken(self) -> None:
        self.mine.mkdir()
        for age, name in ((100, "lanes.cpp"), (5, "online_softmax.cpp")):
            (self.mine / name).write_text("", encoding="utf-8")
            os.utime(self.mine / name, (time.time() - age, time.time() - age))
        from flash_from_scratch._mine import _stage_of
        self.assertEqual(_stage_of(self.root, "02")[1].name, "online_softmax.cpp")


if __name__ == "__main__":
    unittest.main()

"""Predictions are asked for on a terminal alone, checked before anything is measured, and shown beside the figures."""
from __future__ import annotations

import dataclasses
import json
import os
import pty
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import predict  # puts charts on the path
import said
from results import CONTEXT_KEYS, Results, load, recorded

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "common" / "measure" / "predict.py"
QUESTIONS = '''\
# asked by ./learn bench

time: How long does it take?
  ms = ms(naive, N=64)

growth: By what factor does the time grow?
  times = ms(naive, N=128) / ms(naive, N=64)
'''


class Predict(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.stage = self.root / "02_online"
        (self.stage / "check").mkdir(parents=True)
        (self.stage / "check/predictions.txt").write_text(QUESTIONS)
        self.own = self.stage / "mine/predictions.txt"
        self.own.parent.mkdir()

    def measured(self, sizes: dict[int, float], size: str = "quick") -> Path:
        rows = [{"name": f"stage02/forward/naive/N:{n}/d:8/causal:0/f32", "run_type": "iteration", "real_time": ms,
                 "time_unit": "ms", "repetition_index": 0} for n, ms in sizes.items()]
        file = self.root / f"{size}{len(sizes)}.json"
        file.write_text(json.dumps({"context": dict.fromkeys(CONTEXT_KEYS, "x") | {"size": size}, "benchmarks": rows}))
        return file

    def tool(self, code: int, *args: object) -> str:
        done = subprocess.run([sys.executable, TOOL, *map(str, args)], capture_output=True, text=True, check=False,
                              stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        if code:
            self.assertEqual((done.stderr.count("\n"), done.stdout), (1, ""), done.stderr)
        return done.stdout + done.stderr

    def on_a_terminal(self, answers: str) -> str:
        outer, inner = pty.openpty()
        process = subprocess.Popen([sys.executable, TOOL, "ask", self.stage], stdin=inner, stdout=inner, stderr=inner)
        os.close(inner)
        os.write(outer, answers.encode())
        text = b""
        try:
            while some := os.read(outer, 1000):
                text += some
        except OSError:     # it has ended
            pass
        os.close(outer)
        self.assertEqual(process.wait(), 0, text)
        return text.decode()

    def test_beside_what_was_measured(self) -> None:
        self.own.write_text("# mine\ntime = 10  # or so\n\n growth=4\n")
        text = self.tool(0, "compare", self.stage, self.measured({64: 5, 128: 20}))
        self.assertIn("  How long does it take?\n    time: you said 10, measured 5 ms: off by a factor of 2\n", text)
        self.assertIn("    growth: you said 4, measured 4 times: right\n", text)

    def test_how_far_off(self) -> None:
        for predicted, measured, words in ((1, 1.05, "right"), (1, 3, "off by a factor of 3"), (0, 0, "right"),
                                           (3, 0, "off by 3"), (-1, 2, "off by 3"), (1, 8192, "off by a factor of 8,192")):
            self.assertEqual(predict.verdict(predicted, measured), words)

    def test_what_was_not_measured(self) -> None:
        self.own.write_text("time = 5\ngrowth = 4\n")
        text = self.tool(0, "compare", self.stage, self.measured({64: 5}))
        self.assertIn("growth: you said 4, not measured in this run\n", text)
        self.assertIn("time: you said 5, measured 5 ms: right\n", text)

    def test_a_smoke_run_compares_nothing_and_says_so(self) -> None:
        for predictions in ("time = 5\n", ""):
            self.own.write_text(predictions)
            text = self.tool(0, "compare", self.stage, self.measured({64: 5}, "smoke"))
            self.assertEqual(text, "--smoke shows that the benchmark runs; it measures nothing, and no prediction is compared\n")

    def test_no_predictions(self) -> None:
        text = self.tool(0, "compare", self.stage, self.measured({64: 5}))
        self.assertEqual(text, "no predictions in 02_online/mine/predictions.txt; what to predict: ./learn bench 02 --help\n")
        self.assertEqual(self.tool(0, "questions", self.stage).count("\n"), 2)

    def test_a_broken_or_foreign_file(self) -> None:
        for content, words in ((b"time: 3\n", ":1: not `name = number`: time: 3"), (b"\ntime = 3x\n", ":2: not `name = number`"),
                               (b"time = nan\n", ":1: not"), (b"time = 1\ntime = 2\n", ":2: a second prediction of time"),
                               (b"speed = 2\n", ":1: no question 'speed'; stage 02 asks time, growth"),
                               (b"\xff\xfe\x00", ": is not UTF-8"), (b"time = 1\n" + b"<html>" * 50, ":2: not `name")):
            with self.subTest(words):
                self.own.write_bytes(content)
                self.assertIn(f"02_online/mine/predictions.txt{words}", self.tool(2, "ask", self.stage))
                self.assertEqual(self.own.read_bytes(), content)
        self.own.unlink()
        self.own.mkdir()
        self.tool(2, "ask", self.stage)

    def test_asked_on_a_terminal_alone(self) -> None:
        self.assertEqual(self.tool(0, "ask", self.stage), "")
        self.assertFalse(self.own.exists())
        self.own.parent.rmdir()
        text = self.on_a_terminal("much\n5\n\n")
        self.assertIn("How long does it take? (ms) ", text)
        self.assertIn("a number, or Enter", text)
        self.assertEqual(self.own.read_text(), "time = 5\n")
        self.own.write_text("time = 5  # stays")       # without an end of line, and asked no more
        text = self.on_a_terminal("4\n")
        self.assertNotIn("How long", text)
        self.assertEqual(self.own.read_text(), "time = 5  # stays\ngrowth = 4\n")
        self.assertEqual(self.on_a_terminal(""), "")

    def test_the_end_of_input_asks_no_more(self) -> None:
        self.assertIn("How long", self.on_a_terminal("\x04"))
        self.assertFalse(self.own.exists())

    def test_broken_questions(self) -> None:
        for was, now in (("?\n  ms", "\n  ms"), ("  ms =", "ms ="), ("growth:", "time:")):
            (self.stage / "check/predictions.txt").write_text(QUESTIONS.replace(was, now))
            self.assertIn("two lines a question", self.tool(2, "questions", self.stage))

    def test_the_rules_of_every_stage_fit_what_its_benchmark_measures(self) -> None:
        for stage in sorted(ROOT.glob("[0-9][0-9]_*/")):
            asked = predict.questions(stage)
            self.assertTrue(2 <= len(asked) <= 4, stage.name)
            file = recorded(stage)[0]
            # The sweep's record of 06 has two properties more in a row's name than the stage's benchmark.
            rows = [dataclasses.replace(row, keys={k: v for k, v in row.keys.items() if k not in ("G", "chip")})
                    for row in load(file).rows if row.keys.get("chip", "cool") == "cool" and row.keys.get("G", 1) == 1]
            results = Results(file, {}, rows, [])
            with mock.patch.object(said, "results", lambda _, results=results: results):
                for q in asked:
                    with self.subTest(f"{stage.name} {q.name}"):
                        self.assertGreater(predict.Run(stage / "README.md", ROOT, None, file).value(q.rule, ""), 0)


if __name__ == "__main__":
    unittest.main()

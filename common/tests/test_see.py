"""What a page quotes of `./learn see` and `./learn xray` is what it prints, and programs refuse what they cannot show.

    <!-- see 02 -->       or <!-- xray 04 tiled -->
    ```text
    ...                     a line of three points stands for any lines
    ```
    <!-- end -->

By hand, for what it prints instead: ./learn see 02
"""

import os
import pty
import re
import subprocess
import unittest
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("0?_*/README.md"), *ROOT.glob("0?_*/*/*.md")])
STAGES = sorted(program.parents[1].name[:2] for program in ROOT.glob("0?_*/check/see.cpp"))
QUOTATION = re.compile(r"^<!-- (?P<words>(?:see|xray)\b[^>]*) -->\n```text\n(?P<quoted>.*?)^```\n<!-- end -->$", re.M | re.S)


def learn(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROOT / "learn", *words], capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL)


@lru_cache(maxsize=None)
def printed(words: str) -> str:
    """Without the compiler's line, if it was needed, and without the blanks at the end of lines."""
    done = learn(*words.split())
    if done.returncode:
        raise AssertionError(f"./learn {words} exits with {done.returncode}: {done.stderr}")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "\n".join(lines[1:] if lines[0].startswith("+ ") else lines) + "\n"


def pattern(quoted: str) -> re.Pattern[str]:
    """Of all outputs that the quotation stands for."""
    return re.compile("".join(r"(?:.*\n)*?" if line == "..." else re.escape(line) + "\n"
                              for line in quoted.splitlines()))


class Quotations(unittest.TestCase):
    def test_a_chapter_quotes_what_is_printed(self) -> None:
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            found = list(QUOTATION.finditer(text))
            self.assertEqual(len(found), len(re.findall(r"^<!-- (?:see|xray)\b", text, re.M)), f"{page}: a block after each mark")
            for quotation in found:
                with self.subTest(page=page.relative_to(ROOT), learn=quotation["words"]):
                    output = printed(quotation["words"].strip())
                    if not pattern(quotation["quoted"]).fullmatch(output):
                        self.assertEqual(quotation["quoted"], output)

    def test_every_stage_that_has_a_program_quotes_it(self) -> None:
        for program in ROOT.glob("0?_*/check/see.cpp"):
            chapter = program.parents[1] / "README.md"
            mark = f"<!-- see {chapter.parent.name[:2]} -->"
            self.assertTrue(mark in chapter.read_text(encoding="utf-8"), f"no {mark} in {chapter.relative_to(ROOT)}")

    def test_points_stand_for_lines(self) -> None:
        for quoted in ("a\nb\nc\n", "...\nc\n", "a\n...\n", "a\n...\nc\n", "a\n...\nb\nc\n"):
            self.assertTrue(pattern(quoted).fullmatch("a\nb\nc\n"), quoted)
        for quoted in ("a\nc\n", "b\n...\n", "a\n...\nb\n", "a\nb\n", "a\n...\n.\n"):
            self.assertFalse(pattern(quoted).fullmatch("a\nb\nc\n"), quoted)


class Arguments(unittest.TestCase):
    def test_two_digits_are_a_stage_and_anything_else_a_number(self) -> None:
        self.assertEqual(printed("see 00 7"), printed("see 7"))
        self.assertEqual(printed("see 01"), printed("see 200"))
        self.assertIn("Q[3][0] = 7", printed("see 7"))
        for stage in STAGES:
            with self.subTest(stage):
                self.assertNotEqual(printed(f"see {stage} 0"), printed(f"see {stage} 3"))
                self.assertEqual(printed(f"see {stage}"), printed(f"see {stage} 3"))

    def test_a_wrong_one_is_refused_in_a_line(self) -> None:
        for words in (["x"], ["00", "x"], ["02", "-1"], ["02", "x"], ["02", "1.5"], ["02", ""],
                      *([stage, "4"] for stage in STAGES)):
            with self.subTest(words):
                done = learn("see", *words)
                self.assertEqual(done.returncode, 2)
                self.assertRegex(done.stderr, r"\Asee: .*\n\Z")

    def test_colours_are_for_terminals(self) -> None:
        def on_a_terminal(**environment: str) -> str:
            ours, theirs = pty.openpty()
            subprocess.run([ROOT / "build/see02"], check=True, stdin=subprocess.DEVNULL, stdout=theirs,
                           env={"TERM": "xterm", **environment})
            os.close(theirs)
            text = b""
            while chunk := read_all(ours):
                text += chunk
            os.close(ours)
            return text.decode()

        self.assertNotIn("\033", printed("see 02"))
        self.assertIn("\033[", on_a_terminal())
        for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            self.assertNotIn("\033", on_a_terminal(**environment))


def read_all(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # its other end is closed
        return b""


if __name__ == "__main__":
    unittest.main()

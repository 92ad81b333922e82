"""What the tools that read and write source files share: marks, comments, whole files, errors in a line."""
from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Callable, NoReturn

MARK = re.compile(r"//\s*\[(?:step\b|more\b|blank\b|quote\b|end\]|end quote\]|end blank\])")
LEXEME = re.compile(r'(//[^\n]*|/\*.*?\*/)|R"([^\s()]*)\(.*?\)\2"|"(?:\\.|[^"\\\n])*"'
                    r"|(?<!\w)'(?:\\.|[^'\\\n])+'", re.S)


class Bad(Exception):
    """Something in a file is wrong: what, why, how to fix."""


def unmarked(lines: list[str]) -> list[str]:
    return [line for line in lines if not MARK.search(line)]


def bare(text: str, literals: bool = False) -> str:
    """The text, line for line, without comments; literals are filled with quotes unless kept."""
    def cover(m: re.Match[str]) -> str:
        return m[0] if literals and not m[1] else re.sub(r"[^\n]", " " if m[1] else '"', m[0])
    return LEXEME.sub(cover, text)


def write_whole(path: Path, text: str) -> None:
    """All of the file or nothing: nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(text.encode())
        os.replace(part, path)
    finally:
        if part.exists():
            part.unlink()


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def run(main: Callable[[], int]) -> NoReturn:
    """Errors are one line on stderr: 1 for what a file holds, 2 for a call that cannot work."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        message, code = "stopped", 130
    except BrokenPipeError:     # nobody reads on, as in `... | head`; nor what is still to be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Bad as error:
        message, code = str(error), 1
    except UnicodeDecodeError as error:
        message, code = f"a file is not UTF-8 ({error.reason}); save it as UTF-8", 1
    except OSError as error:
        message, code = f"{error.filename}: {error.strerror}; check the path", 2
    print(message, file=sys.stderr)
    sys.exit(code)

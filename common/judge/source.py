"""What the tools that read and write source files share: marks, comments, declarations, whole files, errors in a line."""
from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Callable, Iterator, NoReturn

MARK = re.compile(r"//\s*\[(?:step\b|more\b|blank\b|quote\b|end\]|end quote\]|end blank\])")
LEXEME = re.compile(r'(//[^\n]*|/\*.*?\*/)|R"([^\s()]*)\(.*?\)\2"|"(?:\\.|[^"\\\n])*"'
                    r"|(?<!\w)'(?:\\.|[^'\\\n])+'", re.S)
DECLARATION = re.compile(r"\s*(?:[A-Za-z_][\w:]*(?:\s*<[^;=]*>(?:::\w+)*)?[\s&*]+){1,5}"
                         r"(?P<name>[A-Za-z_]\w*)\s*[=;{(\[,]")
NO_TYPE = re.compile(r"\s*(?:else|return|throw|delete|goto|case|do|new|asm|co_\w+)\b")
VALUE = re.compile(r"\s*(?P<head>(?P<type>(?:[A-Za-z_][\w:<>]*[\s&*]+)+?)(?P<name>[A-Za-z_]\w*))\s*="
                   r"(?P<value>[^=;][^;]*);\s*")
CLOSING = {"(": ")", "[": "]", "{": "}"}


class Bad(Exception):
    """Something in a file is wrong: what, why, how to fix."""


# A hole of level 2, `// [04.e]`: alone before its lines, or behind the only one, with a comment or without.
LABEL = re.compile(r"//\s*\[(?P<name>\d\d\.[a-z])\]\s*")


def is_mark(line: str) -> bool:
    """Nothing but a mark."""
    return bool(MARK.search(line) or LABEL.fullmatch(line.strip()))


def unlabelled(line: str) -> str:
    """A line of code without the label behind it."""
    m = LABEL.search(line)
    return (line[:m.start()] + (f"// {line[m.end():]}" if line[m.end():] else "")).rstrip() if m else line


def unmarked(lines: list[str]) -> list[str]:
    return [unlabelled(line) for line in lines if not is_mark(line)]


def bare(text: str, literals: bool = False) -> str:
    """The text, line for line, without comments; literals are filled with quotes unless kept."""
    def cover(m: re.Match[str]) -> str:
        return m[0] if literals and not m[1] else re.sub(r"[^\n]", " " if m[1] else '"', m[0])
    return LEXEME.sub(cover, text)


def top_level(text: str) -> str | None:
    """The text with the contents of all brackets blanked; None if they do not balance."""
    out: list[str] = []
    due: list[str] = []
    for c in text:
        if c in ")]}" and (not due or due.pop() != c):
            return None
        out.append(" " if due and c != "\n" else c)
        if c in CLOSING:
            due.append(CLOSING[c])
    return None if due else "".join(out)


def declared(body: str, top: str) -> Iterator[tuple[str, int]]:
    """Names declared outside all brackets, with their offsets. A heuristic: a statement of the
    form `words name` before one of = ; { ( [ , declares name, and so do `, name` after it and
    `auto [a, b]`. Macros, declarations behind a label and function pointers escape it."""
    for statement in re.finditer(r"[^;}]+[;}]?", top):
        text, at = statement[0], statement.start()
        binding = re.match(r"[\s\w]*\bauto[\s&]*(\[)", text)
        if binding:
            start = at + binding.start(1)
            yield from ((n, start) for n in re.findall(r"\w+", body[start:].partition("]")[0]))
        m = DECLARATION.match(text)
        if m and not NO_TYPE.match(text):
            yield m["name"], at + m.start("name")
            for more in re.finditer(r",[\s&*]*(\w+)\s*[=;,{(\[]", text[m.end("name"):]):
                yield more[1], at + m.end("name") + more.start(1)


def rest_of_block(text: str) -> str:
    """Up to the brace that closes the enclosing block: there a name of the region dies."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "{") - (c == "}")
        if depth < 0:
            return text[:i]
    return text


def value_declaration(text: str) -> re.Match[str] | None:
    """head, type, name and value of `TYPE NAME = EXPR;`; None if the text is anything else."""
    m = VALUE.fullmatch(bare(text, literals=True))
    return m if m and "," not in (top_level(m["value"]) or ",") else None


# Eigen's products are most of what a mutant or a skeleton of 00 or 01 costs to build.
DOUBLES = re.compile(r"^template [^;{]*MatrixMap<const double>[^;{]*;\n", re.M)
HALVES = re.compile(r"^template void launch_\w+\([^;{]*<(?P<type>__half|__nv_bfloat16)>[^;{]*;\n", re.M)


def for_one_type(text: str) -> str:
    """Without the lesson's instantiations for double, or for __half where there are those for __nv_bfloat16: the program
    then takes them from the lesson's own object. A defect or a hole stands in the code of both types, and one is enough
    to catch it but where a test looks at double alone."""
    if any(found["type"] == "__nv_bfloat16" for found in HALVES.finditer(text)):
        text = HALVES.sub(lambda found: "" if found["type"] == "__half" else found[0], text)
    return DOUBLES.sub("", text)


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

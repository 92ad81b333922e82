"""Terms: what is bold is in the glossary, and no chapter uses a word of the glossary before it is introduced.

A term is bold at its first use, where it is defined: `**online softmax**`. Its entry in docs/glossary.md begins with its
name, and the first link of the entry leads to the page that defines it:

    **LSE (log-sum-exp).** The whole normaliser of a softmax in one number. ([01](../01_safe_softmax/README.md))

Parentheses hold other forms of the name; commas part names of one entry that are terms each. Checked:

- each bold term of a chapter or a page of docs/ has an entry, and is bold once, on the page that the entry names (on a
  page of docs/ also if the entry links to it in second place);
- each entry names such a page, and its name or a form of it is bold there, as a term or in a run-in heading;
- in reading order nothing is used before that place, unless its first use is linked, as `[lane](../docs/glossary.md)`,
  or its paragraph has a link to the page that defines it. From there on it is known.

Bold that ends with . ? ! or : is a run-in heading, a line of its own a title; in a table, of code alone or beginning
with a digit it is no term either. Names are found in any case, with a plural, as whole words: micro-lane is another.
Not searched for uses: code, tables, headings, texts of pictures, folds (hints and answers); README.md and docs/, which
nobody reads in order. Nor are names of one letter followed, names in brackets, and words of everyday English
(ORDINARY), since no program can tell when they are meant as terms.
"""

import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = Path("docs/glossary.md")
ORDINARY = frozenset("bank block device diagonal event full group host mark merge pass promise section skeleton skipped task "
                     "view".split())

BOLD = re.compile(r"\*\*(?=\S)((?:[^*]|\*(?!\*))+?)(?<=\S)\*\*")
ENTRY = re.compile(r"^\*\*(.+?)\.?\*\*(.*?)(?=^\*\*|\Z)", re.M | re.S)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]*)\)")
HIDDEN = (r"^```.*?^```[^\n]*$", r"<!--.*?-->", r"`[^`\n]+`")
UNREAD = (r"<[^>\n]*>", r"^\|[^\n]*$", r"^#[^\n]*$", r"!\[[^\]]*\]\([^)]*\)", r"(?<=\])\([^)\s]*\)")


@dataclass(frozen=True)
class Term:
    name: str
    names: tuple[str, ...]
    home: Path  # relative to the root, as all pages here
    also: frozenset[Path]
    line: int

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        names = [name for name in self.names if len(name) > 1 and name.lower() not in ORDINARY and name[0] != "("]
        words = [r"[\s-]+".join(re.escape(part) for part in re.split(r"[\s-]+", name)) for name in names]
        return re.compile(rf"(?<![\w-])(?:{'|'.join(words)})(?:s|es)?(?!\w)", re.I) if words else None


def blank(text: str, *patterns: str) -> str:
    """The text with all that matches turned into spaces: places and lines stay."""
    for pattern in patterns:
        text = re.sub(pattern, lambda found: re.sub(r"[^\n]", " ", found.group()), text, flags=re.M | re.S)
    return text


def line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def chapters(root: Path) -> list[Path]:
    """In reading order; a warm-up first, then the README, the pages of a folder by their numbers, those without one last."""
    def order(page: Path) -> tuple[str, int, bool, int]:
        stage, *folders, name = page.parts
        number = re.match(r"\d+", name)
        after = 0 if name == "README.md" and not folders else 2 if "backward" in folders else 1 if folders else 3
        if "on_cpu" in folders:
            after = 3  # tells of what the rungs have introduced
        if {"beyond", "ring"} & set(folders):
            after = 4  # after both ladders
        if "warmup" in folders:
            after = -1
        return stage, after, name != "README.md", int(number.group()) if number else 99
    found = [page.relative_to(root) for page in root.glob("0?_*/**/*.md")]
    skipped = {"mine", "hunt", "results", "check", "exercise"}
    return sorted((page for page in found if not skipped & set(page.parts)), key=order)


def bold_terms(text: str) -> list[tuple[int, str]]:
    """Place and words of what is bold and claims to be a term."""
    shown = blank(text, *HIDDEN)
    found = []
    for bold in BOLD.finditer(shown):
        words = " ".join(bold.group(1).split())
        start, end = shown.rfind("\n", 0, bold.start()) + 1, shown.find("\n", bold.end())
        whole = shown[start:end if end >= 0 else len(shown)].strip()
        titled = whole == bold.group() or whole.startswith("|")
        if re.match(r"[^\W\d]|\(", words) and words.rstrip("\"'”)")[-1:] not in (*".?!:",) and not titled:
            found.append((bold.start(), words))
    return found


def same(words: str, names: tuple[str, ...]) -> bool:
    def plain(name: str) -> str:
        return re.sub(r"[\s-]+", " ", name.lower())
    forms = {plain(words), plain(re.sub(r"(?<=\S) \(.*\)$", "", words))}
    return any(forms & {plain(name), plain(name) + "s", plain(name) + "es"} for name in names)


def glossary(root: Path) -> tuple[list[Term], list[str]]:
    text = (root / GLOSSARY).read_text(encoding="utf-8")
    terms: list[Term] = []
    problems = []
    for entry in ENTRY.finditer(text):
        head, place = entry.group(1), line(text, entry.start())
        links = [target.split("#")[0] for _, target in LINK.findall(entry.group(2)) if "://" not in target]
        pages = [(root / GLOSSARY.parent / target).resolve() for target in links]
        if not pages or not pages[0].is_file():
            problems.append(f'{GLOSSARY}:{place}: "{head}" names no page that defines it: its first link must lead there')
            continue
        forms = re.search(r"(?<=\S) \((.*)\)$", head)
        names = [head] if head.startswith("(") else re.split(r",\s*", head[:forms.start()] if forms else head)
        for name in names:
            others = re.split(r",\s*", forms.group(1)) if forms and name == names[-1] else []
            home, *more = [page.relative_to(root) for page in pages]
            term = Term(name, (name, *others), home, frozenset(more), place)
            for other in terms:
                for form in {form.lower() for form in other.names} & {form.lower() for form in term.names}:
                    problems.append(f'{GLOSSARY}:{place}: "{form}" belongs to "{other.name}", line {other.line}, already')
            terms.append(term)
    return terms, problems


def definitions(root: Path, terms: list[Term]) -> tuple[dict[Term, int], list[str]]:
    """Of each term the place on its page where it is bold; and what is bold without cause."""
    places: dict[Term, int] = {}
    problems = []
    docs = sorted(page.relative_to(root) for page in root.glob("docs/*.md"))
    for page in [*chapters(root), *(page for page in docs if page != GLOSSARY)]:
        text = (root / page).read_text(encoding="utf-8")
        for place, words in bold_terms(text):
            said = f'{page}:{line(text, place)}: "{words}" is bold'
            term = next((term for term in terms if same(words, term.names)), None)
            if term is None:
                problems.append(f"{said} and not in {GLOSSARY}: give it an entry; if it is no term, use italics, "
                                "or end a run-in heading with . ? ! or : inside the bold")
            elif page in term.also and page.parts[0] == "docs":
                continue
            elif term.home != page:
                problems.append(f"{said}, but by {GLOSSARY}:{term.line} it is defined in {term.home}: no bold here, "
                                "or name this page first there")
            elif term in places:
                problems.append(f"{said} a second time: bold is for the first use, where it is defined")
            else:
                places[term] = place
    for term in terms:
        if term in places:
            continue
        text = blank((root / term.home).read_text(encoding="utf-8"), *HIDDEN)
        names = "|".join(re.escape(name) for name in term.names)
        found = [bold for bold in BOLD.finditer(text)
                 if re.search(rf"(?<!\w)(?:{names})(?:s|es)?(?!\w)", " ".join(bold.group(1).split()), re.I)]
        if found:
            places[term] = found[0].start()
        else:
            problems.append(f'{GLOSSARY}:{term.line}: "{term.name}" is nowhere bold in {term.home}: make it bold there '
                            "at its first use, with a sentence that says what it is, or name another page")
    return places, problems


def early_uses(root: Path, terms: list[Term], places: dict[Term, int]) -> list[str]:
    """Of each page that uses a term before it is introduced: the first use."""
    problems = []
    known: set[Term] = set()
    for page in chapters(root):
        linked = blank((root / page).read_text(encoding="utf-8"), *HIDDEN)
        while (open_folds := blank(linked, r"<details>(?:(?!<details>).)*?</details>")) != linked:
            linked = open_folds
        shown = blank(linked, *UNREAD)
        links = [(found.start(1), found.end(1), (root / page.parent / found.group(2).split("#")[0]).resolve())
                 for found in LINK.finditer(linked)]
        for term in terms:
            use = term.pattern.search(shown) if term not in known and term.pattern else None
            here = term.home == page
            if here:
                known.add(term)
            if use is None or here and places.get(term, 0) <= use.start():
                continue
            start, end = shown.rfind("\n\n", 0, use.start()) + 1, shown.find("\n\n", use.end())
            if any(first <= use.start() and use.end() <= last and to == root / GLOSSARY
                   or start <= first and (last <= end or end < 0) and to == root / term.home for first, last, to in links):
                known.add(term)
                continue
            where = f"line {line(shown, places[term])}, further down" if here else term.home
            problems.append(f'{page}:{line(shown, use.start())}: "{" ".join(use.group().split())}" is used here, but defined '
                            f"in {where}: define it here, link it to the glossary, or use other words")
    return problems


def check(root: Path = ROOT) -> list[str]:
    terms, problems = glossary(root)
    places, wrong = definitions(root, terms)
    return problems + wrong + early_uses(root, terms, places)


def main() -> int:
    problems = check()
    for problem in problems:
        print(problem)
    print(f"{len(glossary(ROOT)[0])} terms, {len(chapters(ROOT))} pages in reading order, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

"""The course's terms are in order, and each way to get them wrong is told with file, line and what to do."""

import tempfile
import unittest
from pathlib import Path

import check_terms

GLOSSARY = """# Glossary

**Lane.** One element of a SIMD register. ([00](../00_first/README.md))

**Log-sum-exp (LSE).** A sum in one number. ([01](../01_second/README.md))

**Overflow, underflow.** Too large; too small. ([01](../01_second/README.md), [00](../00_first/README.md))

**Roof.** The most that a machine can do. ([measuring](measuring.md))
"""
FIRST = """# 00 · Lanes and log-sum-exps

**A heading.** A **lane** is one element, no half-LSE. `LSE` and <b lse> are not seen, nor is ![the LSE](lse.svg).

| a table | **with bold** |

**A title**

<details><summary>fold</summary>

<details><summary>in a fold</summary> LSE </details></details>
"""
SECOND = """# 01

The **log-sum-exp** (LSE), **overflow** and **underflow**; **3 % more** lanes, **`code`**. The
[roof](../docs/glossary.md) is high.
"""


class Terms(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for page, text in {"docs/glossary.md": GLOSSARY, "docs/measuring.md": "The **roof** is measured.\n",
                           "00_first/README.md": FIRST, "01_second/README.md": SECOND}.items():
            (self.root / page).parent.mkdir(exist_ok=True)
            (self.root / page).write_text(text, encoding="utf-8")

    def change(self, page: str, old: str, new: str) -> list[str]:
        text = (self.root / page).read_text(encoding="utf-8")
        self.assertEqual(text.count(old), 1, old)
        (self.root / page).write_text(text.replace(old, new), encoding="utf-8")
        return check_terms.check(self.root)

    def says(self, problems: list[str], *words: str) -> None:
        self.assertEqual(len(problems), 1, problems)
        for word in words:
            self.assertIn(word, problems[0])

    def test_a_warm_up_is_read_before_its_chapter(self) -> None:
        (self.root / "01_second/warmup").mkdir()
        (self.root / "01_second/warmup/README.md").write_text("Lanes overflow.\n", encoding="utf-8")
        self.says(check_terms.check(self.root), "warmup/README.md:1", '"overflow" is used here, but defined in 01_second/README.md')

    def test_the_course(self) -> None:
        if problems := check_terms.check():
            self.fail("\n" + "\n".join(problems))

    def test_all_in_order(self) -> None:
        self.assertEqual(check_terms.check(self.root), [])

    def test_bold_without_entry(self) -> None:
        self.says(self.change("00_first/README.md", "one element", "**one element**"),
                  '00_first/README.md:3: "one element" is bold and not in docs/glossary.md', "italics")

    def test_bold_on_another_page(self) -> None:
        self.says(self.change("01_second/README.md", "lanes", "**lanes**"),
                  '01_second/README.md:3: "lanes" is bold', "docs/glossary.md:3", "00_first/README.md")

    def test_bold_in_a_page_of_docs_as_well(self) -> None:
        self.says(self.change("docs/measuring.md", "is measured", "and each **lane**"), 'docs/measuring.md:1: "lane" is bold')
        self.assertEqual(self.change("docs/glossary.md", "([00](../00_first/README.md))\n\n**Log",
                                     "([00](../00_first/README.md), [m](measuring.md))\n\n**Log"), [])

    def test_bold_twice(self) -> None:
        self.says(self.change("01_second/README.md", "(LSE)", "(**LSE**)"), '01_second/README.md:3: "LSE"', "second time")

    def test_nowhere_bold(self) -> None:
        self.says(self.change("01_second/README.md", "**underflow**", "underflow"),
                  'docs/glossary.md:7: "underflow" is nowhere bold in 01_second/README.md')

    def test_a_run_in_heading_defines(self) -> None:
        self.assertEqual(self.change("01_second/README.md", "**underflow**", "**What underflow is.**"), [])

    def test_an_entry_without_a_page(self) -> None:
        problems = self.change("docs/glossary.md", "([measuring](measuring.md))", "([elsewhere](nothing.md))")
        self.assertIn('docs/glossary.md:9: "Roof" names no page', problems[0])

    def test_one_name_twice(self) -> None:
        problems = self.change("docs/glossary.md", "**Roof.**", "**Roof (lane).**")
        self.assertIn('docs/glossary.md:9: "lane" belongs to "Lane", line 3, already', problems[0])

    def test_used_on_an_earlier_page(self) -> None:
        problems = self.change("00_first/README.md", "`LSE`", "LSE")
        self.says(problems, '00_first/README.md:3: "LSE" is used here, but defined in 01_second/README.md')
        self.says(self.change("00_first/README.md", "LSE and", "[log sum exps](../README.md) and"), '"log sum exps"')
        self.assertEqual(self.change("00_first/README.md", "../README.md", "../docs/glossary.md"), [])

    def test_used_beside_a_link_to_its_page(self) -> None:
        self.assertEqual(self.change("00_first/README.md", "`LSE`", "the LSE of [01](../01_second/README.md)"), [])
        self.says(self.change("00_first/README.md", "the LSE of", "an LSE\n\nhere or"), "00_first/README.md:3")

    def test_used_further_up(self) -> None:
        self.says(self.change("01_second/README.md", "The **log", "LSEs; **log"), '01_second/README.md:3: "LSEs"', "line 3")

    def test_a_term_of_the_docs_needs_a_link(self) -> None:
        self.says(self.change("01_second/README.md", "[roof](../docs/glossary.md)", "roof"),
                  '01_second/README.md:4: "roof" is used here, but defined in docs/measuring.md')

    def test_words_of_everyday_english(self) -> None:
        self.assertEqual(self.change("docs/glossary.md", "Log-sum-exp (LSE)", "Log-sum-exp (LSE, pass)"), [])
        self.assertEqual(self.change("00_first/README.md", "A **lane**", "It may pass. A **lane**"), [])


if __name__ == "__main__":
    unittest.main()

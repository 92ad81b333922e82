"""06's count of instructions: which jumps back make a loop over tiles, and what is counted in it."""
from __future__ import annotations

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "06_optimized/check"))
from loops import FEWEST, kernels, loops, numbered  # noqa: E402

EXPONENTIALS = ("MUFU.EX2 R1, R2",) * FEWEST


def sass(*instructions: str, name: str = "kernel") -> str:
    lines = [f"        /*{16 * i:04x}*/    {text} ;    /* 0x00 */" for i, text in enumerate(instructions)]
    return "\n".join(["arch = sm_90a", f"\t\tFunction : {name}", *lines])


class Loops(unittest.TestCase):
    def found(self, *instructions: str) -> list[tuple[int, int, int]]:
        (_, _, code), = kernels(sass(*instructions))
        return [(loop.instructions, loop.counts["products"], loop.counts["exponentials"]) for loop in loops(code)]

    def test_a_loop_multiplies_and_takes_exponentials(self) -> None:
        body = ("HGMMA.64x128x16.F32 R24, gdesc[UR8]", "@!P0 MUFU.EX2 R1, R2", *EXPONENTIALS, "@P1 BRA 0x10")
        self.assertEqual(self.found("NOP", *body, "EXIT"), [(3 + FEWEST, 1, 1 + FEWEST)])
        self.assertEqual(self.found("NOP", "FADD R1, R1, R2", *EXPONENTIALS, "@P1 BRA 0x10"), [])
        self.assertEqual(self.found("NOP", "HMMA.16816.F32 R1, R2", *EXPONENTIALS[1:], "@P1 BRA 0x10"), [])
        self.assertEqual(self.found(f"@P1 BRA 0x{16 * len(body):x}", *body[:-1], "EXIT"), [])  # forward

    def test_a_wait_that_jumps_back_into_a_loop_is_none(self) -> None:
        loop = ("SYNCS R1", f"@!P1 BRA 0x{16 * (5 + FEWEST):x}", "HGMMA R24", *EXPONENTIALS, "@P1 BRA 0x0")
        self.assertEqual(self.found(*loop, "EXIT", "SYNCS R1", "BRA 0x10"), [(4 + FEWEST, 1, FEWEST)])

    def test_the_shortest_comes_first(self) -> None:
        masked = ("HGMMA R24", "FSEL R1, R2", *EXPONENTIALS, "@P1 BRA 0x0")
        self.assertEqual(self.found(*masked, "HGMMA R24", *EXPONENTIALS, f"BRA P2, 0x{16 * len(masked):x}"),
                         [(2 + FEWEST, 1, FEWEST), (3 + FEWEST, 1, FEWEST)])

    def test_kernels_and_lines(self) -> None:
        two = sass("NOP", name="a") + "\n" + sass("NOP", "EXIT", name="b").replace("sm_90a", "sm_80")
        self.assertEqual([(name, architecture, len(code)) for name, architecture, code in kernels(two)],
                         [("a", "sm_90a", 1), ("b", "sm_80", 2)])
        self.assertEqual(numbered(["f.cu k sm_90a 3", "f.cu k sm_90a 4", "g.cu k sm_90a 5"]),
                         ["f.cu k 1 sm_90a 3", "f.cu k 2 sm_90a 4", "g.cu k 1 sm_90a 5"])


if __name__ == "__main__":
    unittest.main()

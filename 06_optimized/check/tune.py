"""Which tiles fa2 and hopper could have, for ./learn tune (common/measure/tune)."""

from __future__ import annotations

import re
from itertools import product

from space import REGISTERS_OF_A_THREAD, REGISTERS_OF_AN_SM, ROOT, Bad, Candidate, Gpu, Space

FORWARD = "06_optimized/forward"


def too_much(shared: int, limit: int) -> str:
    return f"needs {shared} bytes of shared memory, a block has at most {limit}" if shared > limit else ""


class Fa2(Space):
    """`groups` of 16 rows for each of `warps` warps, tiles of Bc keys, Q in registers or read again for each tile.

    Shared memory: Q_i, K_j and V_j in 16 bits. Registers of a thread: O, S and, in half as many numbers each, Q.
    """

    def candidates(self, gpu: Gpu) -> list[Candidate]:
        found = []
        for d, warps, groups, Bc, Q_in in product(self.d, (4, 8), (1, 2), (32, 64, 96, 128, 192), (False, True)):
            Br, threads = 16 * groups * warps, 32 * warps
            shared = (Br + 2 * Bc) * d * 2
            registers = groups * (d // 2 + Bc // 2 + (d // 4 if Q_in else 4)) + self.besides
            room = min(REGISTERS_OF_A_THREAD, REGISTERS_OF_AN_SM // (2 * threads))
            # The rule of the code, for shapes that it does not have too.
            unrolled = d // 16 if Q_in else 8 if d == 256 else 1 if Bc > 64 else 2
            c = Candidate(
                name(Br, Bc, warps=warps, Q="registers" if Q_in else ""),
                d,
                threads,
                shared,
                registers,
                f"""
struct Tuned {{
  static constexpr int D = {d}, Bc = {Bc}, groups = {groups}, Br = 16 * groups * warps;
  static constexpr bool Q_in_registers = {str(Q_in).lower()};
  static constexpr int unrolled = {unrolled};
  static constexpr std::size_t shared_bytes = (Br + 2 * Bc) * D * 2;
}};""",
                (("constexpr int warps = 4,", f"constexpr int warps = {warps},"),),
            )
            c.hand_made = c.name in {self.hand_made(d, mask, 1024) for mask in ("none", "causal")}
            if not c.hand_made:
                c.dead = too_much(shared, gpu.shared_block) or (
                    f"about {registers} registers, {room} are there with two blocks of {threads} threads"
                    if registers > room
                    else ""
                )
            found.append(c)
        return found

    def hand_made(self, d: int, mask: str, n: int) -> str:
        text = (ROOT / self.file).read_text(encoding="utf-8")
        for line in (
            "if (p.d > 128) return run(launch<Tile<256, 64>, T>);",
            "if (p.d > 64) return run(launch<Tile<128, 64>, T>);",
            "if (p.causal == Causal::none) return run(launch<Tile<64, 128>, T>);",
            "run(launch<Tile<64, 64>, T>);",
        ):
            if line not in text:
                raise Bad(f"{self.file} chooses other tiles than 06_optimized/check/tune.py says: no '{line}'")
        Bc = 128 if d == 64 and mask == "none" else 64
        return name(16 * 4 * (2 if d <= 128 else 1), Bc, warps=4, Q="registers" if d == 64 and Bc == 64 else "")


class Hopper(Space):
    """`groups` warpgroups of 64 rows, tiles of Bc keys, `stages` of K and V, buffers of Q, and what O leaves through.

    Shared memory: all of these in 16 bits, and 1 KiB for barriers. Registers: O and S, and P in half as many.
    """

    def candidates(self, gpu: Gpu) -> list[Candidate]:
        widths = {
            int(n)
            for n in re.findall(
                r"struct Wgmma<__nv_bfloat16, (\d+), false>",
                (ROOT / "06_optimized/ptx/wgmma_shapes.inc").read_text(encoding="utf-8"),
            )
        }
        by_hand = {key: name for key, (name, _) in self.in_code().items()}
        found = []
        for d, groups, Bc, stages, Qs, O in product(
            self.d, (1, 2, 3, 4), range(48, 272, 16), (2, 3), (1, 2), ("own", "V")
        ):
            Br, threads = 64 * groups, 128 * (groups + 1)
            shared = 1024 + 2 * d * (Br * Qs + 2 * stages * Bc + (Br if O == "own" else 0))
            registers = d // 2 + Bc // 2 + Bc // 4 + self.besides
            room = {1: 240, 2: 240, 3: 160, 4: 112}[groups]
            branch = (
                "none" if groups == 3 or d == 256
                else "predicate_on_alpha_too" if d == 128 and Bc > 128
                else "after_first_maximum"
            )
            c = Candidate(
                name(Br, Bc, stages=stages, Qs=Qs, O=O),
                d,
                threads,
                shared,
                registers,
                f"""
struct Tuned : Tiles<{d}, {groups}, {Bc}> {{
  static constexpr int stages = {stages}, Q_buffers = {Qs};
  static constexpr Through O = Through::{O};
  static constexpr Branch branch = Branch::{branch};
}};""",
            )
            c.hand_made = any(c.name == other for (at, _), other in by_hand.items() if at == d)
            if not c.hand_made:
                c.dead = (
                    (f"ptx/ has no product of {Bc} columns" if Bc not in widths else "")
                    or ("one group: no other one's products run under its softmax" if groups == 1 else "")
                    or (f"four groups: {room} registers for each thread" if groups == 4 else "")
                    or too_much(shared, gpu.shared_block)
                    or (f"about {registers} registers, {groups} groups have {room} each" if registers > room else "")
                    or (
                        "O leaves through two buffers of V, for two groups"
                        if O == "V" and (groups, stages) != (2, 2)
                        else ""
                    )
                    or (
                        "a third buffer of K and V where those of Q are short"
                        if stages == 3 and Qs == 1 and d < 256
                        else ""
                    )
                )
            found.append(c)
        return found

    def in_code(self) -> dict[tuple[int, str], tuple[str, str]]:
        """The shapes in shapes.cuh: (d, "", "Short" or "Long") to the candidate's name and the struct's."""
        text = (ROOT / FORWARD / "shapes.cuh").read_text(encoding="utf-8")
        found: dict[tuple[int, str], tuple[str, str]] = {}
        bodies: dict[str, tuple[tuple[int, ...], str]] = {}
        for struct, base, body in re.findall(r"^struct (D\w+) : (.+?) \{\n(.*?)^\};", text, re.M | re.S):
            sizes = tuple(map(int, re.findall(r"\d+", base))) if base.startswith("Tiles<") else bodies[base][0]
            inherited = "" if base.startswith("Tiles<") else bodies[base][1]
            bodies[struct] = sizes, body + inherited
            of_Q = re.search(r"Q_buffers = (\d)", bodies[struct][1])
            of_O = re.search(r"Through::(\w+)", bodies[struct][1])
            if len(sizes) != 3 or not of_Q or not of_O:
                raise Bad(f"shapes.cuh: cannot read {struct}")
            d, groups, Bc = sizes
            if "cluster = 2" in body:  # no choice of sizes (docs/tuning.md)
                continue
            key = d, next((kind for kind in ("Short", "Long") if struct.endswith(kind)), "")
            found[key] = name(64 * groups, Bc, stages=2, Qs=int(of_Q[1]), O=of_O[1]), struct
        return found

    def hand_made(self, d: int, mask: str, n: int) -> str:
        text = (ROOT / self.file).read_text(encoding="utf-8")
        for line in (
            "if (p.d > 128) return run(pairs ? launch<D256Pair, T> : launch<D256, T>);",
            "if (p.d > 64) return run(p.Nk >= 6144 ? launch<D128Long, T> : launch<D128, T>);",
            "run(taken && p.Nk <= 1024 ? launch<D64Short, T> : launch<D64, T>);",
        ):
            if line not in text:
                raise Bad(f"{self.file} chooses other tiles than 06_optimized/check/tune.py says: no '{line}'")
        short, long = d == 64 and mask == "causal" and n <= 1024, d == 128 and n >= 6144
        return self.in_code()[d, "Short" if short else "Long" if long else ""][0]


def name(Br: int, Bc: int, warps: int = 0, Q: str = "", stages: int = 0, Qs: int = 0, O: str = "") -> str:
    """One word, for tables and files: 128x64 is rows by keys."""
    return (
        f"{Br}x{Bc}"
        + (f"_warps{warps}" if warps else "")
        + (f"_Q_in_{Q}" if Q else "")
        + (f"_stages{stages}_Q{Qs}_O_by_{O}" if stages else "")
    )


SPACES: list[Space] = [
    Fa2(
        "fa2",
        f"{FORWARD}/fa2.cu",
        "bf16",
        ("fp16", "bf16"),
        80,
        False,
        (64, 128, 256),
        (1024, 4096, 16384),
        2048,
        16384,
        """
template <class T>
bool launch_tuned(const Problem& p, const Forward<T>& t, const TunedCall& c) {
  if (p.d > Tuned::D) return false;
  launch<Tuned>(p, t, c.scale, static_cast<cudaStream_t>(c.stream));
  return true;
}""",
        24,
        128,
    ),
    Hopper(
        "hopper",
        f"{FORWARD}/hopper.cu",
        "bf16",
        ("fp16", "bf16"),
        90,
        True,
        (64, 128, 256),
        (1024, 4096, 16384),
        2048,
        16384,
        """
template <class T>
bool launch_tuned(const Problem& p, const Forward<T>& t, const TunedCall& c) {
  if (p.d > Tuned::D || p.Nk == 0 || p.d % 8 || !has_tensor_map(t.Q, p.B, p.Hq, p.Nq) ||
      !has_tensor_map(t.K, p.B, p.Hkv, p.Nk) || !has_tensor_map(t.V, p.B, p.Hkv, p.Nk) ||
      !has_tensor_map(t.O, p.B, p.Hq, p.Nq))
    return false;
  launch<Tuned>(p, t, c.scale, c.taken, static_cast<cudaStream_t>(c.stream), false);
  return true;
}""",
        24,
    ),
]

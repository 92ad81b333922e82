"""Which tiles 04's last rung could have, for ./learn tune (common/measure/tune)."""

from __future__ import annotations

from itertools import product

from space import REGISTERS_OF_A_THREAD, REGISTERS_OF_AN_SM, ROOT, Bad, Candidate, Gpu, Space


class LongestFirst(Space):
    """`warps` of a block, blocks that an SM shall hold, and floats of a chunk of K or V. A thread holds 8 x 8.

    Shared memory: Q_i, two chunks, and P, with their pads, as Shape in the kernel's file adds them up. Registers:
    S and O, 64 each, and eight float4 of Q_i.
    """

    def candidates(self, gpu: Gpu) -> list[Candidate]:
        found = []
        for d, warps, blocks, chunk in product(self.d, (2, 4, 8), (1, 2, 3, 4), (1024, 2048, 4096, 8192)):
            lanes = d // 8
            WR, Bc, threads = 8 * 32 // lanes, 8 * lanes, 32 * warps
            Br, KX = warps * WR, min(d, chunk // Bc)
            VK = min(Bc, chunk // d)
            shared = 4 * (Br * d + Br + 2 * max(Bc * KX + Bc // 2, VK * d) + warps * (Bc * WR + Bc))
            registers = 64 + 64 + 32 + self.besides
            room = min(REGISTERS_OF_A_THREAD, REGISTERS_OF_AN_SM // (blocks * threads))
            c = Candidate(
                f"{Br}x{Bc}_chunk{chunk}_blocks{blocks}",
                d,
                threads,
                shared,
                registers,
                f"constexpr int tuned_D = {d};",
                (
                    ("warps = 4, threads", f"warps = {warps}, threads"),
                    ("4096 / Bc", f"{chunk} / Bc"),
                    ("4096 / D)", f"{chunk} / D)"),
                    ("__launch_bounds__(threads, 2)", f"__launch_bounds__(threads, {blocks})"),
                ),
            )
            c.hand_made = c.name == self.hand_made(d, "none", 1024)
            if not c.hand_made:
                c.dead = (
                    f"needs {shared} bytes of shared memory, a block has at most {gpu.shared_block}"
                    if shared > gpu.shared_block
                    else (
                        f"{blocks} blocks need {blocks * (shared + 1024)} bytes of shared memory, "
                        f"an SM has {gpu.shared_sm}"
                        if blocks * (shared + 1024) > gpu.shared_sm
                        else (
                            f"about {registers} registers, {room} are there with {blocks} blocks of {threads} threads"
                            if registers > room
                            else (
                                f"{blocks * warps} warps on an SM, where registers allow eight: fewer hide less"
                                if blocks * warps < 4
                                else ""
                            )
                        )
                    )
                )
            found.append(c)
        return found

    def hand_made(self, d: int, mask: str, n: int) -> str:
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if "warps = 4, threads" not in text or "__launch_bounds__(threads, 2)" not in text:
            raise Bad(f"{self.file} has another shape than 04_cuda_forward/check/tune.py says")
        return f"{4 * 8 * 32 // (d // 8)}x{d}_chunk4096_blocks2"


SPACES: list[Space] = [
    LongestFirst(
        "longest_first",
        "04_cuda_forward/ladder/13_longest_first.cu",
        "fp32",
        ("fp32",),
        80,
        False,
        (64, 128),
        (1024, 4096),
        2048,
        4096,
        """
template <class T>
bool launch_tuned(const Problem& p, const Forward<T>& t, const TunedCall& c) {
  if (p.d > tuned_D || p.d <= tuned_D / 2) return false;  // narrow rows have a shape of their own
  launch<tuned_D>(p, t, c.scale, static_cast<cudaStream_t>(c.stream));
  return true;
}""",
        24,
    ),
]

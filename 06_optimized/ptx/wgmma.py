"""Writes wgmma_shapes.inc: one wrapper of wgmma.mma_async for each width N, which differ by the list of registers.

    python3 06_optimized/ptx/wgmma.py 06_optimized/ptx/wgmma_shapes.inc
"""

import sys
from pathlib import Path

WIDTHS = (64, 80, 96, 128, 144, 160, 176, 192, 256)
TYPES = (("__half", "f16"), ("__nv_bfloat16", "bf16"))


def numbers(first: int, count: int) -> str:
    return ", ".join(f"%{n}" for n in range(first, first + count))


def wrapper(n: int, fragment: bool, kind: str, short: str) -> str:
    count = n // 2
    outputs = ", ".join(f'"+f"(C[{i}])' for i in range(count))
    a = f"{{{numbers(count, 4)}}}" if fragment else f"%{count}"
    b, scale, trans = (count + 4, count + 5, count + 6) if fragment else (count + 1, count + 2, count + 3)
    transposes = f"%{trans}" if fragment else f"0, %{trans}"
    argument = "const std::uint32_t (&A)[4]" if fragment else "std::uint64_t A"
    inputs = '"r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3])' if fragment else '"l"(A)'
    return (f"template <>\nstruct Wgmma<{kind}, {n}, {'true' if fragment else 'false'}> {{\n"
            f"  template <int transposed>\n"
            f"  __device__ static void run(float (&C)[{count}], {argument}, std::uint64_t B, int add) {{\n"
            f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{scale}, 0;\\n"\n'
            f'                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{short}.{short} "\n'
            f'                 "{{{numbers(0, count)}}}, {a}, %{b}, p, 1, 1, {transposes}; }}"\n'
            f"                 : {outputs}\n"
            f'                 : {inputs}, "l"(B), "r"(add), "n"(transposed));\n'
            f"  }}\n}};\n")


def main() -> int:
    head = ("// Written by wgmma.py; wgmma.cuh says what it is. clang-format off\n#pragma once\n\n"
            "namespace fa::optimized {\n\n"
            "template <class T, int N, bool A_in_registers>\nstruct Wgmma;\n\n")
    body = "".join(wrapper(n, fragment, *kind) for n in WIDTHS for fragment in (False, True) for kind in TYPES)
    Path(sys.argv[1]).write_text(head + body + "\n}  // namespace fa::optimized\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env bash
# A change that should leave the kernels as they are: does it? Compiles .cu files of two checkouts
# and compares registers, shared memory and machine code. Needs nvcc, cuobjdump, nvdisasm; no GPU.
#   common/tests/same_machine_code.sh ../before . 90a 06_optimized/forward/hopper.cu ...
set -euo pipefail
[ $# -ge 4 ] || { echo "usage: $0 BEFORE AFTER ARCHITECTURE FILE..." >&2; exit 2; }
for tool in nvcc cuobjdump nvdisasm; do
  command -v "$tool" > /dev/null || { echo "$0: $tool is not in the PATH" >&2; exit 3; }
done
before=$1 after=$2 arch=$3
shift 3
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# Names in anonymous namespaces hold numbers that differ from run to run.
code_of() {  # CHECKOUT FILE
  (cd "$1" && nvcc -O3 -std=c++20 -I. -diag-suppress=554 -cubin -o "$out/cubin" \
    -gencode "arch=compute_$arch,code=sm_$arch" "$2") || exit 1
  cuobjdump -res-usage -sass "$out/cubin" |
    sed -E 's/[0-9]+_GLOBAL__N__\w+_cu_(main|[0-9a-f]{8}[0-9_]*)//g'
}

differ=0
for file; do
  code_of "$before" "$file" > "$out/before"
  code_of "$after" "$file" > "$out/after"
  if cmp -s "$out/before" "$out/after"; then
    echo "same: $file ($(grep -cE '^ +/\*[0-9a-f]{4,}\*/' "$out/after") instructions)"
  else
    echo "DIFFERS: $file ($(diff "$out/before" "$out/after" | grep -c '^[<>]') lines)"
    differ=1
  fi
done
exit $differ

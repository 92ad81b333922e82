#!/bin/sh
# Every kernel of the CUDA stages under the four tools of compute-sanitizer, on a short list of
# tests. Needs a GPU and a build.
#
#   common/harness/sanitize.sh [BUILD_DIR] [STAGE...]      default: build, all stages built there
set -eu
build=${1:-build}
[ $# -eq 0 ] || shift
[ -d "$build" ] || { echo "sanitize: no folder '$build'; give the build folder" >&2; exit 2; }
command -v compute-sanitizer >/dev/null ||
  { echo "sanitize: compute-sanitizer was not found; it comes with the CUDA Toolkit" >&2; exit 3; }
# Strides, groups, masks and lengths: what makes a kernel go astray.
filter='*.Heads:*.Layouts:*.MaskedRows:*.KeyLengths:*.ClampedLengths:*.BackwardLayouts'
filter="$filter:*.BackwardKeyLengths:*.BackwardScale:*.BackwardEmpty:Gpu.DeltaIsTheRowSum"
failed=0 runs=0
for tests in "$build"/0?_*/stage0?_on_gpu_tests; do
  [ -x "$tests" ] || continue
  name=$(basename "$tests")
  stage=$(printf '%s' "$name" | cut -c6-7)
  case " ${*:-$stage} " in *" $stage "*) ;; *) continue ;; esac
  list=$filter
  # Both ladders: the rungs on masks, groups and ragged tiles, the kernels of the whole contract on what else there is.
  [ "$stage" != 06 ] || {
    list='*.Heads:*.MaskedRows:fa2.Layouts:fa2.KeyLengths:hopper.Layouts:hopper.KeyLengths'
    list="$list:GpuBackward.EveryRungOnRaggedTiles:backward_swizzle.BackwardKeyLengths"
    list="$list:backward_two_kernels.BackwardKeyLengths:backward_hopper.BackwardKeyLengths"
  }
  for tool in memcheck racecheck initcheck synccheck; do
    runs=$((runs + 1))
    if FA_REQUIRE_GPU=1 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
      "$tests" --gtest_brief=1 --gtest_filter="$list" >"$build/sanitize.log" 2>&1; then
      echo "$name: $tool clean ($(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$build/sanitize.log" | tail -n 1 | sed 's/=* *//'))"
    else
      echo "$name: $tool FAILED"
      tail -n 120 "$build/sanitize.log"
      failed=$((failed + 1))
    fi
  done
done
[ "$runs" -gt 0 ] || { echo "sanitize: no stage is built for a GPU in '$build'" >&2; exit 3; }
echo "$runs runs, $failed failed"
[ "$failed" -eq 0 ]

#!/bin/sh
# Every kernel of the CUDA stages under the four tools of compute-sanitizer, on a short list of
# tests. Needs a GPU and a build.
#
#   common/judge/sanitize.sh [BUILD_DIR] [STAGE...]      default: build, all stages built there
#
# COMPUTE_SANITIZER names another compute-sanitizer than that in the PATH. A new one without a new
# CUDA Toolkit: pip install nvidia-cuda-sanitizer-api.
set -eu
build=${1:-build}
[ $# -eq 0 ] || shift
[ -d "$build" ] || { echo "sanitize: no folder '$build'; give the build folder" >&2; exit 2; }
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
command -v "$sanitizer" >/dev/null ||
  { echo "sanitize: $sanitizer was not found; it comes with the CUDA Toolkit" >&2; exit 3; }
version=$("$sanitizer" --version | sed -n 's/^Version \([0-9]*\)\.\([0-9]*\).*/\1.\2/p')
echo "compute-sanitizer $version"
# Before 2026.4 racecheck does not follow who waits for whom by mbarriers, and reports what is right.
follows_mbarriers=no
[ "$(printf '%s\n' 2026.4 "$version" | sort -V | head -n 1)" != 2026.4 ] || follows_mbarriers=yes
# Strides, groups, masks and lengths: what makes a kernel go astray.
filter='*.Heads:*.Layouts:*.MaskedRows:*.KeyLengths:*.ClampedLengths:*.BackwardLayouts'
filter="$filter:*.BackwardKeyLengths:*.BackwardScale:*.BackwardEmpty:Gpu.DeltaIsTheRowSum"
failed=0 runs=0 skipped=0
for tests in "$build"/0?_*/stage0?_on_gpu_tests "$build"/06_*/stage06_ring_half_on_gpu_tests; do
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
    # The walks: each kernel on a few tiles; and the ring's passes over rows, by ranks that share the GPU.
    list="$list:decode.Tiles:decode.ThirtyTwoRows:masks.Tiles:scores.Tiles:scores.TilesOfGradients:packed.Tiles:packed.Gradients"
    list="$list:dropout.Tiles:weights.Tiles:masks.HopperByName*:packed.HopperForward:packed.HopperBackward:OnOneGpu.*"
    list="$list:masks.HopperCounts*:*.HopperWithTallTiles:scores.HopperForward:scores.HopperBackward"
    list="$list:dropout.HopperShapes:dropout.HopperStays"
    # And what keeps a call's numbers that the host cannot see from leading outside: lengths, offsets, lists, pages.
    list="$list:*.*AreClamped:*.*BrokenPromises*:decode.NothingIsAppended*:decode.PairsOfSixteenWarps"
  }
  for tool in memcheck racecheck initcheck synccheck; do
    if [ "$stage-$tool-$follows_mbarriers" = 06-racecheck-no ]; then
      echo "$name: racecheck not run: needs compute-sanitizer 2026.4 or later; see COMPUTE_SANITIZER in $0"
      skipped=$((skipped + 1))
      continue
    fi
    barriers=
    [ "$tool" != racecheck ] || barriers='--num-cuda-barriers 64'
    runs=$((runs + 1))
    # shellcheck disable=SC2086
    if FA_REQUIRE_GPU=1 "$sanitizer" --tool "$tool" $barriers --error-exitcode 9 --print-limit 20 \
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
echo "$runs runs, $failed failed, $skipped not run"
[ "$failed" -eq 0 ]

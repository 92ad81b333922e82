#!/bin/sh
# Wrong use of ./learn: one line that says what is wrong, and the exit code that it promises.
set -u
failures=0
expect() { # CODE WORDS COMMAND...
  code=$1 words=$2
  shift 2
  text=$("$@" 2>&1 </dev/null)
  got=$?
  lines=$(printf '%s\n' "$text" | wc -l)
  if [ "$got" -ne "$code" ] || [ "$lines" -ne 1 ] || ! printf '%s' "$text" | grep -qF -- "$words"; then
    printf 'FAILED: %s\n  exit %s, want %s; want one line with "%s", got: %s\n' "$*" "$got" "$code" "$words" "$text"
    failures=$((failures + 1))
  fi
}
expect 2 "unknown command 'fly'" ./learn fly
expect 2 "unknown stage '99'" ./learn test 99
expect 2 "unknown stage '9'" ./learn test 9
expect 2 "unknown stage ''" ./learn test ""
expect 2 "one stage or none" ./learn test 00 01
expect 2 "needs a stage" ./learn bench
expect 2 "no skeleton 06_optimized/exercise/2_cp_async.cu" ./learn practice 06 2_cp_async.cu
expect 2 "no skeleton 06_optimized/exercise/mma.cu; there are: ptx/fragments.hpp forward/1_mma.cu" ./learn practice 6 mma.cu
expect 2 "backward/7_at_once.cu forward/11_overlap.cu backward/5_bulk.cu" ./learn practice 06 forward/10_pingpong.cu
expect 2 "practice needs a stage first, for example: ./learn practice 01 --reset" ./learn practice --reset
expect 2 "practice has no option '--solve'; usage: ./learn practice NN [FILE...] [--level 1|2|3]" ./learn practice 1 --solve
expect 2 "--level is 1, 2 or 3, got '4'" ./learn practice 1 --level 4
expect 2 "--level is 1, 2 or 3, got '-v'" ./learn practice 1 --level -v
expect 2 "--level needs 1, 2 or 3" ./learn practice 1 --level
expect 2 "practice has no option '--level=0'" ./learn practice 1 --level=0
expect 2 "one of --race and --asan at a time" ./learn practice 4 --race -v --asan
expect 2 "takes the name of a skeleton in 01_safe_softmax/exercise, got '../safe_softmax.cpp'" ./learn practice 1 ../safe_softmax.cpp
expect 2 "stage 02 has one thread: nothing can race there" ./learn practice 02 --race --reset
expect 2 "stage 06: ./learn practice 06 itself names the rules that a kernel breaks" ./learn practice 06 --asan
expect 0 "usage: ./learn practice NN" ./learn practice 2 --help
expect 2 "bench has no option '--fast'" ./learn bench 02 --rounds 3 --fast
expect 2 "--out needs a value" ./learn bench 02 --out
./learn bench 2 --help | grep "^  lanes: And 'lanes', " >/dev/null || { echo "FAILED: bench --help"; failures=$((failures + 1)); }
expect 2 "no option '--fast'" ./learn charts --fast
expect 2 "no option '--resume'; it has --full, --again and --record" ./learn charts --resume
expect 2 "unknown stage '7'" ./learn charts 7
expect 2 "sweep has no option '--record'" ./learn sweep --only 04 --record
expect 2 "tune: unrecognized arguments: --record" ./learn tune --record
expect 2 "tune: no kernel 'fa3'; there are longest_first, fa2, hopper" ./learn tune --only fa3
expect 2 "tune: --gpu knows a100, rtx3090, rtx4090, h100, h200, got 'tpu'" ./learn tune --list --gpu tpu
expect 3 "nvcc, which was not found" env PATH=/usr/bin:/bin ./learn tune --out build/no_tune
expect 2 "torch: unrecognized arguments: --fly" ./learn torch --fly
expect 2 "torch practice: unrecognized arguments: --solve" ./learn torch practice --solve
expect 2 "ring: argument --gpus: invalid int value: 'two'" ./learn ring --gpus two
expect 2 "ring: --gpus must be a number from 1 to 64, got 0" ./learn ring --gpus 0 --cpu
expect 2 "ring: no option '--lenth'; --help lists all" ./learn ring --gpus 2 --cpu --lenth 3
expect 2 "ring: --kind needs a value" ./learn ring --cpu --kind
expect 2 "hunt has no option '--solve'; it has -v, --symptom, --reveal and --reset" ./learn hunt 00 --solve
expect 2 "one option at most" ./learn hunt 00 --symptom -v
expect 2 "no skeleton 00_naive/exercise/other.cpp" ./learn practice 00 other.cpp
expect 2 "progress takes no arguments; usage: ./learn progress" ./learn progress 02
expect 0 "usage: ./learn progress" ./learn progress --help
expect 2 "doctor takes no arguments" ./learn doctor now
expect 2 "see takes at most one number, for example: ./learn see 200" ./learn see 1 2
expect 2 "see 02 takes at most one number, for example: ./learn see 02 3" ./learn see 02 1 2
expect 2 "stage 06 has nothing to see yet; there are 00 01 02 03 04 05" ./learn see 06
expect 2 "unknown stage '07'" ./learn see 07
expect 3 "no C++ compiler" env CXX=no-such-compiler ./learn see
expect 2 "xray needs a stage first, for example: ./learn xray 04" ./learn xray
expect 2 "stage 03 has no kernels that run on the CPU; there are 04, 05 and 06" ./learn xray 03
expect 2 "xray 06 wants a kernel or its file, for example forward/fa2; there are mma cp_async swizzle wide_warps" ./learn xray 06
expect 2 "no kernel 'forward/softmax' in 06_optimized; there are mma" ./learn xray 06 forward/softmax
expect 2 "a number of 16 bits does not say where it comes from" ./learn xray 06 hopper --svg one.svg
expect 2 "no kernel 'fast' in 04_cuda_forward; there are register_tiled tiled" ./learn xray 04 fast
expect 2 "no kernel 'stored' in 05_cuda_backward; there are dkv atomic delta dq fast_dkv fast_atomic fast_dq" ./learn xray 5 stored
expect 2 "xray takes one kernel at a time" ./learn xray 04 tiled register_tiled
expect 2 "xray has no option '--gpu'; usage: ./learn xray NN [mine] [KERNEL]" ./learn xray 04 tiled --gpu
expect 2 "--n needs a value" ./learn xray 04 tiled --n
expect 2 "--svg needs a value" ./learn xray 04 tiled --svg
expect 2 "--svg draws one kernel; name it: delta dq" ./learn xray 05 --svg two.svg
expect 0 "usage: ./learn xray NN" ./learn xray 04 --help
expect 3 "no C++ compiler" env CXX=no-such-compiler ./learn xray 04 tiled
expect 2 "export needs a stage first" ./learn export
expect 2 "stage 03 has no kernels; there are 04, 05 and 06" ./learn export 03 tiled_cpu
expect 2 "export 04 wants a kernel or its file; there are register_tiled tiled" ./learn export 04
expect 2 "no kernel 'forward/softmax' in 06_optimized; there are mma" ./learn export 06 forward/softmax
expect 2 "no kernel 'entry.cu' in 05_cuda_backward; there are dkv" ./learn export 05 entry.cu
expect 2 "export takes one kernel at a time; usage: ./learn export NN KERNEL [-o FILE]" ./learn export 06 lock no_lock
expect 2 "export has no option '--gpu'" ./learn export 04 tiled --gpu
expect 2 "-o needs a value" ./learn export 04 tiled -o
expect 2 "$PWD/LICENSE stays as it is, since no export wrote it" ./learn export 04 tiled -o "$PWD/LICENSE"
expect 2 "/common: Is a directory" ./learn export 04 tiled -o "$PWD/common"
expect 0 "usage: ./learn export NN" ./learn export 04 --help
[ "$(./learn help | head -n 1)" = "usage: ./learn COMMAND" ] || { echo "FAILED: help"; failures=$((failures + 1)); }
# From another folder, and by hand: the same.
(cd / && "$OLDPWD/learn" help >/dev/null) || { echo "FAILED: from another folder"; failures=$((failures + 1)); }
# By a link, and by a link to that.
links=$(mktemp -d)
ln -s "$PWD/learn" "$links/one" && ln -s one "$links/two"
expect 2 "unknown stage '9'" "$links/two" test 9
[ "$(find "$links" | wc -l)" -eq 3 ] || { echo "FAILED: something was left beside a link"; failures=$((failures + 1)); }
rm -r "$links"
# A reader's broken predictions are met before anything is built, and stay as they are.
copy=$(mktemp -d)
cp -R learn common 00_naive "$copy" && rm -rf "$copy/00_naive/mine"
mkdir -p "$copy/00_naive/mine" && echo "memory: 2" >"$copy/00_naive/mine/predictions.txt"
said=$(FA_NO_INSTALL=1 "$copy/learn" bench 00 2>&1 </dev/null)
code=$?
if [ $code -ne 2 ] || [ "$(printf '%s\n' "$said" | tail -n 1)" != "00_naive/mine/predictions.txt:1: not \`name = number\`: memory: 2" ] ||
  [ -e "$copy/build" ] || [ "$(cat "$copy/00_naive/mine/predictions.txt")" != "memory: 2" ]; then
  printf 'FAILED: bench with broken predictions\n  exit %s: %s\n' "$code" "$said"
  failures=$((failures + 1))
fi
# A reader's own version is never overwritten, and what cannot work is said before anything is built.
cp 00_naive/exercise/naive.cpp "$copy/00_naive/mine/"
expect 2 "00_naive/mine/naive.cpp is at level 1 and stays as it is; to throw it away: ./learn practice 00 naive.cpp --level 2 --reset" \
  "$copy/learn" practice 0 --level 2
expect 2 "one thread" "$copy/learn" practice 0 --race --reset
expect 2 "no skeleton 00_naive/exercise/other.cpp" "$copy/learn" practice 0 --reset other.cpp
if [ -e "$copy/build" ] || ! cmp -s 00_naive/exercise/naive.cpp "$copy/00_naive/mine/naive.cpp" || [ "$(find "$copy/00_naive/mine" -type f | wc -l)" -ne 2 ]; then
  echo "FAILED: practice built something, or changed a reader's files"
  failures=$((failures + 1))
fi
# A smoke run says that it compares nothing, whatever was predicted, and is not noted.
mkdir -p "$copy/fake" "$copy/build/00_naive"
cat >"$copy/fake/cmake" <<'SH'
#!/bin/sh
case $1 in
  --version) echo "cmake version 3.30.0" ;;
  --preset) echo "-- The compiler is here" && [ ! -e fake/fails ] ;;
esac
SH
cat >"$copy/build/00_naive/stage00_bench" <<'SH'
#!/bin/sh
for file in 00_naive/results/*.json; do sed 's/"size": "[a-z]*"/"size": "smoke"/' "$file" >"$3"; done
SH
chmod +x "$copy/fake/cmake" "$copy/build/00_naive/stage00_bench"
said=$(PATH="$copy/fake:$PATH" FA_NO_INSTALL=1 "$copy/learn" bench 00 --smoke 2>&1 </dev/null)
code=$?
if [ $code -ne 0 ] || [ -e "$copy/.progress" ] ||
  [ "$(printf '%s\n' "$said" | tail -n 1)" != "--smoke shows that the benchmark runs; it measures nothing, and no prediction is compared" ]; then
  printf 'FAILED: bench --smoke\n  exit %s: %s\n' "$code" "$said"
  failures=$((failures + 1))
fi
# A hunt begins without CMake's words, but with -v, or where it fails.
says() { # WHAT COMMAND...: does it print what CMake says?
  what=$1
  shift
  PATH="$copy/fake:$PATH" FA_NO_INSTALL=1 "$@" 2>&1 </dev/null | grep -c "The compiler is here" | grep -qx "$what" ||
    { echo "FAILED: CMake's words, want $what: $*" && failures=$((failures + 1)); }
}
says 0 "$copy/learn" hunt 00
says 1 "$copy/learn" hunt 00 -v
touch "$copy/fake/fails"
says 1 "$copy/learn" hunt 00
rm -r "$copy"
# What is not there is said in a line, with what to do. The tools that `learn` itself needs are left.
bare=$(mktemp -d)
for tool in sh dirname readlink sed tr awk df id grep cat uname cksum sort xargs head; do
  ln -s "$(command -v $tool)" "$bare/$tool"
done
ln -s /bin/true "$bare/c++"
expect 3 "missing: cmake ninja-build" env PATH="$bare" FA_PYTHON=/nowhere FA_NO_INSTALL=1 ./learn test 01
ln -s /bin/true "$bare/ninja"
printf '#!/bin/sh\necho "cmake version 3.22.1"\n' >"$bare/cmake" && chmod +x "$bare/cmake"
expect 3 "cmake 3.25 or later is missing" env PATH="$bare" FA_PYTHON="$(command -v python3)" FA_NO_INSTALL=1 ./learn test 01
expect 2 "no skeleton 00_naive/exercise/other.cpp" env PATH="$bare" FA_PYTHON="$(command -v python3)" ./learn practice 00 other.cpp
expect 3 "xray finds lines with addr2line, which is missing" env PATH="$bare" ./learn xray 04 tiled
ln -s /bin/false "$bare/python3"
if ! /usr/bin/python3 -c '' 2>/dev/null; then
  expect 3 "hunt needs Python 3.9 or later" env PATH="$bare" FA_PYTHON=/nowhere ./learn hunt 00
fi
rm -r "$bare"
echo "$failures failures"
[ "$failures" -eq 0 ]

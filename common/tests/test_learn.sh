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
expect 2 "unknown stage '1'" ./learn test 1
expect 2 "one stage or none" ./learn test 00 01
expect 2 "needs a stage" ./learn bench
expect 2 "no skeleton 06_optimized/exercise/2_cp_async.cu" ./learn practice 06 2_cp_async.cu
expect 2 "no skeleton 06_optimized/exercise/mma.cu; there are: backward/1_mma.cu" ./learn practice 06 mma.cu
expect 2 "no option '--fast'" ./learn charts --fast
expect 2 "unknown stage '7'" ./learn charts 7
expect 2 "sweep has no option '--record'" ./learn sweep --only 04 --record
expect 2 "no option '--solve'" ./learn hunt 00 --solve
expect 2 "no skeleton 00_naive/exercise/other.cpp" ./learn practice 00 other.cpp
expect 2 "doctor takes no arguments" ./learn doctor now
expect 2 "at most one number" ./learn see 1 2
expect 3 "no C++ compiler" env CXX=no-such-compiler ./learn see
[ "$(./learn help | head -n 1)" = "usage: ./learn COMMAND" ] || { echo "FAILED: help"; failures=$((failures + 1)); }
# From another folder, and by hand: the same.
(cd / && "$OLDPWD/learn" help >/dev/null) || { echo "FAILED: from another folder"; failures=$((failures + 1)); }
echo "$failures failures"
[ "$failures" -eq 0 ]

#!/bin/sh
# needs_a_gpu.sh PROGRAM: all tests of the program as one test, where no GPU has answered. 77, which ctest shows as
# skipped, if it has none to run on; what needs no GPU must pass all the same.
code=0
said=$("$1" --gtest_brief=1 2>&1) || code=$?
printf '%s\n' "$said"
case "$code $said" in
  "0 "*"no usable GPU"*) exit 77 ;;
esac
exit $code

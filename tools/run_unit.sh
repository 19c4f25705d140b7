#!/bin/bash
# The cmocka programs of one build folder: the sanitizer targets use it.
set -u
cd "$(dirname "$0")/.." || exit 1
export ASAN_OPTIONS=${ASAN_OPTIONS:-abort_on_error=1:detect_leaks=1:allocator_may_return_null=1} UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=${TSAN_OPTIONS:-allocator_may_return_null=1:halt_on_error=1}
rc=0 n=0
for bin in $(find "$1/tests" -type f -name 'test_*' -executable | sort); do
    n=$((n + 1))
    if out=$(timeout -k 5 900 "$bin" 2>&1); then echo "ok   ${bin#"$1"/tests/}"
    else rc=1; echo "FAIL ${bin#"$1"/tests/}"; tail -n 30 <<<"$out"; fi
done
echo "$n programs under $1"
exit $rc

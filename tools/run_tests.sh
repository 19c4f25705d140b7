#!/bin/bash
# Runs every test and ends with one line, "N passed, N failed, N skipped".
#   run_tests.sh BUILD-DIR
# cmocka programs are counted by their own lines; a Python script by its lines "ok NAME", "skip NAME:
# why", "FAIL NAME"; a script without such lines counts as one by its exit status (77 = skipped). A
# program that dies by a signal, or by the time limit, is a failure whatever it printed.
set -u
cd "$(dirname "$0")/.." || exit 1
build=${1:-build}
passed=0 failed=0 skipped=0
bad=()
log=$build/test.log
: >"$log"

note() { # name passed failed skipped seconds
    passed=$((passed + $2)); failed=$((failed + $3)); skipped=$((skipped + $4))
    [ "$3" = 0 ] || bad+=("$1")
    printf '  %-44s %4d passed %3d failed %3d skipped  %5.1f s\n' "$1" "$2" "$3" "$4" "$5"
}

now() { date +%s.%N; }

run_unit() {
    local bin=$1 name out rc t0 p f s
    name=${bin#"$build"/tests/}
    t0=$(now)
    out=$(timeout -k 5 "${TEST_TIMEOUT:-300}" "$bin" 2>&1); rc=$?
    printf '==== %s (exit %d)\n%s\n' "$name" "$rc" "$out" >>"$log"
    p=$(grep -c '^\[ *OK *\]' <<<"$out"); f=$(grep -c '^\[  FAILED  \] [a-z_0-9]*$' <<<"$out")
    s=$(grep -c '^\[  SKIPPED \] [a-z_0-9]*$' <<<"$out")
    # cmocka prints each failed or skipped test again in its summary: "FAILED TEST" lines are not matched.
    [ "$rc" = 0 ] || [ "$f" -gt 0 ] || f=1
    [ "$p" -gt 0 ] || [ "$f" -gt 0 ] || [ "$s" -gt 0 ] || f=1
    note "$name" "$p" "$f" "$s" "$(echo "$(now) $t0" | awk '{print $1-$2}')"
    [ "$f" = 0 ] || { grep -aE 'FAILED|error|Error|ERROR|SUMMARY|runtime' <<<"$out" | head -12 | sed 's/^/      /'; }
}

run_python() {
    local script=$1 py=$2 out rc t0 p f s
    t0=$(now)
    out=$(TARE=$build/tare timeout -k 5 "${TEST_TIMEOUT:-300}" "$py" "$script" 2>&1); rc=$?
    printf '==== %s (exit %d)\n%s\n' "$script" "$rc" "$out" >>"$log"
    p=$(grep -c '^ok ' <<<"$out"); f=$(grep -c '^FAIL ' <<<"$out"); s=$(grep -c '^skip ' <<<"$out")
    if [ "$p$f$s" = 000 ]; then
        case $rc in 0) p=1 ;; 77) s=1 ;; *) f=1 ;; esac
    elif [ "$rc" != 0 ] && [ "$f" = 0 ]; then
        f=1
    fi
    note "$script" "$p" "$f" "$s" "$(echo "$(now) $t0" | awk '{print $1-$2}')"
    [ "$f" = 0 ] || { grep -aE '^FAIL|Error|error' <<<"$out" | head -8 | sed 's/^/      /'; tail -n 3 <<<"$out" | sed 's/^/      /'; }
}

echo "house checks"
run_python tools/check_house.py python3
echo "programs"
for bin in $(find "$build/tests" -type f -name 'test_*' -executable | sort); do run_unit "$bin"; done
echo "Python oracles"
py=$(sh tools/venv.sh | tail -n 1)
for script in tests/golden/test_*.py tests/e2e/test_*.py; do
    [ -f "$script" ] || continue
    if [ -n "$py" ]; then run_python "$script" "$py"
    else note "$script (no Python packages)" 0 0 1 0; fi
done
if command -v nvcc >/dev/null 2>&1 && ls src/kern/cuda/*.cu >/dev/null 2>&1; then
    if make -s cuda >>"$log" 2>&1; then note "cuda: compiles" 1 0 0 0; else note "cuda: compiles" 0 1 0 0; fi
else
    note "cuda (no nvcc, or no CUDA source yet)" 0 0 1 0
fi
[ ${#bad[@]} = 0 ] || { echo "failed: ${bad[*]}"; echo "details: $log"; }
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]

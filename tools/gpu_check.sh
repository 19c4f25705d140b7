#!/bin/bash
# The tests of the GPU on a GPU: every test_gpu_* of a build folder that also holds libtare-cuda.so.
#   gpu_check.sh BUILD-DIR [DEVICE]
# Each program has GPU_CHECK_SECONDS (default 60); one that hangs or dies is a failure and the others go on.
# GPU_CHECK_WITH runs in front of each, say "compute-sanitizer --tool memcheck --error-exitcode 9".
set -u
cd "$(dirname "$0")/.." || exit 1
build=$1 device=${2:-cuda:0} rc=0
log=$build/gpu_check.log
: >"$log"
for bin in $(find "$build/tests" -type f -name 'test_gpu_*' -executable | sort); do
    name=${bin##*/}
    case " ${GPU_CHECK_SKIP:-} " in *" $name "*) echo "skip $name"; continue ;; esac
    t0=$(date +%s.%N)
    # shellcheck disable=SC2086
    out=$(timeout -k 5 "${GPU_CHECK_SECONDS:-60}" ${GPU_CHECK_WITH:-} "$bin" "$device" 2>&1); e=$?
    printf '==== %s (exit %d)\n%s\n' "$name" "$e" "$out" >>"$log"
    printf '%-28s exit %3d  %2d ok %2d failed  %5.1f s\n' "$name" "$e" "$(grep -c '^\[ *OK *\]' <<<"$out")" \
        "$(grep -c '^\[  FAILED  \] [a-z_0-9]*$' <<<"$out")" "$(echo "$(date +%s.%N) $t0" | awk '{print $1-$2}')"
    [ "$e" = 0 ] && continue
    rc=1
    grep -aE 'ERROR|rror:|LINE|CUDA|illegal|=====' <<<"$out" | head -n 8 | sed 's/^/    /'
    tail -n 2 <<<"$out" | sed 's/^/    /'
done
echo "log: $log"
exit $rc

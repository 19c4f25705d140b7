#!/bin/sh
# Holds ptxas reports (nvcc -Xptxas -v) against the rules for shipped kernels: check_ptxas.sh LOG...
set -eu
bad=0
for log in "$@"; do
    n=$(grep -c 'Compiling entry function' "$log" || true)
    spills=$(grep -E '[1-9][0-9]* bytes spill' "$log" || true)
    odd=$(grep -E 'C75[0-9][0-9]|warning' "$log" || true)
    [ -z "$spills$odd" ] || { bad=1; echo "cuda: $log:"; printf '%s\n' "$spills" "$odd"; }
    echo "cuda: $log: $n kernels, $([ -z "$spills" ] && echo no spills || echo SPILLS)"
done
[ $bad = 0 ] || { echo "cuda: a kernel spills registers or draws a warning of ptxas"; exit 1; }

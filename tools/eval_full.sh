#!/bin/bash
# The full task sets and texts on the embedded model and its quantized forms: eval_full.sh BUILD-DIR
set -u
cd "$(dirname "$0")/.." || exit 1
tare=${1:-build}/tare
base=models/millet-7m
mkdir -p out/full
"$tare" eval $base --tasks $base/eval --perplexity $base/sample.txt --quiet || exit 1
for s in fp8 int8 w:int4,g128 w:int3,g128 w:int2,g64 nvfp4 mxfp4; do
    name=$(printf '%s' "$s" | tr -c 'a-z0-9\n' '-')
    [ -d "out/full/$name" ] || "$tare" quantize $base -o "out/full/$name" --scheme "$s" --quiet >/dev/null || exit 1
    echo "== $s"
    "$tare" compare $base "out/full/$name" --tasks $base/eval --perplexity $base/sample.txt --cache-dir out/cache --quiet
done
for kv in fp8_e4m3 fp8_e5m2 int8 fp4; do
    echo "== KV $kv"
    "$tare" compare $base $base --kv-cache-dtype $kv --tasks $base/eval --perplexity $base/sample.txt --cache-dir out/cache --quiet
done

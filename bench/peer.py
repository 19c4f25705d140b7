#!/usr/bin/env python3
"""tare against llama-bench on the same machine, alternating in one run: prefill 512 and decode 64.

usage: peer.py LLAMA_BENCH ROUNDS PAIR…      PAIR = name=tare-model=llama.gguf
Prints medians, the ratio tare / llama.cpp, and the share of the measured read bandwidth that tare's decode reaches.
"""
import json, os, statistics, subprocess, sys

tare = os.environ.get("TARE", "build/tare")
threads = os.environ.get("THREADS", str(os.cpu_count()))
lb, rounds, pairs = sys.argv[1], int(sys.argv[2]), [p.split("=") for p in sys.argv[3:]]


def run_tare(model):
    out = subprocess.run([tare, "bench", model, "--prompt-tokens", "512", "--output-tokens", "65", "--repeat", "3", "--threads", threads,
                          "--json", "--quiet"], capture_output=True, text=True, check=True).stdout
    r = json.loads(out)
    return r["prefill_tokens_per_s"], r["tokens_per_s"], r["roof"]["bandwidth_gbs"], r["roof"]["share"], r["activation"]


def run_llama(model):
    out = subprocess.run([lb, "-m", model, "-p", "512", "-n", "64", "-r", "3", "-t", threads, "-fa", "1", "-o", "json"],
                         capture_output=True, text=True, check=True).stdout
    pp = tg = 0.0
    for r in json.loads(out):
        if r["n_prompt"]:
            pp = r["avg_ts"]
        else:
            tg = r["avg_ts"]
    return pp, tg


med = statistics.median
res = {p[0]: ([], []) for p in pairs}
for _ in range(rounds):
    for name, model, gguf in pairs:
        res[name][0].append(run_tare(model))
        res[name][1].append(run_llama(gguf))
print("| pair | tare pp512 | llama.cpp pp512 | ratio | tare tg64 | llama.cpp tg64 | ratio | tare decode, share of bandwidth | tare activations |")
print("|---|---|---|---|---|---|---|---|---|")
for name, (t, l) in res.items():
    pp, tg, bw, share = (med(x[i] for x in t) for i in range(4))
    lpp, ltg = (med(x[i] for x in l) for i in range(2))
    print(f"| {name} | {pp:.0f} | {lpp:.0f} | {pp / lpp:.2f} | {tg:.1f} | {ltg:.1f} | {tg / ltg:.2f} | {100 * share:.0f} % of {bw:.0f} GB/s | {t[0][4]} |")

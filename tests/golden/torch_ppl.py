"""Perplexity of a plain checkpoint by transformers, window and stride 2048, against `tare eval --perplexity`.

usage: torch_ppl.py [MODEL TEXT]   (default: the embedded model on its sample text)
Prints both and fails when they differ by more than 0.5 %.
"""
import json, math, os, subprocess, sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tare = os.environ.get("TARE", "build/tare")
model_dir, text = (sys.argv[1], sys.argv[2]) if len(sys.argv) > 2 else ("models/millet-7m", "models/millet-7m/sample.txt")
limit = int(os.environ.get("PPL_TOKENS", "0"))
tok = AutoTokenizer.from_pretrained(model_dir)
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
ids = tok(open(text, encoding="utf-8").read(), return_tensors="pt", add_special_tokens=False).input_ids[0]
if limit:
    ids = ids[:limit]
window = 2048
total, n = 0.0, 0
with torch.no_grad():
    for at in range(0, len(ids), window):
        w = ids[at:at + window].unsqueeze(0)
        if w.shape[1] < 2:
            break
        logits = model(w).logits[0, :-1].double()
        total += torch.nn.functional.cross_entropy(logits, w[0, 1:], reduction="sum").item()
        n += w.shape[1] - 1
want = math.exp(total / n)
cmd = [tare, "eval", model_dir, "--perplexity", text, "--window", "2048", "--stride", "2048", "--bos", "no", "--json", "--quiet"]
if limit:
    cmd += ["--perplexity-tokens", str(limit)]
ok = True
for act in ("spec", "auto"):
    got = json.loads(subprocess.run(cmd + ["--activation-dtype", act], capture_output=True, text=True, check=True).stdout)
    ratio = got["perplexity"] / want - 1
    ok = ok and abs(ratio) < 0.005
    print(("ok " if abs(ratio) < 0.005 else "FAIL ") + f"perplexity {model_dir} activations {act}: transformers {want:.4f} ({n} tokens), tare {got['perplexity']:.4f} ({got['n']}), {100 * ratio:+.3f} %")
sys.exit(0 if ok else 1)

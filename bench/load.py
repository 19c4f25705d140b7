#!/usr/bin/env python3
"""Time and memory of loading a checkpoint of the shape of llama-3.2-1B in each dialect that tare writes.

usage: load.py FOLDER [ROW…]      FOLDER takes about 12 GB and is kept; ROW = the rows below whose name contains it
The weights are random (numpy, a fixed seed). Every row is written by `tare quantize`, then opened by `tare dump` of one token
with a cache of 64 tokens and a step of 16 rows, while /proc says what is resident. "file pages" are of the mapped checkpoint and
can be dropped by the kernel at any time; "resident" is where most memory of its own was held, "peak" the highest sum of both at
any sample (5 ms) or VmHWM, whichever is higher. "load" is the whole command: start, load, one token, end. What any process of tare takes without a model (code, libraries) is part of all numbers.
"""
import json, os, shutil, struct, subprocess, sys, time

tare = os.environ.get("TARE", "build/tare")
threads = os.environ.get("THREADS", str(os.cpu_count()))
H, LAYERS, HEADS, KV, FFN, VOCAB, D = 2048, 16, 32, 8, 8192, 128256, 64
ROWS = [("plain bf16", None, None), ("compressed-tensors fp8", "fp8", "compressed-tensors"),
        ("compressed-tensors fp8-block", "fp8-block", "compressed-tensors"), ("compressed-tensors int8", "int8", "compressed-tensors"),
        ("compressed-tensors int4 g128", "int4", "compressed-tensors"), ("compressed-tensors int4 g32", "w:int4,g32", "compressed-tensors"),
        ("compressed-tensors int4-asym g128", "int4-asym", "compressed-tensors"), ("compressed-tensors int3 g128", "int3", "compressed-tensors"),
        ("compressed-tensors int2 g64", "int2", "compressed-tensors"),
        ("compressed-tensors nvfp4", "nvfp4", "compressed-tensors"), ("compressed-tensors mxfp4", "mxfp4", "compressed-tensors"),
        ("gptq int4 g128", "int4", "gptq"), ("gptq int8 g128", "w:int8,g128", "gptq"), ("awq int4-asym g128", "int4-asym", "awq"),
        ("fp8 block 128x128", "fp8-block", "fp8"), ("modelopt nvfp4", "nvfp4", "modelopt"), ("modelopt fp8 per channel", "fp8", "modelopt"),
        ("bitsandbytes nf4 b64", "w:nf4,b64", "bitsandbytes")]


def tensors():
    yield "model.embed_tokens.weight", (VOCAB, H)
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        for n, s in (("self_attn.q_proj", (HEADS * D, H)), ("self_attn.k_proj", (KV * D, H)), ("self_attn.v_proj", (KV * D, H)),
                     ("self_attn.o_proj", (H, HEADS * D)), ("mlp.gate_proj", (FFN, H)), ("mlp.up_proj", (FFN, H)), ("mlp.down_proj", (H, FFN)),
                     ("input_layernorm", (H,)), ("post_attention_layernorm", (H,))):
            yield p + n + ".weight", s
    yield "model.norm.weight", (H,)


def make(path):
    import numpy as np
    rng = np.random.default_rng(1)
    head, at = {}, 0
    for n, s in tensors():
        size = 2 * int(np.prod(s))
        head[n] = {"dtype": "BF16", "shape": list(s), "data_offsets": [at, at + size]}
        at += size
    os.makedirs(path + ".part", exist_ok=True)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path + ".part/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for n, s in tensors():
            left = int(np.prod(s))
            while left:
                k = min(left, 1 << 24)
                x = np.ones(k, np.float32) if "norm" in n else rng.standard_normal(k, np.float32) * np.float32(0.02)
                f.write((x.view(np.uint32) >> 16).astype(np.uint16).tobytes())
                left -= k
    json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "num_hidden_layers": LAYERS,
               "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D, "intermediate_size": FFN, "vocab_size": VOCAB,
               "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 131072, "rope_theta": 500000.0,
               "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}, open(path + ".part/config.json", "w"))
    os.rename(path + ".part", path)


def status(pid):
    try:
        out = {}
        for line in open(f"/proc/{pid}/status"):
            k, v = line.split(":", 1)
            if k in ("VmHWM", "RssAnon", "RssFile", "RssShmem"):
                out[k] = int(v.split()[0]) * 1024
        return out
    except (OSError, ValueError):
        return {}


def load(path, ids, out):
    t0, peak, hwm, top = time.monotonic(), 0, 0, (0, 0)
    p = subprocess.Popen([tare, "dump", path, "--tokens", ids, "-o", out, "--threads", threads, "--max-total-tokens", "64", "--max-model-len", "64",
                          "--max-running-requests", "1", "--chunked-prefill-size", "16", "--quiet"], stdout=subprocess.DEVNULL)
    while p.poll() is None:
        s = status(p.pid)
        if "RssAnon" in s:
            hwm = max(hwm, s["VmHWM"])
            peak = max(peak, s["RssAnon"] + s["RssFile"])
            top = max(top, (s["RssAnon"], s["RssFile"]))
        time.sleep(0.005)
    if p.returncode:
        sys.exit(f"load.py: {path} was not loaded")
    return time.monotonic() - t0, max(peak, hwm), *top


root, want = sys.argv[1], sys.argv[2:]
os.makedirs(root, exist_ok=True)
base, ids = os.path.join(root, "plain"), os.path.join(root, "ids.json")
if not os.path.isdir(base):
    make(base)
json.dump([[7]], open(ids, "w"))
print("| dialect | files, GB | load, s | peak / files | resident / files | of it file pages |\n|---|---|---|---|---|---|", flush=True)
for name, scheme, to in ROWS:
    if want and not any(w in name for w in want):
        continue
    path = os.path.join(root, name.replace(" ", "_")) if scheme else base
    if not os.path.isdir(path):
        r = subprocess.run([tare, "quantize", base, "-o", path, "--scheme", scheme, "--to", to, "--threads", threads, "--quiet"], capture_output=True, text=True)
        if r.returncode:
            print(f"| {name} | {r.stderr.strip().splitlines()[-1]} | | | | |", flush=True)
            continue
    size = sum(os.path.getsize(os.path.join(path, f)) for f in os.listdir(path) if f.endswith(".safetensors"))
    seconds, peak, anon, file = load(path, ids, os.path.join(root, "out.safetensors"))
    print(f"| {name} | {size / 1e9:.3f} | {seconds:.1f} | {peak / size:.3f} | {(anon + file) / size:.3f} | {file / size:.3f} |", flush=True)

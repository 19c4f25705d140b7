#!/usr/bin/env python3
"""Logits of checkpoints of other tools against the logits of the tool itself, for every dialect.

For every folder of tests/fixtures/quant (or of the folder given as argument) that has golden logits: expanded as
the tool does (--dequantize), the largest difference is 2e-3 where only weights are quantized; where activations
are, their RMS is under a tenth (a third for 4-bit ones) of what quantization costs. The kernels on packed weights
equal a plain fp32 copy of the same weights, or stay within the same part of the cost. No linear falls back to the plain C twin (--strict), and two runs under different
heap fills give the same bytes. Blocks of bitsandbytes that cross rows are made here, and run by the twin by name.

Usage: test_dialect_logits.py [FOLDER]; TARE comes from the environment."""
import glob
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
FIXTURES = os.path.join(HERE, "..", "fixtures", "quant")
FOLDER = sys.argv[1] if len(sys.argv) > 1 else FIXTURES
TARE = os.path.abspath(os.environ.get("TARE", "build/tare"))
bad = 0


def report(good, name, why=""):
    global bad
    bad += not good
    print("ok" if good else "FAIL", name, why)


def dump(path, ids, tmp, *options, **env):
    """Logits, or the message of the refusal."""
    with open(os.path.join(tmp, "ids.json"), "w") as f:
        json.dump([[int(i) for i in ids]], f)
    out = os.path.join(tmp, "logits.safetensors")
    p = subprocess.run([TARE, "dump", path, "--tokens", os.path.join(tmp, "ids.json"), "-o", out, *options],
                       capture_output=True, text=True, env={**os.environ, **env})
    if p.returncode:
        return p.stderr.strip()
    with safe_open(out, "np") as f:
        return f.get_tensor("logits.0")


def convert(path, dtype, tmp):
    out = os.path.join(tmp, "plain")
    subprocess.run([TARE, "convert", path, "-o", out, "--to", "plain", "--dtype", dtype, "--overwrite"], check=True,
                   capture_output=True)
    return out


def rms(a):
    return float(np.sqrt((a.astype(np.float64) ** 2).mean()))


def activation_bits(config):
    """Bits of the activations, 16 = not quantized; and whether the KV cache is."""
    q = config["quantization_config"]
    bits = 16
    for g in (q.get("config_groups") or {}).values():
        a = g.get("input_activations") if isinstance(g, dict) else None
        bits = min(bits, a["num_bits"] if a else 16)
    algo = q.get("quant_algo") or ""
    if q.get("quant_method") == "fp8" or algo.startswith(("FP8", "W4A8", "W8A8")):
        bits = min(bits, 8)
    if algo == "NVFP4":
        bits = 4
    return min(bits, q.get("act_bits") or 16)


def check(path, tmp):
    name = os.path.basename(path)
    with open(os.path.join(path, "config.json")) as f:
        config = json.load(f)
    bits, method = activation_bits(config), config["quantization_config"].get("quant_method")
    if method in ("modelopt", "quark") and config["quantization_config"].get("quant_algo") != "NVFP4":
        return print("skip", name + ": the golden logits are of the model before it was exported")
    with open(os.path.join(path, "golden.json")) as f:
        golden = json.load(f)
    how = golden["logits"] or ""
    with safe_open(os.path.join(path, "golden.safetensors"), "np") as f:
        keys = set(f.keys())
        if "logits" not in keys:
            return print("skip", name + ": no golden logits")
        ids, want, plain = (f.get_tensor(k) for k in ("input_ids", "logits", "logits_unquantized"))
    weights_only = "activations not quantized" in how or "with the dequantized weights" in how or bits == 16
    exact = ("--activation-dtype", "f32", "--kv-cache-dtype", "f32")
    options = exact if weights_only and bits < 16 else ()
    ids, cost = ids.ravel(), rms(want - plain)
    if golden.get("dequantized_in") == "torch.bfloat16" and method == "compressed-tensors" and weights_only:
        got = dump(convert(path, "bf16", tmp), ids, tmp, *exact)  # the library held this model in bf16
    else:
        got = dump(path, ids, tmp, "--dequantize", *options)
    if not isinstance(got, np.ndarray):
        return report(False, name, got)
    off, part = float(np.abs(got - want).max()), rms(got - want) / cost
    good = off <= 2e-3 if weights_only else part <= (1 / 3 if bits == 4 else 0.1)
    report(good, name + "_logits", f"largest difference {off:.1e}, RMS {part:.4f} of the cost")
    packed = dump(path, ids, tmp, *options)
    if not isinstance(packed, np.ndarray):
        return report(False, name + "_kernels", packed)
    if weights_only:
        d = float(np.abs(packed - dump(convert(path, "f32", tmp), ids, tmp, *exact)).max())
        report(d <= 1e-3, name + "_kernels", f"packed to plain fp32 weights {d:.1e}")
    else:
        part = rms(packed - want) / cost
        report(part <= (1 / 3 if bits == 4 else 0.1), name + "_kernels", f"RMS {part:.4f} of the cost")
    strict = dump(path, ids, tmp, "--strict", *options)
    report(isinstance(strict, np.ndarray), name + "_no_fallback", "" if isinstance(strict, np.ndarray) else strict)
    runs = [dump(path, ids, tmp, *options, MALLOC_PERTURB_=str(fill)) for fill in (85, 170)]
    report(all(isinstance(r, np.ndarray) and np.array_equal(r, packed) for r in runs), name + "_unset_memory")


# ---- blocks that cross rows ------------------------------------------------------------------------------------

def bf16(path):
    """Tensors of a bfloat16 checkpoint as float32."""
    with open(path, "rb") as f:
        data = f.read()
    n, out = int.from_bytes(data[:8], "little"), {}
    for name, d in json.loads(data[8:8 + n]).items():
        if name != "__metadata__":
            lo, hi = (8 + n + x for x in d["data_offsets"])
            out[name] = (np.frombuffer(data[lo:hi], "<u2").astype("<u4") << 16).view("<f4").reshape(d["shape"])
    return out


def check_crossing(tmp):
    """NF4 in blocks of 1024 over rows of 256 and 384, and the same weights in fp32."""
    with safe_open(os.path.join(FIXTURES, "bnb_nf4_double", "model.safetensors"), "np") as f:
        table = f.get_tensor([k for k in f.keys() if k.endswith("weight.quant_map")][0])
    source = bf16(os.path.join(FIXTURES, "source", "model.safetensors"))
    with open(os.path.join(FIXTURES, "source", "config.json")) as f:
        config = json.load(f)
    packed, plain = {}, {}
    for name, w in source.items():
        plain[name] = packed[name] = w
        if not name.endswith("_proj.weight"):
            continue
        v = np.pad(w.ravel(), (0, -w.size % 1024)).reshape(-1, 1024)
        top = np.abs(v).max(1)
        code = np.abs((v / top[:, None])[:, :, None] - table).argmin(2)
        plain[name] = (table[code] * top[:, None]).ravel()[:w.size].reshape(w.shape)
        code = code.ravel()[:w.size].astype(np.uint8)
        state = json.dumps({"quant_type": "nf4", "blocksize": 1024, "dtype": "float32", "shape": list(w.shape)})
        packed[name] = (code[0::2] << 4 | code[1::2])[:, None]
        packed[name + ".absmax"] = top
        packed[name + ".quant_map"] = table
        packed[name + ".quant_state.bitsandbytes__nf4"] = np.frombuffer(state.encode(), np.uint8)
    paths = []
    for folder, t, q in (("crossing", packed, {"quant_method": "bitsandbytes", "load_in_4bit": True,
                                               "bnb_4bit_quant_type": "nf4"}), ("whole", plain, None)):
        paths.append(os.path.join(tmp, folder))
        os.mkdir(paths[-1])
        save_file({k: np.ascontiguousarray(v) for k, v in t.items()}, os.path.join(paths[-1], "model.safetensors"))
        with open(os.path.join(paths[-1], "config.json"), "w") as f:
            json.dump({**config, **({"quantization_config": q} if q else {})}, f)
    ids = list(range(3, 40))
    a, b = (dump(p, ids, tmp) for p in paths)
    ok = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    d = float(np.abs(a - b).max()) if ok else str(a) + str(b)
    report(ok and d <= 1e-4, "blocks_that_cross_rows", d if not ok else f"to the same weights in fp32 {d:.1e}")
    why = dump(paths[0], ids, tmp, "--strict")
    report(isinstance(why, str) and "blocks cross rows" in why, "their_fallback_is_named", str(why)[:160])


with tempfile.TemporaryDirectory() as tmp:
    found = sorted(glob.glob(os.path.join(FOLDER, "*", "golden.safetensors")))
    for p in found:
        check(os.path.dirname(p), tmp)
    check_crossing(tmp)
sys.exit(bool(bad) or not found)

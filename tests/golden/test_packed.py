#!/usr/bin/env python3
"""GPTQ, AWQ and auto-round against a reader of their files that shares nothing with tare but numpy.

For every checkpoint in tests/fixtures/quant (or the folder given as argument): what tare reads equals what the
reader below decodes, bit by bit in fp32; the logits of --dequantize equal the tool's within 2e-3; the kernels on
packed weights equal a plain fp32 copy of the same weights; and a second run under another heap fill gives the
same bytes. Then the way back: what `tare convert --to gptq|awq` and `tare quantize --to …` write is read by the
same reader, codes, scales and zero points.

Usage: test_packed.py [FOLDER]; TARE comes from the environment."""
import glob
import json
import os
import re
import subprocess
import sys
import tempfile

import numpy as np
from safetensors import safe_open

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "..", "fixtures", "quant")
TARE = os.path.abspath(os.environ.get("TARE", "build/tare"))
f32 = np.float32
bad = 0


def report(good, name, why=""):
    global bad
    bad += not good
    print("ok" if good else "FAIL", name, why)


def run(*args, **env):
    p = subprocess.run([TARE, *args], capture_output=True, text=True, env={**os.environ, **env})
    return p.returncode, (p.stderr or p.stdout).strip()


TYPES = {"I32": "<i4", "I16": "<i2", "F16": "<f2", "F32": "<f4", "U8": "u1", "I8": "i1", "I64": "<i8", "BF16": "<u2"}


def raw(path):
    """name -> (type, array); bfloat16, which numpy lacks, as its bits."""
    with open(path, "rb") as f:
        data = f.read()
    n = int.from_bytes(data[:8], "little")
    head = json.loads(data[8:8 + n])
    return {name: (d["dtype"], np.frombuffer(data[8 + n + d["data_offsets"][0]:8 + n + d["data_offsets"][1]],
                                             TYPES[d["dtype"]]).reshape(d["shape"]))
            for name, d in head.items() if name != "__metadata__" and d["dtype"] in TYPES}


def tensors(path):
    """All tensors; bfloat16 as float32."""
    return {k: (v.astype("<u4") << 16).view("<f4") if t == "BF16" else v for k, (t, v) in raw(path).items()}


def write(folder, config, named):
    """A checkpoint of name -> (type, array)."""
    os.makedirs(folder, exist_ok=True)
    head, body = {}, b""
    for name, (kind, v) in named.items():
        v = np.ascontiguousarray(v, TYPES[kind])
        head[name] = {"dtype": kind, "shape": list(v.shape), "data_offsets": [len(body), len(body) + v.nbytes]}
        body += v.tobytes()
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text + body)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f)


# ---- the reader -------------------------------------------------------------------------------------------------

def stream(words, bits):
    """Rows of little-endian words to rows of LSB-first fields of `bits`."""
    b = np.unpackbits(np.ascontiguousarray(words).view("u1").reshape(words.shape[0], -1), axis=1, bitorder="little")
    n = b.shape[1] // bits
    return (b[:, :n * bits].reshape(-1, n, bits) * (1 << np.arange(bits))).sum(2)


def read_gptq(t, m, bits, group, v2):
    """codes [N, K], zero points [G, N], scales [G, N], group of each column."""
    codes = stream(t[m + ".qweight"].T, bits)
    zeros = stream(t[m + ".qzeros"], bits) + (0 if v2 else 1)
    K = codes.shape[1]
    index = t.get(m + ".g_idx", np.arange(K) // (group if group > 0 else K))
    return codes, zeros, t[m + ".scales"], index


def read_awq(t, m, bits, group, version):
    qw, qz, s = t[m + ".qweight"], t[m + ".qzeros"], t[m + ".scales"]
    if version == "gemm":
        place = [0, 4, 1, 5, 2, 6, 3, 7]  # nibble of each of eight columns
        split = lambda w: np.stack([(w.view("<u4") >> (4 * p)) & 15 for p in place], -1).reshape(w.shape[0], -1).astype(int)
        codes, zeros = split(np.ascontiguousarray(qw)).T, split(np.ascontiguousarray(qz))
    elif version == "gemv":
        codes, zeros = stream(qw, 4), stream(qz, 4)
        G = -(-codes.shape[1] // group)
        zeros, s = zeros[:, :G].T, s[:, :G].T
    else:
        K, N = qw.shape[1], qw.shape[0] * 4
        nibbles = stream(qw, 4).reshape(N // 4, K // 64, 256)
        codes = np.zeros((N, K), int)
        for p in range(256):
            i = p % 32
            k = 32 * ((p % 64) // 32) + 8 * (i % 4) + 2 * (i // 8) + (i // 4) % 2
            codes[p // 64::4, k::64] = nibbles[:, :, p]
        G = -(-K // group)
        s, products = s[:G], qz[:G].astype(f32)
        zeros = np.round(-products / s.astype(f32)).astype(int)
        assert ((-(s.astype(f32) * zeros)).astype("<f2") == qz[:G]).all()
    K = codes.shape[1]
    return codes, zeros, s, np.arange(K) // (group if group > 0 else K)


def read_mxfp4(t, m):
    low = np.array([0, .5, 1, 1.5, 2, 3, 4, 6], f32)
    table = np.concatenate([low, -low])
    p, s = t[m + ".weight_packed"], t[m + ".weight_scale"]
    codes = np.stack([p & 15, p >> 4], -1).reshape(p.shape[0], -1)
    return table[codes] * np.repeat(np.ldexp(f32(1), s.astype(int) - 127), 32, axis=1)


def settings(config, m):
    """bits, group and labels of one module, by the rules of each tool."""
    c = config["quantization_config"]
    one = {k: c.get(k) for k in ("bits", "group_size")}
    for rule, over in c.get("dynamic", {}).items():
        if re.match(rule.split(":", 1)[1], m):
            one.update(over)
            break
    one.update(c.get("extra_config", {}).get(m, {}))
    return c, one["bits"], one["group_size"]


def read(path, m, t=None):
    """(codes, zero points, scales, index) of a module, or its values where the codes are floats."""
    with open(os.path.join(path, "config.json")) as f:
        c, bits, group = settings(json.load(f), m)
    t = tensors(os.path.join(path, "model.safetensors")) if t is None else t
    packing = c.get("packing_format", "")
    if packing.endswith("llm_compressor"):
        return read_mxfp4(t, m)
    if c["quant_method"] == "awq" or packing.endswith("awq"):
        return read_awq(t, m, bits, group, c.get("version", "gemm"))
    return read_gptq(t, m, bits, group, c.get("checkpoint_format") == "gptq_v2")


def values(x):
    if not isinstance(x, tuple):
        return x
    codes, zeros, s, index = x
    return (codes - zeros[index].T).astype(f32) * s.astype(f32)[index].T


# ---- reading ----------------------------------------------------------------------------------------------------

def dump(path, ids, tmp, *options, **env):
    with open(os.path.join(tmp, "ids.json"), "w") as f:
        json.dump([[int(i) for i in ids]], f)
    out = os.path.join(tmp, "logits.safetensors")
    rc, why = run("dump", path, "--tokens", os.path.join(tmp, "ids.json"), "-o", out, "--activation-dtype", "f32",
                  "--kv-cache-dtype", "f32", *options, **env)
    if rc:
        return why
    with safe_open(out, "np") as f:
        return f.get_tensor("logits.0")


def difference(a, b):
    return float(np.abs(a - b).max()) if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) else float("inf")


def modules(path):
    with open(os.path.join(path, "golden.json")) as f:
        return list(json.load(f)["dequantized_fp32"])


def check_read(path, tmp):
    name = os.path.basename(path)
    plain = os.path.join(tmp, "plain")
    rc, why = run("convert", path, "-o", plain, "--to", "plain", "--dtype", "f32", "--overwrite")
    if rc:
        return report(False, name + "_weights", why)
    have, t = tensors(os.path.join(plain, "model.safetensors")), tensors(os.path.join(path, "model.safetensors"))
    wrong = [m for m in modules(path) if not np.array_equal(have[m + ".weight"], values(read(path, m, t)))]
    report(not wrong, name + "_weights", f"{len(modules(path))} modules, in fp32" if not wrong else str(wrong[:2]))

    gold = tensors(os.path.join(path, "golden.safetensors"))
    with safe_open(os.path.join(path, "golden.safetensors"), "np") as f:
        ids = f.get_tensor("input_ids").ravel()
    tool = dump(path, ids, tmp, "--dequantize")
    d = difference(tool, gold["logits"])
    report(d <= 2e-3, name + "_logits", f"largest difference to the tool {d:.1e}")
    packed = dump(path, ids, tmp)
    d = max(difference(dump(path, i, tmp), dump(plain, i, tmp)) for i in (ids, ids[:5], ids[:1]))
    report(d <= 1e-3, name + "_kernels", f"packed to plain weights {d:.1e}")
    again = dump(path, ids, tmp, MALLOC_PERTURB_="165")
    report(isinstance(again, np.ndarray) and np.array_equal(packed, again), name + "_unset_memory")


# ---- the way back -----------------------------------------------------------------------------------------------

def check_back(path, to, tmp):
    """Every field of the codes, every zero point and every scale as the reader finds them in both."""
    name, out = f"{os.path.basename(path)}_to_{to}", os.path.join(tmp, "back")
    rc, why = run("convert", path, "-o", out, "--to", to, "--overwrite")
    if rc:
        report("cannot hold" in why or "different schemes" in why, name, "refused: " + why.split(": ", 2)[-1][:90])
        return
    a, b = (tensors(os.path.join(p, "model.safetensors")) for p in (path, out))
    for m in modules(path):
        x, y = read(path, m, a), read(out, m, b)
        same = all(np.array_equal(x[i], y[i]) for i in (0, 1, 3)) and np.array_equal(x[2].astype(f32), y[2].astype(f32))
        if not same:
            return report(False, name, m)
    ids = list(range(3, 40))
    d = difference(dump(path, ids, tmp), dump(out, ids, tmp))
    if d > 1e-3:
        return report(False, name, f"logits differ by {d:.1e}")
    with open(os.path.join(out, "config.json")) as f:
        config = json.load(f)["quantization_config"]
    side = os.path.join(out, "quantize_config.json")
    if to == "gptq":
        with open(side) as f:
            same = json.load(f) == config
        return report(same, name, "" if same else "quantize_config.json differs")
    report(config["version"] == "gemm" and config["zero_point"] is True, name)


def check_quantize(scheme, to, tmp):
    source, out = os.path.join(HERE, "..", "fixtures", "quant", "source"), os.path.join(tmp, "made")
    name = f"quantize_{scheme.replace(':', '_').replace(',', '_')}_to_{to}"
    rc, why = run("quantize", source, "-o", out, "--scheme", scheme, "--to", to, "--overwrite")
    if rc:
        return report(False, name, why)
    t, w = tensors(os.path.join(out, "model.safetensors")), tensors(os.path.join(source, "model.safetensors"))
    worst = 0.0
    for m in sorted(n[:-8] for n in t if n.endswith(".qweight")):
        codes, zeros, s, index = read(out, m, t)
        off = np.abs(values((codes, zeros, s, index)) - w[m + ".weight"]) / np.abs(s.astype(f32))[index].T
        worst = max(worst, float(off.max()))
    report(0 < worst < 1.01, name, f"largest error {worst:.2f} steps")


def check_head(path, tmp):
    """A quantized lm_head (here packed by numpy, 4 bits, groups of 128) runs as its plain copy does."""
    name = os.path.basename(path) + "_lm_head"
    with open(os.path.join(path, "config.json")) as f:
        config = json.load(f)
    t = raw(os.path.join(path, "model.safetensors"))
    w = tensors(os.path.join(path, "model.safetensors"))["lm_head.weight"]
    N, K = w.shape
    g = w.reshape(N, K // 128, 128)
    s = (np.abs(g).max(2) / 7).astype("<f2")
    q = np.clip(np.round(g / s.astype(f32)[..., None]) + 8, 0, 15).astype("<u4").reshape(N, K)
    words = (q.reshape(N, K // 8, 8) << (4 * np.arange(8, dtype="<u4"))).sum(2, dtype="<u4").T
    del t["lm_head.weight"]
    plain = dict(t, **{"lm_head.weight": ("F32", (q.astype(f32) - 8) * np.repeat(s.astype(f32), 128, axis=1))})
    packed = dict(t, **{"lm_head.qweight": ("I32", words.view("<i4")), "lm_head.scales": ("F16", s.T),
                        "lm_head.qzeros": ("I32", np.full((K // 128, N // 8), 0x77777777)),
                        "lm_head.g_idx": ("I32", np.arange(K) // 128)})
    write(os.path.join(tmp, "head_plain"), config, plain)
    config["quantization_config"].update(lm_head=True, dynamic=dict(
        {"+:^lm_head$": {"bits": 4, "group_size": 128, "sym": True}}, **config["quantization_config"].get("dynamic", {})))
    write(os.path.join(tmp, "head_packed"), config, packed)
    ids = list(range(3, 40))
    d = difference(dump(os.path.join(tmp, "head_plain"), ids, tmp), dump(os.path.join(tmp, "head_packed"), ids, tmp))
    report(d <= 1e-3, name, f"{d:.1e}")


def main():
    cases = sorted(p for k in ("gptq", "awq", "auto_round") for p in glob.glob(os.path.join(FOLDER, k + "_*")))
    with tempfile.TemporaryDirectory() as tmp:
        for path in cases:
            check_read(path, tmp)
        for path in cases:
            if "mxfp4" not in path:
                check_back(path, "gptq", tmp)
                check_back(path, "awq", tmp)
        for path in cases:
            if os.path.basename(path) in ("gptq_w3_g64", "gptq_dynamic_rules", "gptq_moe_w4_g128"):
                check_head(path, tmp)
        for scheme, to in (("w:int4,g128", "gptq"), ("w:int4,g64,asym", "gptq"), ("w:int3,g64", "gptq"),
                           ("w:int8,channel", "gptq"), ("w:int4,g64,asym", "awq"), ("w:int4,g128", "awq")):
            check_quantize(scheme, to, tmp)
    report(bool(cases), "packed_cases", f"{len(cases)} checkpoints")
    return bad > 0


sys.exit(main())

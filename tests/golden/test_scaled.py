#!/usr/bin/env python3
"""Dialects of a weight with scales beside it: fp8 and its kin, ModelOpt, Quark, the INT8 families.

First the checkpoints that the tools wrote themselves (tests/fixtures/quant, or the folder given as argument):
weights by SHA-256, or against the tool's samples and the source, and the size of the loss of the logits. Then
checkpoints packed here, with numpy and ml_dtypes, in layouts for which no tool was at hand: their weights must come
back bit for bit, and their logits must be those of a plain numpy pass with the same rules for the activations.

Usage: test_scaled.py [FOLDER [SOURCES]]; TARE comes from the environment."""
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

HERE = os.path.dirname(os.path.abspath(__file__))
FIXTURES = os.path.join(HERE, "..", "fixtures", "quant")
TARE = os.path.abspath(os.environ.get("TARE", "build/tare"))
F8, FNUZ, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2
E8M0, F4, BF16 = ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn, ml_dtypes.bfloat16
f32 = np.float32
TAGS = {np.dtype(t): n for t, n in ((np.float32, "F32"), (BF16, "BF16"), (np.float16, "F16"), (F8, "F8_E4M3"),
        (FNUZ, "F8_E4M3FNUZ"), (E5M2, "F8_E5M2"), (E8M0, "F8_E8M0"), (np.uint8, "U8"), (np.int8, "I8"))}
bad = 0


def read_st(path):
    """Also the types that safetensors.numpy has no name for."""
    types, out = {n: t for t, n in TAGS.items()}, {}
    with open(path, "rb") as f:
        head = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    for name, d in head.items():
        if name != "__metadata__":
            lo, hi = d["data_offsets"]
            out[name] = np.frombuffer(data[lo:hi], types[d["dtype"]]).reshape(d["shape"])
    return out


def report(good, name, why=""):
    global bad
    bad += not good
    print("ok" if good else "FAIL", name, why if not good else "")


def rms(x):
    return float(np.sqrt(np.mean(np.asarray(x, np.float64) ** 2)))


def run(*args, poison=None):
    env = {**os.environ, "MALLOC_PERTURB_": str(poison)} if poison else None
    p = subprocess.run([TARE, *args], capture_output=True, text=True, env=env)
    return p.returncode, p.stderr.strip()


def plain(model, tmp):
    """Every tensor as `tare convert` gives it in f32, or the error text."""
    out = os.path.join(tmp, "plain")
    rc, why = run("convert", model, "-o", out, "--to", "plain", "--dtype", "f32", "--overwrite")
    return why if rc else load_file(os.path.join(out, "model.safetensors"))


def dump(model, ids, tmp, *options, poison=None):
    with open(os.path.join(tmp, "ids.json"), "w") as f:
        json.dump([[int(i) for i in ids]], f)
    out = os.path.join(tmp, "logits.safetensors")
    rc, why = run("dump", model, "--tokens", os.path.join(tmp, "ids.json"), "-o", out, *options, poison=poison)
    return why if rc else load_file(out)["logits.0"]


# ---- a plain numpy pass ---------------------------------------------------------------------------------------------

def forward(cfg, w, ids, lin):
    """fp32 logits of a one-layer Llama; lin(module, x) is the product with a linear."""
    H, Hk, D = cfg["num_attention_heads"], cfg["num_key_value_heads"], cfg["head_dim"]
    T, p = len(ids), "model.layers.0."
    theta = cfg.get("rope_theta") or cfg["rope_parameters"]["rope_theta"]

    def norm(x, name):
        x = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + cfg["rms_norm_eps"]) * w[name]
        return x.astype(f32)

    def rot(t):
        return np.concatenate([t[..., :D // 2] * c - t[..., D // 2:] * s, t[..., D // 2:] * c + t[..., :D // 2] * s],
                              -1)

    angle = np.arange(T)[:, None] / theta ** (np.arange(0, D, 2) / D)
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    x = w["model.embed_tokens.weight"][ids]
    h = norm(x, p + "input_layernorm.weight")
    q, k, v = (lin(p + "self_attn.%s_proj" % n, h).reshape(T, -1, D) for n in "qkv")
    k, v = np.repeat(rot(k), H // Hk, 1), np.repeat(v, H // Hk, 1)
    a = np.where(np.tril(np.ones((T, T), bool)), np.einsum("thd,shd->hts", rot(q), k) / np.sqrt(D), -np.inf)
    a = np.exp(a - a.max(-1, keepdims=True))
    o = np.einsum("hts,shd->thd", a / a.sum(-1, keepdims=True), v).reshape(T, -1).astype(f32)
    x = x + lin(p + "self_attn.o_proj", o)
    h = norm(x, p + "post_attention_layernorm.weight")
    g, u = lin(p + "mlp.gate_proj", h), lin(p + "mlp.up_proj", h)
    x = x + lin(p + "mlp.down_proj", (g / (1 + np.exp(-g)) * u).astype(f32))
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


# ---- checkpoints of the tools ---------------------------------------------------------------------------------------

# Relative distance of weight x pre_quant_scale x norm ratio from the source; and for which modules the samples, which
# the tool took before its export, are equal in bf16.
SOURCE_ERROR = {"modelopt_fp8": (.02, .03), "modelopt_int4": (.1, .14), "modelopt_w4a8": (.1, .145),
                "modelopt_int8": (.005, .105)}
SAMPLES = {"modelopt_int4_awq": ("o_proj", "down_proj"), "modelopt_w4a8_awq": ("o_proj", "down_proj"),
           "modelopt_int8_sq": ("_proj",)}
WEIGHTS_ONLY = ("modelopt_nvfp4", "modelopt_moe_nvfp4", "deepseek_")


def fused(w, module):
    """Experts that the golden holds as one tensor [E, out, in]: put together from the modules of the file."""
    if module + ".weight" in w:
        return w[module + ".weight"]
    parent, last = module.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    rows, e = [], 0
    while "%s.%d.%s.weight" % (parent, e, parts[0]) in w:
        rows.append(np.concatenate([w["%s.%d.%s.weight" % (parent, e, n)] for n in parts]))
        e += 1
    return np.stack(rows) if rows else None


def check_hashes(case, w, golden):
    n = wrong = 0
    for module, d in golden["dequantized_fp32"].items():
        if "sha256_fp32" not in d:
            continue
        x = fused(w, module)
        forms = [] if x is None else [np.ascontiguousarray(y).tobytes() for y in (x, x + f32(0))]
        n += 1
        wrong += d["sha256_fp32"] not in [hashlib.sha256(b).hexdigest() for b in forms]
    if n:
        report(not wrong, "%s_weights" % case, "%d of %d differ" % (wrong, n))
    return n


def check_against_source(case, folder, w, golden, source):
    """ModelOpt changes the model at export: no hash exists."""
    lo, hi = next(v for k, v in SOURCE_ERROR.items() if case.startswith(k))
    raw, src = (read_st(os.path.join(d, "model.safetensors")) for d in (folder, source))
    sample = load_file(os.path.join(folder, "golden.safetensors"))
    far, off = [], []
    for module in golden["dequantized_fp32"]:
        x, s = w[module + ".weight"].astype(np.float64), src[module + ".weight"].astype(np.float64)
        pre = raw.get(module + ".pre_quant_scale", np.ones(x.shape[1])).astype(np.float64)
        layer = module.rsplit(".", 2)[0]
        norm = {"q": "input", "k": "input", "v": "input", "g": "post_attention", "u": "post_attention"}.get(
            module.rsplit(".", 1)[1][0])
        ratio = 1.0
        if norm:
            n = "%s.%s_layernorm.weight" % (layer, norm)
            ratio = raw[n].astype(np.float64) / src[n].astype(np.float64)
        err = np.linalg.norm(x * ratio - s) / np.linalg.norm(s)
        if not lo <= err <= hi:
            far.append("%s %.4f" % (module, err))
        if any(module.endswith(m) for m in SAMPLES.get(case, ())):
            want = sample["sample." + module].astype(np.float64)
            have = (x / pre)[:want.shape[0], :want.shape[1]].astype(f32).astype(BF16).astype(np.float64)
            off += [module] if (have != want).any() else []
    report(not far, "%s_weights_near_source" % case, ", ".join(far))
    if case in SAMPLES:
        report(not off, "%s_samples" % case, ", ".join(off))


def check_logits(case, folder, tmp):
    g = load_file(os.path.join(folder, "golden.safetensors"))
    only = case.startswith(WEIGHTS_ONLY)
    options = ["--activation-dtype", "f32" if only else "spec"]
    if only:
        options += ["--kv-cache-dtype", "f32"]
    have, base = dump(folder, g["input_ids"].ravel(), tmp, *options), g["logits_unquantized"]
    if isinstance(have, str):
        if "cannot be run" in have:
            return print("skip %s_logits: %s" % (case, have))
        return report(False, "%s_logits" % case, have)
    if "logits" not in g:
        return report(rms(have - base) < rms(base), "%s_logits" % case, "loss %.4f" % rms(have - base))
    loss = rms(g["logits"] - base)
    if only:
        far = np.abs(have - g["logits"]).max()
        return report(far < 2e-3, "%s_logits" % case, "%.2e off" % far)
    # Quark calibrates K before its rotation: of its KV scales only the size of the loss compares.
    if case.startswith("quark") and "_kv" not in case:
        far = rms(have - g["logits"]) / loss
        return report(far < .1, "%s_logits" % case, "%.3f of the loss away" % far)
    share = rms(have - base) / loss
    report(.7 < share < 1.3, "%s_loss" % case, "%.3f of the golden's" % share)


def check_case(case, folder, source, tmp):
    with open(os.path.join(folder, "golden.json")) as f:
        golden = json.load(f)
    w = plain(folder, tmp)
    if isinstance(w, str):
        return report(False, "%s_convert" % case, w)
    if not check_hashes(case, w, golden):
        check_against_source(case, folder, w, golden, source)
    if os.path.exists(os.path.join(folder, "golden.safetensors")):
        check_logits(case, folder, tmp)


# ---- checkpoints packed here ----------------------------------------------------------------------------------------

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 192,
          "intermediate_size": 320, "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2,
          "head_dim": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
          "hidden_act": "silu", "dtype": "bfloat16", "tie_word_embeddings": False}
LINEARS = {"self_attn.q_proj": (192, 192), "self_attn.k_proj": (64, 192), "self_attn.v_proj": (64, 192),
           "self_attn.o_proj": (192, 192), "mlp.gate_proj": (320, 192), "mlp.up_proj": (320, 192),
           "mlp.down_proj": (192, 320)}


def source_model():
    r = np.random.default_rng(7)
    w = {"model.layers.0.%s.weight" % n: r.standard_normal(s) / np.sqrt(s[1]) for n, s in LINEARS.items()}
    w["model.embed_tokens.weight"] = r.standard_normal((64, 192))
    w["lm_head.weight"] = r.standard_normal((64, 192)) / 8
    for n in ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"):
        w[n + ".weight"] = 1 + r.standard_normal(192) / 8
    return {k: v.astype(BF16) for k, v in w.items()}


def write_st(path, tensors):
    head, blobs, at = {}, [], 0
    for name, x in tensors.items():
        b = np.ascontiguousarray(x).tobytes()
        head[name] = {"dtype": TAGS[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + len(b)]}
        blobs.append(b)
        at += len(b)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def clip8(x, t=F8, top=448):
    return np.clip(x, -top, top).astype(t)


def grow(s, bn, bk, shape):
    """Scales of blocks, one for each element."""
    return np.repeat(np.repeat(s, bn, 0), bk, 1)[:shape[0], :shape[1]]


def blocks(w, bn, bk):
    """amax of each block, ragged ones too."""
    N, K = w.shape
    p = np.zeros((-(-N // bn) * bn, -(-K // bk) * bk), f32)
    p[:N, :K] = np.abs(w)
    return p.reshape(-1, bn, p.shape[1] // bk, bk).max((1, 3))


def pow2_up(x):
    return (2.0 ** np.ceil(np.log2(x))).astype(f32)


def nibbles(codes):
    c = codes.view(np.uint8) & 15
    return (c[:, ::2] | c[:, 1::2] << 4).astype(np.uint8)


# Packers: weight f32 -> (tensors by suffix, the weight that they mean).
def p_tensor(t=F8, top=448, div=448, **extra):
    def pack(w):
        s = f32(np.abs(w).max() / f32(div))
        q = clip8(w / s, t, top)
        return {"weight": q, "weight_scale": np.array(s, f32), **extra}, q.astype(f32) * s
    return pack


def p_rows(shape=lambda n: (n, 1), dtype=f32):
    def pack(w):
        s = (np.abs(w).max(1, keepdims=True) / f32(448)).astype(dtype).astype(f32)
        q = clip8(w / s)
        return {"weight": q, "weight_scale": s.reshape(shape(len(w))).astype(dtype)}, q.astype(f32) * s
    return pack


def p_block(bn=128, bk=128, dtype=f32, name="weight_scale_inv", shape=None):
    def pack(w):
        s = np.maximum(blocks(w, bn, bk), f32(1e-4)) / f32(448)
        s = pow2_up(s) if dtype in (E8M0, np.uint8) else s.astype(dtype).astype(f32)
        q = clip8(w / grow(s, bn, bk, w.shape))
        stored = s.astype(E8M0).view(np.uint8) if dtype == np.uint8 else s.astype(dtype)
        return ({"weight": q, name: stored.reshape(shape(stored)) if shape else stored},
                q.astype(f32) * grow(s, bn, bk, w.shape))
    return pack


def p_int8(bn=None, bk=None, zero=False, name="weight_scale", **extra):
    def pack(w):
        if bn:
            s = grow(blocks(w, bn, bk) / f32(127), bn, bk, w.shape)
            stored = blocks(w, bn, bk) / f32(127)
        else:
            stored = s = np.abs(w).max(1, keepdims=True) / f32(127)
        z = np.full((len(w), 1), 5, np.int8) if zero else np.int8(0)
        q = np.clip(np.rint(w / s) + z, -128, 127).astype(np.int8)
        t = {"weight": q, name: stored.astype(f32), **extra}
        if zero:
            t["weight_zero_point"] = z.reshape(-1)
        return t, (q.astype(f32) - z.astype(f32)) * s.astype(f32)
    return pack


def p_mx(elem, name="weight_scale", **extra):
    def pack(w):
        top, off = (6, 2) if elem == F4 else (448, 8)
        e = np.floor(np.log2(blocks(w, 1, 32))) - off
        s = (2.0 ** e).astype(f32)
        q = np.clip(w / grow(s, 1, 32, w.shape), -top, top).astype(elem)
        return ({"weight": nibbles(q) if elem == F4 else q, name: (e + 127).astype(np.uint8), **extra},
                q.astype(f32) * grow(s, 1, 32, w.shape))
    return pack


def p_nvfp4(top=2688, **extra):
    def pack(w):
        s2 = f32(np.abs(w).max() / f32(top))
        s = np.clip(blocks(w, 1, 16) / (6 * s2), 2.0 ** -9, 448).astype(F8)
        whole = grow(s.astype(f32) * s2, 1, 16, w.shape)
        q = np.clip(w / whole, -6, 6).astype(F4)
        return ({"weight": nibbles(q), "weight_scale": s, "weight_scale_2": np.array(s2, f32), **extra},
                q.astype(f32) * whole)
    return pack


def a_none(x):
    return x


def a_group(n, kind):
    """Dynamic scales over n neighbours, or the whole token."""
    def act(x):
        k = n or x.shape[1]
        s = np.concatenate([np.repeat(np.abs(x[:, i:i + k]).max(1, keepdims=True), min(k, x.shape[1] - i), 1)
                            for i in range(0, x.shape[1], k)], 1) / f32(448 if kind == "fp8" else 127.5)
        if kind == "fp8":
            return clip8(x / s).astype(f32) * s
        return np.clip(np.rint(x / s), -128, 127) * s
    return act


def a_static(s, kind, zero=0):
    def act(x):
        if kind == "fp8":
            return clip8(x / f32(s)).astype(f32) * f32(s)
        return ((np.clip(np.rint(x / f32(s)) + zero, -128, 127) - zero) * f32(s)).astype(f32)
    return act


def a_mx(elem):
    def act(x):
        top, off = (6, 2) if elem == F4 else (448, 8)
        amax = np.abs(x).reshape(len(x), -1, 32).max(2)
        bits = (amax.astype(f32).view(np.uint32) + np.uint32(0x200000)) >> np.uint32(23) & np.uint32(255)
        s = np.repeat(2.0 ** (bits.astype(np.float64) - 127 - off), 32, 1).astype(f32)
        return np.clip(x / s, -top, top).astype(elem).astype(f32) * s
    return act


def fp8(**keys):
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"], **keys}


def modelopt(algo, **keys):
    return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"], **keys}


def quark(weight, act=None):
    spec = {"symmetric": True, "is_dynamic": False, "group_size": None, "scale_format": None}
    return {"quant_method": "quark", "export": {"kv_cache_group": []}, "exclude": ["lm_head"],
            "layer_quant_config": {}, "global_quant_config": {"weight": {**spec, **weight},
                                                              "input_tensors": act and {**spec, **act}}}


def scalar(x):
    return np.array(x, f32)


S, G4 = .07, lambda s: (s.shape[0], 1, s.shape[1], 1)
OWN = {  # name: (quantization_config, packer, activations)
    "fp8_dynamic": (fp8(), p_tensor(), a_group(0, "fp8")),
    "fp8_static": (fp8(activation_scheme="static"), p_tensor(input_scale=scalar(S)), a_static(S, "fp8")),
    "fp8_static_one_element": (fp8(activation_scheme="static"), p_tensor(activation_scale=scalar([S])),
                               a_static(S, "fp8")),
    "fp8_block_ragged": (fp8(weight_block_size=[128, 128]), p_block(), a_group(128, "fp8")),
    "fp8_block_bf16_scales": (fp8(weight_block_size=[64, 96]), p_block(64, 96, BF16), a_group(96, "fp8")),
    "fp8_block_e8m0": (fp8(weight_block_size=[128, 128], scale_fmt="ue8m0"), p_block(dtype=E8M0), a_group(128, "fp8")),
    "fp8_block_ue8m0_bytes": (fp8(weight_block_size=[128, 128], scale_fmt="ue8m0"), p_block(dtype=np.uint8),
                              a_group(128, "fp8")),
    "fp8_fnuz_tag": (fp8(), p_tensor(FNUZ, 240, 240), a_group(0, "fp8")),
    "fp8_fnuz_224": (fp8(), p_tensor(FNUZ, 240, 224), a_group(0, "fp8")),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
               p_rows(), a_group(0, "fp8")),
    "w8a8_fp8": ({"quant_method": "w8a8_fp8"}, p_rows(), a_group(0, "fp8")),
    "mxfp8": ({"quant_method": "mxfp8", "activation_scheme": "dynamic"}, p_mx(F8, "weight_scale_inv"), a_mx(F8)),
    "w8a8_int8": ({"quant_method": "w8a8_int8"}, p_int8(), a_group(0, "int8")),
    "blockwise_int8": ({"quant_method": "blockwise_int8", "activation_scheme": "dynamic",
                        "weight_block_size": [128, 128]}, p_int8(128, 128, name="weight_scale_inv"),
                       a_group(128, "int8")),
    "modelopt_pb_wo_4d": (modelopt("fp8_pb_wo"), p_block(name="weight_scale", shape=G4), a_none),
    "modelopt_no_method": ({"producer": {"name": "modelopt"}, "quant_algo": "FP8", "kv_cache_scheme": None,
                            "config_groups": {"group_0": {"targets": ["Linear"]}}, "ignore": ["lm_head"]},
                           p_tensor(input_scale=scalar(S)), a_static(S, "fp8")),
    "modelopt_mxfp8": (modelopt("MXFP8"), p_mx(F8), a_mx(F8)),
    "modelopt_mxfp4": (modelopt("MXFP4"), p_mx(F4), a_mx(F4)),
    "modelopt_w4a8_mxfp4": (modelopt("W4A8_MXFP4_FP8"), p_mx(F4, input_scale=scalar(S)), a_static(S, "fp8")),
    "modelopt_w4a16_nvfp4": (modelopt("W4A16_NVFP4"), p_nvfp4(), a_none),
    "modelopt_w4a8_nvfp4": (modelopt("W4A8_NVFP4_FP8"), p_nvfp4(448, input_scale=scalar(S)), a_static(S, "fp8")),
    "modelopt_w8a16": (modelopt("W8A16"), p_int8(), a_none),
    "quark_fp8_channel": (quark({"dtype": "fp8_e4m3", "qscheme": "per_channel"},
                                {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": True}),
                          p_rows(lambda n: (n,)), a_group(0, "fp8")),
    "quark_fp8_block": (quark({"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}), p_block(),
                        a_none),
    "quark_int8_asym": (quark({"dtype": "int8", "qscheme": "per_channel", "symmetric": False},
                              {"dtype": "int8", "qscheme": "per_tensor", "symmetric": False}),
                        p_int8(zero=True, input_scale=scalar(.04), input_zero_point=np.array([-7], np.int8)),
                        a_static(.04, "int8", -7)),
    "quark_mxfp4": (quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}),
                    p_mx(F4), a_none),
}


def write_own(folder, quant, tensors, side=None, config=CONFIG):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({**config, **({"quantization_config": quant} if quant else {})}, f)
    if side:
        with open(os.path.join(folder, "hf_quant_config.json"), "w") as f:
            json.dump(side, f)
    write_st(os.path.join(folder, "model.safetensors"), tensors)


def pack_model(src, pack):
    """Tensors of the file and what they mean; pack is a packer, or one by module."""
    tensors, mean = {}, {}
    for name, x in src.items():
        module = name[:-7]
        p = pack(module) if pack.__name__ == "by_module" else pack
        mean[name] = x.astype(f32)
        if not module.endswith("_proj"):
            tensors[name] = x
            continue
        parts, mean[name] = p(x.astype(f32))
        tensors.update({"%s.%s" % (module, k): v for k, v in parts.items()})
    return tensors, mean


def check_own(name, folder, mean, base, act, tmp):
    w = plain(folder, tmp)
    if isinstance(w, str):
        return report(False, "own_%s" % name, w)
    wrong = [n for n in mean if n not in w or (w[n] + f32(0)).tobytes() != (mean[n] + f32(0)).tobytes()]
    report(not wrong and set(w) == set(mean), "own_%s_weights" % name, " ".join(wrong))
    ids = np.arange(40) * 7 % 64
    have = dump(folder, ids, tmp)
    if isinstance(have, str):
        return report(False, "own_%s_logits" % name, have)
    by_module = act if isinstance(act, dict) else None

    def lin(module, x):
        a = next(v for k, v in by_module.items() if k in module) if by_module else act
        return a(x) @ mean[module + ".weight"].T

    want = forward(CONFIG, mean, ids, lin)
    # Another order of summation flips single roundings, and a flip in one row reaches those behind it: a wrong
    # rule shows in every row, so the best tenth of them tells.
    far, loss = float(np.quantile([rms(r) for r in have - want], .1)), rms(want - base)
    report(far < .01 * loss and rms(have - want) < loss, "own_%s_logits" % name,
           "%.2e off, the loss is %.2e" % (far, loss))
    check_heap(name, folder, have, tmp)


def check_heap(name, folder, have, tmp):
    """The heap's content before a load must not show in what is loaded."""
    ids = np.arange(40) * 7 % 64
    same = all(np.array_equal(have, dump(folder, ids, tmp, poison=p)) for p in (85, 170))
    report(same, "own_%s_heap" % name)


def check_fused(tmp):
    """qkv_proj and gate_up_proj as Phi-3 stores them, with one scalar for the whole and with one for each part:
    the logits are those of the same codes in tensors of their own, whatever the heap holds."""
    src, p = source_model(), "model.layers.0."
    sets = {"self_attn.qkv_proj": ["self_attn.%s_proj" % n for n in "qkv"],
            "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"]}
    parts = [n for names in sets.values() for n in names]
    phi = {**CONFIG, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0,
           "original_max_position_embeddings": 64}
    ids, folder = np.arange(40) * 7 % 64, os.path.join(tmp, "fused")
    for name, quant, pack, second in (
            ("nvfp4", modelopt("NVFP4"), p_nvfp4(input_scale=scalar(.002)), "weight_scale_2"),
            ("fp8", modelopt("FP8"), p_tensor(input_scale=scalar(S)), "weight_scale")):
        for one in (True, False):
            twin, fused_t = {}, {}
            for n, x in src.items():
                if not n.endswith("_proj.weight"):
                    twin[n] = fused_t[n] = x
                elif n[len(p):-7] not in parts:
                    d = {n[:-6] + k: v for k, v in pack(x.astype(f32))[0].items()}
                    twin.update(d)
                    fused_t.update(d)
            for whole, names in sets.items():
                w = [src[p + n + ".weight"].astype(f32) for n in names]
                packed = [pack(x)[0] for x in w]
                if one:
                    all_rows, at = pack(np.concatenate(w))[0], 0
                    packed = []
                    for x in w:
                        packed.append({k: v[at:at + len(x)] if v.ndim else v for k, v in all_rows.items()})
                        at += len(x)
                for n, d in zip(names, packed):
                    twin.update({p + n + "." + k: v for k, v in d.items()})
                for k, v in packed[0].items():
                    both = [d[k] for d in packed]
                    fused_t[p + whole + "." + k] = (np.concatenate(both) if v.ndim else
                                                    np.array(both) if k == second and not one else v)
            write_own(folder, quant, twin)
            want = dump(folder, ids, tmp)
            write_own(folder, quant, fused_t, config=phi)
            have = [dump(folder, ids, tmp, poison=x) for x in (None, 85, 170)]
            which = "fused_%s_%s" % (name, "one_scale" if one else "a_scale_each")
            if isinstance(want, str) or isinstance(have[0], str):
                report(False, which, "%s %s" % (want if isinstance(want, str) else "", have[0]))
                continue
            report(all(np.array_equal(have[0], h) for h in have), which + "_heap")
            far = float(np.quantile([rms(r) for r in have[0] - want], .1))
            report(far < 1e-4 and rms(have[0] - want) < .2 * rms(want), which, "%.2e off" % far)


# ---- from one dialect to another ------------------------------------------------------------------------------------

ROUND = [("ct_nvfp4", "modelopt", None), ("deepseek_fp8_block", "compressed-tensors", None),
         ("modelopt_fp8_kv", "compressed-tensors", None), ("modelopt_fp8_kv", "fp8", "KV"),
         ("modelopt_int8_sq", "modelopt", None), ("modelopt_int8_sq", "compressed-tensors", "scales the input"),
         ("modelopt_w4a8_awq", "modelopt", "scales the input"), ("ct_mixed_w4_fp8", "modelopt", None),
         ("ct_fp8_kv_head", "modelopt", "one scale a tensor"), ("deepseek_fp8_block", "modelopt", "block128x128"),
         ("modelopt_nvfp4", "compressed-tensors", "reciprocal")]


def check_rounds(tmp):
    out = os.path.join(tmp, "other")
    for case, to, why in ROUND:
        folder, name = os.path.join(FIXTURES, case), "%s_to_%s" % (case, to)
        rc, text = run("convert", folder, "-o", out, "--to", to, "--overwrite")
        if why or rc:
            report(bool(why) and rc == 1 and why in text, name, text)
            continue
        a, b = plain(folder, tmp), plain(out, tmp)
        report(not isinstance(b, str) and set(a) == set(b) and all(np.array_equal(a[k], b[k]) for k in a), name,
               b if isinstance(b, str) else "")
        if to == "modelopt":
            with open(os.path.join(out, "hf_quant_config.json")) as f:
                side = json.load(f)["quantization"]
            with open(os.path.join(out, "config.json")) as f:
                report(json.load(f)["quantization_config"]["quant_algo"] == side["quant_algo"], name + "_side_file")


def check_all_own(tmp):
    src = source_model()
    plain_w = {k: v.astype(f32) for k, v in src.items()}
    ids = np.arange(40) * 7 % 64
    base = forward(CONFIG, plain_w, ids, lambda m, x: x @ plain_w[m + ".weight"].T)
    folder = os.path.join(tmp, "own")
    for name, (quant, pack, act) in OWN.items():
        tensors, mean = pack_model(src, pack)
        write_own(folder, quant, tensors)
        check_own(name, folder, mean, base, act, tmp)
    # E4M3FNUZ bytes that only the config tells of.
    tensors, mean = pack_model(src, p_tensor(FNUZ, 240, 240))
    write_own(folder, fp8(fmt="e4m3fnuz"), {k: v.view(F8) if v.dtype == FNUZ else v for k, v in tensors.items()})
    check_own("fp8_fnuz_fmt", folder, mean, base, a_group(0, "fp8"), tmp)

    def by_module(module):
        return p_tensor(input_scale=scalar(S)) if "attn" in module else p_nvfp4()
    tensors, mean = pack_model(src, by_module)
    layers = {"model.layers.0." + n: {"quant_algo": "FP8"} if "attn" in n else
              {"quant_algo": "W4A16_NVFP4", "group_size": 16} for n in LINEARS if "mlp" not in n}
    layers["model.layers.0.mlp"] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    quant = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": ["lm_head"]}
    acts = {"attn": a_static(S, "fp8"), "mlp": a_none}
    os.remove(os.path.join(folder, "config.json"))
    write_own(folder, {**quant, "quant_method": "modelopt"}, tensors)
    check_own("modelopt_mixed", folder, mean, base, acts, tmp)
    write_own(folder, None, tensors, {"producer": {"name": "modelopt"}, "quantization": quant})
    check_own("modelopt_side_file", folder, mean, base, acts, tmp)


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else FIXTURES
    source = sys.argv[2] if len(sys.argv) > 2 else os.path.join(FIXTURES, "source")
    if not os.path.exists(TARE):
        print("skip scaled: no tare binary in $TARE")
        return 0
    with tempfile.TemporaryDirectory() as tmp:
        for case in sorted(os.listdir(root)):
            folder = os.path.join(root, case)
            if case.startswith(("modelopt", "deepseek", "quark")) and os.path.isdir(folder):
                check_case(case, folder, source, tmp)
        check_all_own(tmp)
        check_fused(tmp)
        check_rounds(tmp)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Hostile inputs through the command line and the server: damaged checkpoints, full disks, killed
writers, requests that no client should send.

For each input: the exit status is the stated one and never a signal, the message names the file,
tensor or key and what to do, no output folder and no temporary one is left, and a server that got
it still answers a normal request. Inputs of the public reports carry their row (A05, B01, F04 …).
Prints "ok NAME", "FAIL NAME: why" or "skip NAME: why". TARE names the program, for example one
built with the sanitizers; --table prints each command's status and message.
"""
import hashlib, json, os, re, resource, shutil, signal, socket, struct, subprocess, sys, tempfile, threading, time
import traceback, urllib.error, urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.chdir(ROOT)
TARE = os.path.abspath(os.environ.get("TARE", "build/tare"))
MILLET, LLAMA, STORIES = "models/millet-7m", "tests/fixtures/arch/llama", "tests/fixtures/tiny/stories260K"
QUANT, GGUF = "tests/fixtures/quant", "tests/fixtures/gguf/tiny.gguf"
TABLE = "--table" in sys.argv
try:
    import numpy as np
except ImportError as why:
    print(f"skip test_hostile: {why}")
    sys.exit(0)
if not os.path.exists(TARE):
    print(f"skip test_hostile: there is no {TARE}")
    sys.exit(0)

TMP = tempfile.mkdtemp(prefix="hostile-")
FAULTS = ("AddressSanitizer", "runtime error:", "LeakSanitizer", "UndefinedBehaviorSanitizer")
SANITIZED = b"__asan_init" in open(TARE, "rb").read()
SLOW = 4 if SANITIZED else 1  # times as long


class Skip(Exception):
    pass


def path(name):
    return os.path.join(TMP, name)


def fresh(name):
    p = path(name)
    shutil.rmtree(p, ignore_errors=True)
    return p


class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err
        self.text = out + err

    def json(self):
        return json.loads(self.out)


def tare(*args, timeout=25, env=None, label="", **more):
    """Runs the program; a signal, a sanitizer report or a hang is an error whatever the test expects."""
    try:
        r = subprocess.run([TARE, *map(str, args)], capture_output=True, timeout=timeout * SLOW,
                           env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, **more)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"`tare {' '.join(map(str, args))[:200]}` hangs")
    r = Result(r.returncode, r.stdout.decode("utf-8", "strict"), r.stderr.decode("utf-8", "strict"))
    show = " ".join(map(str, args)).replace(TMP + "/", "")[:110]
    if TABLE:
        errors = [x for x in r.err.split("\n") if "error" in x] or r.err.strip().split("\n")
        print(f"    | {show} | {r.code} | {errors[-1].replace(TMP + '/', '')[:300]}")
    assert r.code >= 0, f"`tare {show}` ends by signal {-r.code}: {r.err[-1500:]}"
    for f in FAULTS:
        assert f not in r.text, f"`tare {show}`: {r.err[:3000]}"
    return r


def leftovers(out):
    where, base = os.path.split(out)
    return [n for n in os.listdir(where) if n == base or n.startswith(base + ".tmp-")]


def refused(args, *words, code=(1, 2), **more):
    """The command fails in one sentence that holds every word; nothing is left at -o."""
    for flag in ("-o", "--output"):
        if flag in args and args[args.index(flag) + 1].startswith(TMP):
            out = args[args.index(flag) + 1]
            shutil.rmtree(out, ignore_errors=True) if os.path.isdir(out) else os.path.exists(out) and os.unlink(out)
    r = tare(*args, **more)
    assert r.code in code, f"exit {r.code}, expected {code}: {args} {r.text[-600:]}"
    for w in words:
        assert re.search(w, r.err), f"no /{w}/ in: {r.err[-800:]}"
    errors = [x for x in r.err.split("\n") if "error" in x.split(":")[1:3] or "error:" in x]
    assert len(errors) == 1, f"not one error line: {r.err[-800:]}"
    assert len(errors[0]) < 2500, f"{len(errors[0])} bytes of message"
    for flag in ("-o", "--output"):
        if flag in args:
            left = leftovers(args[args.index(flag) + 1])
            assert not left, f"left behind: {left}"
    return r


# ---- building checkpoints -----------------------------------------------------------------------------------------

def st_read(p):
    """{name: (dtype, shape, bytes)} of a safetensors file."""
    raw = open(p, "rb").read()
    n = struct.unpack("<Q", raw[:8])[0]
    h = json.loads(raw[8:8 + n])
    return {k: (v["dtype"], v["shape"], raw[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]])
            for k, v in h.items() if k != "__metadata__"}


def st_write(p, tensors, edit=None):
    head, at = {"__metadata__": {"format": "pt"}}, 0
    for k, (dt, shape, data) in tensors.items():
        head[k] = {"dtype": dt, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    if edit:
        head = edit(head) or head
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(p, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))


def bf16(a):
    u = np.ascontiguousarray(a, dtype=np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def f32_of(t):
    dt, shape, raw = t
    if dt == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[dt]).astype(np.float32).reshape(shape)


def model(name, src=LLAMA, config=None, tensors=None, header=None, files=None, drop=()):
    """A copy of a model folder with edits: config(dict), tensors(dict), header(dict), files {name: text}."""
    p = fresh(name)
    os.makedirs(p)
    for f in os.listdir(src):
        full = os.path.join(src, f)
        if os.path.isfile(full) and "golden" not in f and f not in drop and not f.endswith((".jsonl", ".txt")):
            os.symlink(os.path.abspath(full), os.path.join(p, f))
    if config:
        c = json.load(open(f"{src}/config.json"))
        c = config(c) or c
        os.unlink(f"{p}/config.json")
        open(f"{p}/config.json", "w").write(c if isinstance(c, str) else json.dumps(c))
    if tensors or header:
        t = st_read(f"{src}/model.safetensors")
        t = (tensors and tensors(t)) or t
        os.unlink(f"{p}/model.safetensors")
        st_write(f"{p}/model.safetensors", t, header)
    for f, text in (files or {}).items():
        if os.path.lexists(f"{p}/{f}"):
            os.unlink(f"{p}/{f}")
        open(f"{p}/{f}", "wb").write(text if isinstance(text, bytes) else text.encode())
    return p


def everywhere(m, *words, scheme="fp8", may=()):
    """inspect, quantize, convert and dump refuse the model; the commands in `may` may also accept it."""
    ids = path("ids.json")
    open(ids, "w").write("[[1,2,3]]")
    for args in (["inspect", m], ["quantize", m, "-o", path("out"), "--scheme", scheme],
                 ["convert", m, "-o", path("out")], ["dump", m, "--tokens", ids, "-o", path("out")]):
        if args[0] in may:
            r = tare(*args)
            assert r.code in (0, 1, 2), r.text
            shutil.rmtree(path("out"), ignore_errors=True)
            if os.path.exists(path("out")):
                os.unlink(path("out"))
        else:
            refused(args, *words)


def set_key(k, v):
    return lambda c: c.update({k: v})


# ---- safetensors --------------------------------------------------------------------------------------------------

Q0 = "model.layers.0.self_attn.q_proj.weight"


def test_truncated_shard():
    raw = open(f"{LLAMA}/model.safetensors", "rb").read()
    for keep in (0, 5, 8, 100, len(raw) // 2, len(raw) - 1):
        m = model("truncated", files={"model.safetensors": raw[:keep]})
        everywhere(m, r"truncated/model\.safetensors", "again|truncated|bytes")


def test_trailing_bytes():
    raw = open(f"{LLAMA}/model.safetensors", "rb").read()
    everywhere(model("trailing", files={"model.safetensors": raw + b"\0" * 64}), r"model\.safetensors", "bytes")


def test_header_offsets():
    def overlap(h):
        h[Q0]["data_offsets"] = [x - 16 for x in h[Q0]["data_offsets"]]
    def backwards(h):
        h[Q0]["data_offsets"] = h[Q0]["data_offsets"][::-1]
    def beyond(h):
        h[Q0]["data_offsets"][1] = 1 << 40
    def wraps(h):
        h[Q0]["data_offsets"] = [2**64 - 64, 2**64 - 1]
    def negative(h):
        h[Q0]["data_offsets"][0] = -16
    def fraction(h):
        h[Q0]["data_offsets"][0] = 0.5
    def strings(h):
        h[Q0]["data_offsets"] = ["0", "16"]
    def three(h):
        h[Q0]["data_offsets"] = [0, 16, 32]
    for f in (overlap, backwards, beyond, wraps, negative, fraction, strings, three):
        everywhere(model("offsets", header=f), r"model\.safetensors", re.escape(Q0) + "|overlap|offset")


def test_header_shapes():
    def shape(s):
        return lambda h: h[Q0].update(shape=s)
    for s in ([-64, 64], [2**32, 2**32], [2**63, 2], [64.5, 64], ["64", 64], [], [64] * 40, 64, None, [64, 65]):
        everywhere(model("shapes", header=shape(s)), r"model\.safetensors", re.escape(Q0), "shape|dim|bytes")


def test_header_texts():
    with open(path("huge"), "wb") as f:  # sparse: a header of 2 GB that is really there
        f.write(struct.pack("<Q", 2 << 30))
        f.truncate((2 << 30) + 4096)
    m = model("header", drop=["model.safetensors"])
    os.symlink(path("huge"), f"{m}/model.safetensors")
    start = time.time()
    everywhere(m, r"model\.safetensors", "header", "2147483648|limit|MB|MiB")
    assert time.time() - start < 20 * SLOW
    os.unlink(path("huge"))
    for n in (2**31, 2**63, 2**64 - 1, 2**64 - 8, 0):
        everywhere(model("header", files={"model.safetensors": struct.pack("<Q", n) + b"{}" + b"\0" * 100}),
                   r"model\.safetensors", "header")
    for text in (b"[]", b"{", b"null", b'{"a":', b"\xff\xfe{}", b"[" * 100000, b'{"a":1}', b'{"a":{}}',
                 b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}',
                 b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'):
        data = struct.pack("<Q", len(text)) + text + b"\0\0\0\0"
        everywhere(model("header", files={"model.safetensors": data}), r"model\.safetensors")


def test_zeros_and_empty():
    everywhere(model("zeros", files={"model.safetensors": b"\0" * 65536}), r"zeros/model\.safetensors", "JSON|header")
    open(path("zero.file"), "wb").write(b"\0" * 65536)
    everywhere(path("zero.file"), r"zero\.file")
    open(path("zero.gguf"), "wb").write(b"\0" * 65536)
    everywhere(path("zero.gguf"), r"zero\.gguf", "GGUF|magic")
    os.makedirs(fresh("empty"))
    everywhere(path("empty"), "empty", r"config\.json")
    everywhere(path("there-is-none"), "there-is-none")
    everywhere("", "")
    everywhere("/dev/null", "/dev/null")


def test_missing_wrong_tensors():
    def without(name):
        def f(t):
            del t[name]
        return f
    def dtype(dt):
        def f(t):
            _, shape, raw = t[Q0]
            t[Q0] = (dt, shape, raw * (4 if dt in ("F64", "I64") else 1))
        return f
    def transposed(t):
        dt, shape, raw = t["model.layers.0.mlp.up_proj.weight"]
        t["model.layers.0.mlp.up_proj.weight"] = (dt, shape[::-1], raw)
    def flat(t):
        dt, shape, raw = t["model.norm.weight"]
        t["model.norm.weight"] = (dt, [shape[0], 1, 1], raw)
    ids = path("ids.json")
    open(ids, "w").write("[[1,2,3]]")
    for name in (Q0, "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"):
        m = model("missing", tensors=without(name))
        refused(["dump", m, "--tokens", ids, "-o", path("out")], re.escape(name), "missing", "missing")
        for c in ("quantize", "convert", "inspect"):
            everywhere(m, re.escape(name), "missing", may=("inspect", "quantize", "convert"))
    refused(["dump", model("dtype", tensors=dtype("I64")), "--tokens", ids, "-o", path("out")], re.escape(Q0), "(?i)i64|quantized")
    everywhere(model("dtype", tensors=dtype("I64")), re.escape(Q0), "(?i)i64|quantized", may=("inspect",))
    for f, name in ((transposed, "model.layers.0.mlp.up_proj"), (flat, "model.norm.weight")):
        refused(["dump", model("shape", tensors=f), "--tokens", ids, "-o", path("out")], re.escape(name), "128|64")
        everywhere(model("shape", tensors=f), re.escape(name), may=("inspect", "quantize", "convert"))


def test_shard_index():
    def index(shard):
        names = list(st_read(f"{LLAMA}/model.safetensors"))
        return json.dumps({"metadata": {"total_size": 1}, "weight_map": {n: shard for n in names}})
    open(path("outside.safetensors"), "wb").write(open(f"{LLAMA}/model.safetensors", "rb").read())
    for shard in ("model-00001-of-00002.safetensors", "../outside.safetensors", path("outside.safetensors"),
                  "", "a/../../outside.safetensors"):
        everywhere(model("index", drop=["model.safetensors"], files={"model.safetensors.index.json": index(shard)}),
                   r"model\.safetensors\.index\.json|00001-of-00002",
                   may=("inspect",) if shard.startswith("model-") else ())  # not fetched: config and index speak
    for text in ("{}", "[]", '{"weight_map":[]}', '{"weight_map":{"a":1}}', "[" * 50000, '{"weight_map":{}}'):
        everywhere(model("index", drop=["model.safetensors"], files={"model.safetensors.index.json": text}),
                   r"model\.safetensors\.index\.json")


# ---- config.json --------------------------------------------------------------------------------------------------

def test_config_values():
    for k, v in (("hidden_size", 1e300), ("hidden_size", 2**63 - 1), ("hidden_size", 0), ("hidden_size", -64),
                 ("hidden_size", "64"), ("hidden_size", 64.5), ("num_hidden_layers", 2**31 - 1),
                 ("num_hidden_layers", -1), ("num_hidden_layers", 1e18), ("vocab_size", 1e18), ("vocab_size", 0),
                 ("num_attention_heads", 0), ("num_attention_heads", 2**62),
                 ("num_key_value_heads", 0), ("num_key_value_heads", -2), ("head_dim", -1), ("head_dim", 2**40),
                 ("intermediate_size", 2**62), ("rms_norm_eps", -1), ("rms_norm_eps", "x"),
                 ("hidden_act", 7), ("max_position_embeddings", -5), ("max_position_embeddings", 1e300),
                 ("num_hidden_layers", None), ("intermediate_size", []), ("eos_token_id", -7), ("eos_token_id", 2**40),
                 ("eos_token_id", "x"), ("tie_word_embeddings", "maybe"), ("rope_parameters", 7),
                 ("rope_parameters", []), ("rope_scaling", "x"), ("quantization_config", 7), ("quantization_config", [])):
        everywhere(model("config", config=set_key(k, v)), r"config/config\.json", k)
    # What only running needs: inspect shows it with a warning, the others may work on the tensors.
    ids = path("ids.json")
    open(ids, "w").write("[[1,2,3]]")
    for k, v, word in (("num_key_value_heads", 3, "4 attention heads"), ("head_dim", 15, "head_dim"),
                       ("hidden_act", "explode", "explode")):
        m = model("config", config=set_key(k, v))
        refused(["dump", m, "--tokens", ids, "-o", path("out")], r"config\.json", word)
        refused(["serve", m, "--port", "0"], r"config\.json", word)
        r = tare("inspect", m)
        assert r.code == 0 and re.search("warning.*" + word, r.text), r.text
        r = tare("quantize", m, "-o", path("out"), "--scheme", "fp8")
        assert r.code == 0 and word in r.text, r.text
    for v in ({"rope_type": "default", "rope_theta": 0}, {"rope_type": "default", "rope_theta": -1},
              {"rope_type": "spiral", "rope_theta": 1e4}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}):
        everywhere(model("config", config=set_key("rope_parameters", v)), r"config\.json|config/", "rope")


def test_config_texts():
    for text in ("", "[]", "null", "{", '{"a":1', "\0\0\0", "[" * 100000, '{"a":' * 100000, '"x"', '{"model_type":"llama"}'):
        everywhere(model("text", files={"config.json": text}), r"text/config\.json")
    ids = path("ids.json")
    open(ids, "w").write("[[1,2,3]]")
    for text in ("{}", "\ufeff{}", '{"architectures":[]}', '{"architectures":"LlamaForCausalLM"}'):
        m = model("text", files={"config.json": text})
        refused(["dump", m, "--tokens", ids, "-o", path("out")], r"config\.json", "architecture", "LlamaForCausalLM")
        everywhere(m, may=("inspect", "quantize", "convert", "dump"))


def test_unknown_architecture():
    m = model("arch", config=lambda c: c.update(architectures=["FooForCausalLM"], model_type="foo"))
    everywhere(m, "FooForCausalLM", "supported are LlamaForCausalLM", may=("inspect", "convert", "quantize"))
    for args in (["serve", m, "--port", "0"], ["plan", m], ["run", m, "-p", "x"]):
        refused(args, "FooForCausalLM", "supported are LlamaForCausalLM")
    r = tare("quantize", m, "-o", path("out"), "--scheme", "fp8")
    assert r.code == 0 and "FooForCausalLM" in r.text, r.text


def test_unknown_quant_method():
    q = {"quant_method": "alien", "bits": 4}
    everywhere(model("method", config=set_key("quantization_config", q)), "alien", "compressed-tensors",
               may=("inspect",))
    for bad in ({}, {"quant_method": 7},
                {"quant_method": "compressed-tensors", "config_groups": []},
                {"quant_method": "compressed-tensors", "config_groups": {"g": 3}},
                {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {
                    "targets": ["Linear"], "weights": {"num_bits": 400, "type": "int", "strategy": "group",
                                                       "group_size": -7, "symmetric": True}}}}):
        everywhere(model("method", config=set_key("quantization_config", bad)),
                   r"method/config\.json", "quant_method|config_groups", may=("inspect",))


# ---- quantized checkpoints ----------------------------------------------------------------------------------------

def quant_weights(case, tail):
    return [k for k in st_read(f"{QUANT}/{case}/model.safetensors") if k.endswith(tail)]


def test_nan_scale():
    for case, tail in (("ct_w3a16", ".weight_scale"), ("ct_nvfp4", ".weight_scale"),
                       ("ct_nvfp4", ".weight_global_scale"), ("ct_fp8_kv_head", ".weight_scale")):
        name = quant_weights(case, tail)[0]
        for bad in ("nan", "inf", "zero") if tail == ".weight_global_scale" else ("nan",):
            def poison(t):
                dt, shape, raw = t[name]
                one = {"BF16": {"nan": b"\xc0\x7f"}, "F16": {"nan": b"\0\x7e"}, "F8_E4M3": {"nan": b"\x7f"},
                       "F32": {"nan": b"\0\0\xc0\x7f", "inf": b"\0\0\x80\x7f", "zero": b"\0\0\0\0"}}[dt][bad]
                t[name] = (dt, shape, one + raw[len(one):])
            m = model("nanscale", f"{QUANT}/{case}", tensors=poison)
            module = name[:-len(tail)]
            refused(["convert", m, "-o", path("out")], re.escape(module), "scale")
            ids = path("ids.json")
            open(ids, "w").write("[[1,2,3]]")
            refused(["dump", m, "--tokens", ids, "-o", path("out")], re.escape(module), "scale")


def test_nan_code():
    """A code of E4M3 that is not a number: kernels that widen codes by their bits would read 480."""
    for case in ("ct_fp8_kv_head", "ct_mixed_w4_fp8", "deepseek_fp8_block", "modelopt_fp8_kv"):
        name = next(k for k, (dt, _, _) in st_read(f"{QUANT}/{case}/model.safetensors").items() if dt == "F8_E4M3" and k.endswith("weight"))
        for code in (b"\x7f", b"\xff"):
            m = model("nancode", f"{QUANT}/{case}", tensors=lambda t: t.update({name: (*t[name][:2], t[name][2][:-1] + code)}))
            ids = path("ids.json")
            open(ids, "w").write("[[1,2,3]]")
            for words in (["convert", m, "-o", path("out")], ["dump", m, "--tokens", ids, "-o", path("out")]):
                refused(words, re.escape(name), f"0x{code.hex()}", "not a number")


def test_quantized_tensors_damaged():
    packed = quant_weights("ct_w3a16", ".weight_packed")[0]
    module = packed[:-len(".weight_packed")]
    def without(tail):
        def f(t):
            del t[module + tail]
        return f
    def short(tail):
        def f(t):
            dt, shape, raw = t[module + tail]
            t[module + tail] = (dt, [shape[0], shape[1] - 1], raw[:len(raw) // shape[1] * (shape[1] - 1)])
        return f
    def wrong_shape(t):
        t[module + ".weight_shape"] = ("I64", [2], struct.pack("<qq", 2**40, 2**40))
    def wrong_type(t):
        _, shape, raw = t[packed]
        t[packed] = ("F32", shape, raw)
    for f in (without(".weight_packed"), without(".weight_scale"), short(".weight_packed"), short(".weight_scale"),
              wrong_shape, wrong_type):
        m = model("damaged", f"{QUANT}/ct_w3a16", tensors=f)
        refused(["convert", m, "-o", path("out")], re.escape(module))


def test_ignore_rows():
    """A05: a packed tensor under an ignored module is an error; a parent's name or a glob ignores nothing."""
    src = f"{QUANT}/ct_w3a16"
    module = quant_weights("ct_w3a16", ".weight_packed")[0][:-len(".weight_packed")]
    def ignore(*rules):
        return lambda c: c["quantization_config"].update(ignore=[*c["quantization_config"].get("ignore", []), *rules])
    for rule in (module, "re:.*" + re.escape(module.rsplit(".", 1)[1])):
        refused(["convert", model("ignored", src, config=ignore(rule)), "-o", path("out")], re.escape(module), "ignore")
    want = tare("convert", src, "-o", fresh("plain0"), "--dtype", "f32")
    assert want.code == 0, want.err
    for rule in (module.rsplit(".", 1)[0], "mtp*", "model.layers.0*", module[:-1]):
        r = tare("convert", model("ignored", src, config=ignore(rule)), "-o", fresh("plain1"), "--dtype", "f32")
        assert r.code == 0, (rule, r.err)
        a, b = (st_read(path(f"plain{i}/model.safetensors")) for i in (0, 1))
        assert a == b, rule
    refused(["convert", model("ignored", src, config=ignore("re:(")), "-o", path("out")], r"re:\(")


def test_quantize_quantized():
    refused(["quantize", f"{QUANT}/ct_w3a16", "-o", path("out"), "--scheme", "fp8"], "ct_w3a16", "already|quantized",
            "convert")


# ---- quantize -----------------------------------------------------------------------------------------------------

def test_group_does_not_divide():
    """G04: K = 96 and 200 with groups that do not divide them; NVFP4 with K = 40."""
    def ffn(n):
        def f(t):
            rng = np.random.default_rng(3)
            for k in list(t):
                for part, shape in (("gate_proj", [n, 64]), ("up_proj", [n, 64]), ("down_proj", [64, n])):
                    if part in k:
                        t[k] = ("BF16", shape, bf16(rng.standard_normal(shape) * 0.1))
        return f
    m = model("odd", config=set_key("intermediate_size", 200), tensors=ffn(200))
    for scheme in ("w:int4,g128", "w:int4,g64", "w:int4,g512"):
        r = refused(["quantize", m, "-o", path("out"), "--scheme", scheme], r"down_proj", "200", "ignore|group|g\\d")
    assert r.err.count("down_proj") >= 1
    m = model("odd", config=set_key("intermediate_size", 40), tensors=ffn(40))
    refused(["quantize", m, "-o", path("out"), "--scheme", "nvfp4"], "down_proj", "40", "16")
    for scheme in ("w:int4,g3", "w:int4,g0", "w:int4,g-1", "w:int4,g99999999999999999999"):
        refused(["quantize", LLAMA, "-o", path("out"), "--scheme", scheme], "g(roup)?")


def test_ignore_patterns():
    """G08"""
    q = ["quantize", LLAMA, "-o", path("out"), "--scheme", "fp8"]
    refused([*q, "--ignore", "re:.*"], "nothing|no module", r"re:\.\*|ignore")
    r = tare(*q, "--ignore", r"re:model\.layer\..*")
    assert r.code == 0 and "warn" in r.err and r"re:model\.layer\..*" in r.err, r.text
    shutil.rmtree(path("out"))
    refused([*q, "--ignore", r"re:model\.layer\..*", "--strict"], r"re:model\\\.layer", "matche?s")
    refused([*q, "--ignore", "re:(["], r"re:\(\[")
    refused([*q, "--ignore", "re:(a+)+$", "--strict"], "matche?s")
    refused([*q, "--ignore", ""], "ignore")


def test_schemes():
    for scheme, word in (("int44", "int44"), ("w:int4g128", "int4g128"), ("w:int4,g128,", "w:int4"), ("", "scheme"),
                         ("w:int99", "int99"), ("w:int4,g128 a:int5", "int5"), ("W" * 100000, "scheme|WWW"),
                         ("kv:fp8_e4m3", "w"), ("w:fp8_e4m3,block0x0", "block"), ("w:int4,g128,g64", "g64|twice"),
                         ("\x01\x1b[31m", "scheme")):
        r = refused(["quantize", LLAMA, "-o", path("out"), "--scheme", scheme], word)
        assert "\x1b" not in r.err, "control characters of the argument are echoed"
    refused(["quantize", LLAMA, "-o", path("out"), "--scheme", "fp8", "--algo", "magic"], "magic", "rtn")
    refused(["quantize", LLAMA, "--scheme", "fp8"], "-o|output", code=(2,))
    refused(["quantize", LLAMA, "-o", path("out")], "scheme", code=(2,))


def test_output_exists():
    out = fresh("exists")
    os.makedirs(out)
    open(f"{out}/mine.txt", "w").write("mine")
    for more in ([], ["--overwrite"]):
        r = tare("quantize", LLAMA, "-o", out, "--scheme", "fp8", *more)
        assert r.code in (1, 2) and "exists/" in r.err.replace("exists:", "exists/"), r.text
        assert os.listdir(out) == ["mine.txt"] and leftovers(out) == ["exists"]
    open(path("plainfile"), "w").write("mine")
    r = tare("quantize", LLAMA, "-o", path("plainfile"), "--scheme", "fp8", "--overwrite")
    assert r.code in (1, 2) and open(path("plainfile")).read() == "mine", r.text
    r = tare("quantize", LLAMA, "-o", path("plainfile/below"), "--scheme", "fp8")
    assert r.code in (1, 2) and "plainfile" in r.err, r.text
    m = model("inplace")
    before = sorted(os.listdir(m))
    r = tare("quantize", m, "-o", m, "--scheme", "fp8")
    assert r.code in (1, 2) and sorted(os.listdir(m)) == before, r.text
    r = tare("quantize", m, "-o", m, "--scheme", "fp8", "--overwrite")
    if r.code != 0:
        assert sorted(os.listdir(m)) == before, r.text
    else:
        assert tare("inspect", m).code == 0


def test_disk_full():
    for limit in (0, 4096, 100000):
        refused(["quantize", MILLET, "-o", path("out"), "--scheme", "fp8"], "out", "(?i)file too large|space",
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    ids = path("ids.json")
    open(ids, "w").write("[[1,2,3]]")
    refused(["dump", LLAMA, "--tokens", ids, "-o", path("out")], "out", "(?i)file too large|space",
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)))


def test_disk_full_tmpfs():
    if os.geteuid() != 0 or not shutil.which("unshare"):
        raise Skip("needs root and unshare")
    os.makedirs(path("small"), exist_ok=True)
    script = (f"mount -t tmpfs -o size=3m none {path('small')} || exit 77\n"
              f"{TARE} quantize {MILLET} -o {path('small')}/out --scheme fp8; rc=$?\n"
              f"ls -A {path('small')}; exit $rc")
    r = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    if r.returncode == 77 or "unshare:" in r.stderr:
        raise Skip("cannot mount a tmpfs")
    if TABLE:
        print("    | quantize onto a tmpfs of 3 MB |", r.returncode, "|", r.stderr.strip().split("\n")[-1])
    assert r.returncode == 1 and r.stdout.strip() == "", (r.returncode, r.stdout, r.stderr)
    assert re.search("space|bytes|free", r.stderr) and "small" in r.stderr, r.stderr


def tree(d):
    files = sorted(os.path.join(w, n) for w, _, names in os.walk(d) for n in names)
    return {os.path.relpath(f, d): hashlib.sha256(open(f, "rb").read()).hexdigest() for f in files}


def test_kill_while_writing():
    """G06"""
    q = ["quantize", MILLET, "--scheme", "w:int4,g128"]
    start = time.time()
    assert tare(*q, "-o", fresh("whole")).code == 0
    whole = time.time() - start
    want, seen = tree(path("whole")), 0
    for part in (0.25, 0.5, 0.75, 0.9):
        p = subprocess.Popen([TARE, *q, "-o", path("killed")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            p.wait(whole * part)
        except subprocess.TimeoutExpired:
            pass
        p.kill()
        p.wait()
        left = leftovers(path("killed"))
        seen += any(".tmp-" in n for n in left)
        if "killed" in left:
            assert tree(path("killed")) == want, "a folder that is not whole has the final name"
            shutil.rmtree(path("killed"))
    assert seen, "no kill hit the writer"
    r = tare(*q, "-o", path("killed"))
    assert r.code == 0, r.text
    assert leftovers(path("killed")) == ["killed"], leftovers(path("killed"))
    assert tree(path("killed")) == want
    p = subprocess.Popen([TARE, *q, "-o", path("stopped")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(whole * 0.5)
    p.terminate()
    p.wait(20)
    if "stopped" in leftovers(path("stopped")):
        assert tree(path("stopped")) == want


def test_tied_head():
    """A08"""
    def head(scale):
        def f(t):
            dt, shape, raw = t["model.embed_tokens.weight"]
            t["lm_head.weight"] = (dt, shape, raw if scale == 1 else bf16(f32_of(t["model.embed_tokens.weight"]) * scale))
        return f
    def no_head(t):
        del t["lm_head.weight"]
    q = ["--scheme", "fp8", "-o"]
    r = tare("quantize", model("tied2", config=set_key("tie_word_embeddings", True), tensors=head(2)), *q, fresh("t2"))
    assert r.code == 0 and "warn" in r.err and "lm_head.weight" in r.err, r.text
    assert json.load(open(path("t2/config.json")))["tie_word_embeddings"] is False
    assert "lm_head.weight" in st_read(path("t2/model.safetensors"))
    m = model("untied", config=set_key("tie_word_embeddings", False), tensors=no_head)
    everywhere(m, "lm_head.weight", "tie_word_embeddings", may=("inspect",))
    r = tare("quantize", model("tied1", config=set_key("tie_word_embeddings", True), tensors=head(1)), *q, fresh("t1"))
    assert r.code == 0 and "lm_head.weight" not in st_read(path("t1/model.safetensors")), r.text
    def weights(m):
        r = tare("plan", m, "--json")
        assert r.code == 0, r.text
        return re.findall(r'"(?:weights|total|codes|unquantized)[^"]*":\s*(\d+)', r.out)
    assert weights(path("tied1")) == weights(model("tied0", config=set_key("tie_word_embeddings", True), tensors=no_head))


def test_nan_weights():
    def poison(name):
        def f(t):
            dt, shape, raw = t[name]
            t[name] = (dt, shape, b"\xc0\x7f" + raw[2:])
        return f
    for name in (Q0, "model.norm.weight", "model.embed_tokens.weight"):
        m = model("nan", tensors=poison(name))
        refused(["quantize", m, "-o", path("out"), "--scheme", "w:int4,g32"], re.escape(name), "NaN")
    open(path("ids.json"), "w").write("[[1,2,3]]")
    for features in ("auto", "avx2", "portable"):  # no kernel makes a number of what is none
        r = tare("dump", model("nan", tensors=poison(Q0)), "--tokens", path("ids.json"), "-o", path("out"), "--cpu-features", features)
        assert r.code in (0, 2), r.text
        assert r.code == 2 or re.search("logits are not finite", r.err), (features, r.text)
        if os.path.exists(path("out")):
            os.unlink(path("out"))
    m = model("nan", STORIES, tensors=lambda t: t.update({"model.norm.weight": (
        t["model.norm.weight"][0], t["model.norm.weight"][1],
        {"F32": b"\0\0\xc0\x7f", "BF16": b"\xc0\x7f", "F16": b"\0\x7e"}[t["model.norm.weight"][0]] +
        t["model.norm.weight"][2][{"F32": 4}.get(t["model.norm.weight"][0], 2):])}))
    open(path("text.txt"), "w").write("Once upon a time there was a cat. " * 20)
    r = tare("eval", m, "--perplexity", path("text.txt"), "--json")
    assert r.code in (1, 2, 12) and re.search("NaN|finite", r.err), r.text
    r = tare("run", m, "-p", "Once", "-n", "4")
    assert r.code in (1, 2) and re.search("NaN|finite", r.err), r.text


# ---- tokenizer, GGUF ----------------------------------------------------------------------------------------------

def test_tokenizers():
    j = json.load(open(f"{MILLET}/tokenizer.json"))
    def with_(edit):
        t = json.loads(json.dumps(j))
        return json.dumps(edit(t) or t)
    def no_merges(t):
        del t["model"]["merges"]
    def bad_merge(t):
        t["model"]["merges"][5] = "onlyone"
    def unknown_merge(t):
        t["model"]["merges"][5] = ["zzzzq", "qqqqz"]
    def number_merge(t):
        t["model"]["merges"][5] = 7
    def id_huge(t):
        t["model"]["vocab"][next(iter(t["model"]["vocab"]))] = 2**40
    def id_negative(t):
        t["model"]["vocab"][next(iter(t["model"]["vocab"]))] = -1
    def id_twice(t):
        a, b, *_ = t["model"]["vocab"]
        t["model"]["vocab"][a] = t["model"]["vocab"][b]
    def model_type(t):
        t["model"]["type"] = "Oracle"
    def regex(t):
        t["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(["}, "behavior": "Isolated", "invert": False}
    def added(t):
        t["added_tokens"].append({"id": 2**33, "content": "<new>", "special": True})
    for edit, word in ((no_merges, "merges"), (bad_merge, r"merges\[5\]|merge 5|5"), (number_merge, "5"),
                       (unknown_merge, "5|zzzzq"), (id_huge, "id"), (id_negative, "id"), (model_type, "Oracle"),
                       (regex, r"\(\["), (added, "id")):
        refused(["tokenize", model("tok", MILLET, files={"tokenizer.json": with_(edit)}), "hello"],
                r"tokenizer\.json", word)
    tare("tokenize", model("tok", MILLET, files={"tokenizer.json": with_(id_twice)}), "hello")
    for text in ("", "{}", "[]", "{", "[" * 100000, '{"model":7}', '{"model":{"type":"BPE","vocab":[],"merges":[]}}',
                 '{"model":{"type":"BPE","vocab":{},"merges":[]}}', "\xff"):
        r = tare("tokenize", model("tok", MILLET, files={"tokenizer.json": text}), "hello")
        assert r.code in (1, 2) and "tokenizer.json" in r.err, (text[:40], r.text)
    refused(["tokenize", model("tok", MILLET, drop=["tokenizer.json"]), "hello"], "tok", r"tokenizer\.json")
    refused(["run", model("tok", MILLET, files={"tokenizer.json": with_(no_merges)}), "-p", "x"], "tokenizer.json", "merges")
    r = tare("tokenize", MILLET, b"\xff\xfe\x80".decode("utf-8", "surrogateescape"))
    assert r.code in (0, 1, 2)
    for ids in ("[2048]", "[-1]", "[1.5]", '["a"]', "[4294967301]", "{", "[[[1]]]"):
        open(path("ids.json"), "w").write(ids)
        refused(["detokenize", MILLET, path("ids.json")], r"ids\.json|id")
        refused(["dump", MILLET, "--tokens", path("ids.json"), "-o", path("out")], r"ids\.json")


def gguf(kv=(), tensors=(), tail=b"", version=3):
    """kv: (key, type, bytes); tensors: (name, dims, type, offset)."""
    s = lambda b: struct.pack("<Q", len(b)) + b
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(kv))
    for k, t, v in kv:
        out += s(k) + struct.pack("<I", t) + v
    for n, dims, t, off in tensors:
        out += s(n) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", t, off)
    return out + tail


def test_gguf_small():
    """B01 and relatives, by hand."""
    s = lambda b: struct.pack("<Q", len(b)) + b
    arch = (b"general.architecture", 8, s(b"llama"))
    cases = [
        ("emptykey", gguf([(b"", 4, b"\1\0\0\0")]), "key"),
        ("zerodim", gguf([arch], [(b"t.weight", [32, 0], 0, 0)], b"\0" * 64), r"t\.weight"),
        ("align_i32", gguf([(b"general.alignment", 5, struct.pack("<i", 32))]), r"general\.alignment"),
        ("align0", gguf([(b"general.alignment", 4, struct.pack("<I", 0))]), r"general\.alignment"),
        ("align24", gguf([(b"general.alignment", 4, struct.pack("<I", 24))]), r"general\.alignment"),
        ("align_neg", gguf([(b"general.alignment", 5, struct.pack("<i", -32))]), r"general\.alignment"),
        ("keylen", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + b"x" * 40, "key|bytes|truncated|end"),
        ("strlen", gguf([(b"general.name", 8, struct.pack("<Q", 2**64 - 1))]), r"general\.name"),
        ("arraylen", gguf([(b"a.b", 9, struct.pack("<IQ", 4, 2**62))]), r"a\.b"),
        ("arraynest", gguf([(b"a.b", 9, struct.pack("<IQ", 9, 1) * 5000)]), r"a\.b"),
        ("valuetype", gguf([(b"a.b", 77, b"\0" * 8)]), r"a\.b"),
        ("twicekey", gguf([arch, arch]), "general.architecture|architecture"),
        ("ntensors", b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + b"\0" * 64, "tensor|bytes|end"),
        ("nkv", b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63) + b"\0" * 64, "key|bytes|end"),
        ("ndims", b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + s(b"t") + struct.pack("<I", 200) + b"\1" * 2000, "dim|'t'"),
        ("dimwrap", gguf([arch], [(b"t.weight", [2**32, 2**32], 0, 0)], b"\0" * 64), r"t\.weight"),
        ("version9", gguf(version=9), "version"), ("version1", gguf(version=1), "version"),
        ("bigendian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version|endian"),
        ("cut", b"GGUF\3", "GGUF|bytes|end|header|short"), ("nothing", b"", "nothing.gguf"),
        ("noarch", gguf([(b"general.name", 8, s(b"x"))]), "architecture"),
    ]
    for name, data, word in cases:
        open(path(f"{name}.gguf"), "wb").write(data)
        everywhere(path(f"{name}.gguf"), rf"{name}\.gguf", word)
    r = refused(["serve", path("align0.gguf"), "--port", "0"], "general.alignment")
    assert r.code == 1


def gguf_tensors(raw):
    """[(name, where its info's type field is, dims, type, offset)] and the start of the data."""
    at = 8
    nt, nk = struct.unpack_from("<QQ", raw, at)
    at += 16
    size = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    def string():
        nonlocal at
        n = struct.unpack_from("<Q", raw, at)[0]
        at += 8 + n
        return raw[at - n:at]
    def value(t):
        nonlocal at
        if t == 8:
            string()
        elif t == 9:
            et, n = struct.unpack_from("<IQ", raw, at)
            at += 12
            for _ in range(n):
                value(et)
        else:
            at += size[t]
    for _ in range(nk):
        string()
        t = struct.unpack_from("<I", raw, at)[0]
        at += 4
        value(t)
    out = []
    for _ in range(nt):
        name = string().decode()
        nd = struct.unpack_from("<I", raw, at)[0]
        dims = struct.unpack_from(f"<{nd}Q", raw, at + 4)
        at += 4 + 8 * nd
        t, off = struct.unpack_from("<IQ", raw, at)
        out.append((name, at, dims, t, off))
        at += 12
    return out, -(-at // 32) * 32


def test_gguf_tensors():
    """B03: truncated, wrapping offset, unknown type id, two tensors that overlap."""
    raw = open(GGUF, "rb").read()
    infos, start = gguf_tensors(raw)
    def patch(at, fmt, v):
        b = bytearray(raw)
        struct.pack_into(fmt, b, at, v)
        return bytes(b)
    last = max(infos, key=lambda x: x[4])
    first = min(infos, key=lambda x: x[4])
    second = sorted(infos, key=lambda x: x[4])[1]
    cases = [("cut4k", raw[:-4096], r"tensor|bytes"), ("cuthead", raw[:start // 2], "bytes|end|cut|trunc"),
             ("cutdata", raw[:start], re.escape(first[0]) + "|tensor"),
             ("wrap", patch(last[1] + 4, "<Q", 2**64 - 64), re.escape(last[0])),
             ("misaligned", patch(last[1] + 4, "<Q", last[4] + 1), re.escape(last[0])),
             ("type156", patch(first[1], "<I", 156), "156"), ("type39", patch(first[1], "<I", 39), "39"),
             ("overlap", patch(second[1] + 4, "<Q", first[4]), re.escape(second[0]) + "|" + re.escape(first[0]))]
    for name, data, word in cases:
        open(path(f"{name}.gguf"), "wb").write(data)
        everywhere(path(f"{name}.gguf"), rf"{name}\.gguf", word)


def test_mutations():
    """Bytes changed at random in headers: any status, never a signal or a report."""
    rng = np.random.default_rng(1)
    raw = {"m.gguf": open(GGUF, "rb").read(), "model.safetensors": open(f"{LLAMA}/model.safetensors", "rb").read(),
           "config.json": open(f"{QUANT}/ct_w3a16/config.json", "rb").read(),
           "tokenizer.json": open(f"{STORIES}/tokenizer.json", "rb").read()}
    ids = path("ids.json")
    open(ids, "w").write("[[1,2,3]]")
    for i in range(int(os.environ.get("ROUNDS", "6"))):
        for f, data in raw.items():
            b = bytearray(data)
            span = min(len(b), 3000 if f != "tokenizer.json" else len(b))
            for _ in range(int(rng.integers(1, 6))):
                at = int(rng.integers(0, span))
                b[at] = int(rng.integers(0, 256)) if rng.integers(2) else ord(str(rng.integers(0, 10)))
            open(path("mutant"), "wb").write(b)
            if f == "m.gguf":
                open(path(f), "wb").write(b)
                tare("dump", path(f), "--tokens", ids, "-o", fresh("out.st"))
            elif f == "tokenizer.json":
                tare("tokenize", model("mutant_m", STORIES, files={f: bytes(b)}), "Once upon <s> a")
            else:
                src = LLAMA if f == "model.safetensors" else f"{QUANT}/ct_w3a16"
                tare("dump", model("mutant_m", src, files={f: bytes(b)}), "--tokens", ids, "-o", fresh("out.st"))


# ---- running ------------------------------------------------------------------------------------------------------

def test_k_bias():
    """F04: two key channels far above what fp8 holds."""
    def biased(t):
        for k in list(t):
            m = re.match(r"model\.layers\.(\d+)\.", k)
            if m and int(m.group(1)) >= 2:
                del t[k]
        for i in range(2):
            for part in "qkv":
                w = t[f"model.layers.{i}.self_attn.{part}_proj.weight"]
                b = np.ones(w[1][0], np.float32)
                if part == "k":
                    b[:2] = 600
                t[f"model.layers.{i}.self_attn.{part}_proj.bias"] = ("F32", [w[1][0]], b.tobytes())
    m = model("kbias", STORIES, tensors=biased, config=lambda c: c.update(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", num_hidden_layers=2))
    open(path("text.txt"), "w").write("Once upon a time there was a little cat who saw a big red ball. " * 12)
    for kv in ("fp8_e4m3", "fp8_e5m2", "int8", "fp4"):
        r = tare("compare", m, m, "--kv-cache-dtype", kv, "--base-kv-cache-dtype", "bf16", "--perplexity",
                 path("text.txt"), "--window", "128", "--stride", "128", "--json")
        assert r.code in (0, 10, 11, 12), r.text
        j = r.json()
        assert np.isfinite(j["perplexity"]["candidate"]) and np.isfinite(j["kl"]["mean"]), j
        assert not re.search(r"\bnan\b|\binf\b", r.out.lower()), r.out
        clips = re.findall(r'"[^"]*clip[^"]*":\s*(\d+)', r.out)
        assert clips, "no clip count in the JSON: " + r.out[:1500]
        if kv == "fp8_e4m3":
            assert max(map(int, clips)) > 0, r.out
        if kv == "fp8_e5m2":
            assert max(map(int, clips)) == 0, r.out
    r = tare("eval", m, "--perplexity", path("text.txt"), "--kv-cache-dtype", "fp8_e4m3", "--window", "128", "--json")
    assert r.code == 0 and re.search(r'clip[^"]*":\s*[1-9]', r.out), r.text


def test_truncated_answers():
    """H06"""
    r = tare("eval", MILLET, "--task", f"{MILLET}/eval/word_problems.jsonl", "--limit", "6", "--max-tokens", "8", "--json",
             "--items")
    assert r.code == 0, r.text
    cut = re.search(r'"truncated":\s*(\d+)', r.out)
    assert cut and int(cut.group(1)) == 6, r.out[:1500]


def test_plan_memory_source():
    """I03"""
    r = tare("plan", MILLET)
    assert r.code == 0 and re.search("MemAvailable|cgroup", r.text), r.text


def test_limits():
    refused(["run", MILLET, "-p", "x", "--max-model-len", "100000000"], "max-model-len|100000000|8192")
    refused(["run", MILLET, "-p", "x", "--max-model-len", "8192", "--mem-fraction-static", "0.0000001"],
            "mem-fraction|memory|bytes|MB|MiB")
    m = model("long", MILLET, config=set_key("max_position_embeddings", 2**31))
    refused(["run", m, "-p", "x", "--max-model-len", str(2**31)], "max-model-len|memory")
    for opt, v in (("--threads", "1000000"), ("--threads", "-1"), ("--threads", "x"), ("--threads", "99999999999999999999"),
                   ("--page-size", "0"), ("--page-size", "2147483647"), ("--max-running-requests", "2147483647"),
                   ("--max-running-requests", "0"), ("--chunked-prefill-size", "0"), ("--max-total-tokens", "-1"),
                   ("--kv-cache-dtype", "fp99"), ("--cpu-features", "magic"), ("--mem-fraction-static", "nan"),
                   ("--mem-fraction-static", "-1"), ("--mem-fraction-static", "7"), ("--device", "abacus"),
                   ("--chat-template", "/nonexistent"), ("--nonsense", "1")):
        r = tare("run", MILLET, "-p", "Hugo", "-n", "2", opt, v)
        assert r.code in (0, 1, 2), r.text
        if r.code == 0 and opt not in ("--threads", "--page-size", "--max-running-requests", "--chunked-prefill-size"):
            raise AssertionError(f"{opt} {v} is accepted silently: {r.text}")
        if r.code:
            assert opt.strip("-") in r.err or v in r.err, r.err
    assert tare("run", MILLET, "-p", "x", "-n", "1", "--threads", "1000000").code in (0, 1, 2)


def test_task_files():
    e = ["eval", STORIES, "--task"]
    refused([*e, path("no-such.jsonl")], r"no-such\.jsonl", "(?i)no such file")
    refused([*e, TMP], re.escape(TMP))
    cases = (('{"question":"a","answer":"1"}\n{"question":\n', r":2"), ('\n\n[1]\n', r":3"),
             ('{"foo":1}\n', r":1"), ('{"question":"a","choices":["x"],"answer":7}\n', r":1"),
             ('{"question":"a","answer":"1"}\n' + "[" * 100000 + "\n", r":2"), ("", "empty|no item"),
             ('{"question":"a","answer":"\xff"}\n'.encode("latin1"), r":1"), (b"\0" * 4096, r":1"),
             ('{"question":"a","choices":[],"answer":0}\n', ":1"), ('{"text":"a","label":[]}\n', ":1"))
    for text, word in cases:
        open(path("t.jsonl"), "wb").write(text if isinstance(text, bytes) else text.encode())
        refused([*e, path("t.jsonl")], r"t\.jsonl", word)
    os.makedirs(fresh("notasks"))
    refused(["eval", STORIES, "--tasks", path("notasks")], "notasks")
    open(path("short.txt"), "w").write("")
    refused(["eval", STORIES, "--perplexity", path("short.txt")], r"short\.txt")
    for opt in (["--window", "0"], ["--window", "1"], ["--stride", "0"], ["--stride", "-3"]):
        open(path("text.txt"), "w").write("Once upon a time there was a cat. " * 20)
        r = tare("eval", STORIES, "--perplexity", path("text.txt"), *opt)
        assert r.code in (1, 2) and opt[0].strip("-") in r.err, (opt, r.text)
    if os.geteuid() != 0:
        os.chmod(path("t.jsonl"), 0)
        refused([*e, path("t.jsonl")], r"t\.jsonl", "(?i)permission")
        os.chmod(path("t.jsonl"), 0o644)


# ---- the server ---------------------------------------------------------------------------------------------------

CHAT, COMP = "/v1/chat/completions", "/v1/completions"


class Server:
    def __init__(self, m, *args):
        self.log = []
        self.p = subprocess.Popen([TARE, "serve", m, "--port", "0", *args], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for line in self.p.stderr:
            self.log.append(line.decode(errors="replace"))
            at = re.match(r"listening on (http://[\d.]+:(\d+))$", self.log[-1].strip())
            if at:
                self.url, self.port = at.group(1), int(at.group(2))
                break
        else:
            raise AssertionError("the server does not start: " + "".join(self.log))
        threading.Thread(target=lambda: [self.log.append(x.decode(errors="replace")) for x in self.p.stderr],
                         daemon=True).start()

    def send(self, where, body, timeout=60):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        req = urllib.request.Request(self.url + where, data=data, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(req, timeout=timeout) as r:
                return r.status, json.loads(r.read().decode("utf-8"))
        except urllib.error.HTTPError as e:
            text = e.read()
            assert len(text) <= 4096, f"an error of {len(text)} bytes"
            return e.code, json.loads(text.decode("utf-8"))

    def bad(self, where, body, status, *words):
        code, j = self.send(where, body)
        if TABLE:
            show = body[:60] if isinstance(body, bytes) else json.dumps(body)[:60]
            print(f"    | POST {where} {show} | {code} | {json.dumps(j)[:260]}")
        assert code in (status if isinstance(status, tuple) else (status,)), (code, str(body)[:100], j)
        for k in ("message", "type", "code", "param"):
            assert k in j["error"], j
        for w in words:
            assert re.search(w, j["error"]["message"] + str(j["error"]["param"])), (w, j)
        return j

    def raw(self, data, wait=5, half_close=True):
        """Sends bytes, returns what came within `wait` seconds or until the server closed."""
        s = socket.create_connection(("127.0.0.1", self.port), timeout=wait)
        got = b""
        try:
            s.sendall(data)
            if half_close:  # the server takes it for a client that has left
                s.shutdown(socket.SHUT_WR)
            while True:
                part = s.recv(65536)
                if not part:
                    break
                got += part
        except OSError:
            pass
        s.close()
        return got

    def metric(self, name):
        with urllib.request.urlopen(self.url + "/metrics", timeout=20) as r:
            for line in r.read().decode().split("\n"):
                if line.startswith((f"tare:{name}{{", f"tare:{name} ")):
                    return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def idle(self, seconds=15):
        end = time.time() + seconds
        now = None
        while time.time() < end:
            now = [self.metric(n) for n in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
            if now == [0, 0, 0]:
                return
            time.sleep(0.05)
        raise AssertionError(f"not idle: running, waiting, KV use = {now}")

    def alive(self):
        code, j = self.send(COMP, {"prompt": "Hugo has 3", "max_tokens": 3, "temperature": 0})
        assert code == 200 and j["usage"]["completion_tokens"] > 0, (code, j)

    def stop(self):
        self.p.terminate()
        try:
            code = self.p.wait(30)
        except subprocess.TimeoutExpired:
            self.p.kill()
            raise AssertionError("SIGTERM does not end the server")
        time.sleep(0.1)
        text = "".join(self.log)
        for f in FAULTS:
            assert f not in text, text[:4000]
        assert code == 0, f"exit {code}: {text[-2000:]}"


def serve_bodies(s):
    s.bad(COMP, {"prompt": "a b " * (1 << 19), "max_tokens": 4}, 400, "8192")
    s.bad(CHAT, {"messages": [{"role": "user", "content": "word " * 400000}]}, 400, "8192")
    for b in (b"", b"{", b"[]", b"null", b'{"prompt":', b"\0" * 100, b'{"prompt":"x"} trailing', b"{'prompt':1}"):
        s.bad(COMP, b, 400, "JSON|object")
    s.bad(COMP, b'{"prompt":"\xff\xfe"}', 400, "UTF-8")
    s.bad(COMP, b'{"model":"\xff","prompt":"x"}', 400, "UTF-8")
    code, _ = s.send(CHAT, b'{"max_tokens":2,"messages":[{"role":"user","content":"\\ud800"}]}')
    assert code in (200, 400)
    s.bad(CHAT, b'{"messages":[{"role":"user","content":"x"}],"tools":' + b"[" * 3000 + b"]" * 3000 + b"}", 400, "nest|deep")
    s.bad(COMP, b'{"prompt":"x","x":' + b"[" * 10000 + b"]" * 10000 + b"}", 400, "nest|deep")
    s.bad(COMP, b'{"x":' * 100000, 400)
    s.bad(CHAT, {"messages": [7] * 12000}, 400, "messages")
    s.bad(CHAT, {"messages": "hi"}, 400, "messages")
    s.bad(CHAT, {"messages": []}, 400, "messages")
    s.bad(CHAT, {}, 400, "messages")
    s.bad(COMP, {}, 400, "prompt")
    s.bad(COMP, {"prompt": {"a": 1}}, 400, "prompt")


def serve_ids(s):
    for p in ([-1], [2048], [4294967301], [1.5], [[1], []], [True], [2**70], [[[1]]]):
        s.bad(COMP, {"prompt": p, "max_tokens": 1}, 400, "prompt")
    for bias in ({"99999": 5}, {"x": 1}, {"-1": 1}, {"1": "a"}, {"1": 1e400}, {"1": 1000}, [1], "x"):
        s.bad(COMP, json.dumps({"prompt": "x", "max_tokens": 1, "logit_bias": bias}).encode(), 400, "logit_bias|JSON")
    s.bad(COMP, {"prompt": "x", "stop_token_ids": [999999]}, 400, "stop_token_ids")
    for k, v in (("temperature", -1), ("temperature", "hot"), ("top_p", 2), ("top_p", -1), ("n", 0), ("n", 100000), ("n", 1.5),
                 ("max_tokens", -1), ("max_tokens", 100000), ("max_tokens", 1e30), ("stop", 7), ("stop", [""] * 1000),
                 ("stream", "yes"), ("seed", 1.5), ("logprobs", 99), ("min_p", 3), ("repetition_penalty", 0),
                 ("presence_penalty", 99), ("echo", 7)):
        s.bad(COMP, {"prompt": "x", k: v}, 400, k)
    s.bad(COMP, {"prompt": [1] * 8192, "max_tokens": 1}, 400, "8192|8193")
    s.bad("/detokenize", {"tokens": [2048]}, 400, "tokens")
    s.bad("/detokenize", {"tokens": "x"}, 400, "tokens")
    s.bad("/tokenize", {"prompt": 7}, 400, "prompt")
    j = s.bad(COMP, {"model": "no-such-model", "prompt": "x"}, 404, "no-such-model", "millet-7m")
    assert j["error"]["code"] in ("model_not_found", 404), j
    j = s.bad(COMP, {"model": "m" * 100000, "prompt": "x"}, 404, "mmm")
    s.bad("/v1/nothing", {}, 404)


def serve_padded_vocabulary(s):
    """C07: an id that the tokenizer does not know."""
    body = {"prompt": "Hugo", "max_tokens": 3, "logit_bias": {"1500": 100}, "stop": ["x"], "temperature": 0, "logprobs": 2}
    code, j = s.send(COMP, body)
    assert code == 200 and j["usage"]["completion_tokens"] == 3 and j["choices"][0]["text"] == "", j
    chat = {"messages": [{"role": "user", "content": "Hugo"}], "max_tokens": 3, "logit_bias": {"1500": 100}, "stop": ["x"],
            "logprobs": True, "top_logprobs": 3}
    code, j = s.send(CHAT, chat)
    assert code == 200 and len(j["choices"][0]["logprobs"]["content"]) == 3, j
    code, j = s.send("/detokenize", {"tokens": [1500]})
    assert code == 200 and j.get("prompt", j.get("text")) == "", j


def serve_http(s):
    body = b'{"prompt":"Hugo","max_tokens":1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for length in (b"5", b"0", b"-1", b"x", b"99999999999999999999999", b"3000", b"18446744073709551615", b"5\r\nContent-Length: 9"):
        got = s.raw(head + b"Content-Length: " + length + b"\r\n\r\n" + body, wait=3)
        assert not got or re.match(rb"HTTP/1\.[01] (4|5)\d\d", got), (length, got[:200])
    got = s.raw(head + b"Content-Length: 67108865\r\n\r\n", wait=3)
    assert re.match(rb"HTTP/1\.1 413", got) or not got, got[:200]
    got = s.raw(head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n", wait=10 * SLOW, half_close=False)
    assert b" 200 " in got.split(b"\r\n")[0], got[:300]
    for data in (head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"GET", b"\0" * 1000, b"\xff" * 4000 + b"\r\n\r\n",
                 b"GET /" + b"a" * 200000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
                 b"POST /v1/completions HTTP/1.1\r\n" + b"X: y\r\n" * 20000 + b"\r\n", b"BREW /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"):
        got = s.raw(data, wait=3)
        assert not got or re.match(rb"HTTP/1\.[01] [45]\d\d", got), got[:200]
    for _ in range(100):
        socket.create_connection(("127.0.0.1", s.port), timeout=5).close()


def serve_client_gone(s):
    """E10: readers that leave, in the middle of a stream and while waiting."""
    body = json.dumps({"prompt": "Hugo", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    for stream in (True, False):
        socks = []
        for _ in range(6):
            c = socket.create_connection(("127.0.0.1", s.port), timeout=20)
            b = body if stream else body.replace(b'"stream": true', b'"stream": false')
            c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(b) + b)
            socks.append(c)
        if stream:
            assert b"200" in socks[0].recv(300)
        time.sleep(0.2)
        for i, c in enumerate(socks):
            if i % 2:  # with a reset
                c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            c.close()
        s.idle()


def test_server():
    s = Server(MILLET, "--max-running-requests", "4")
    good = True
    try:
        for f in (serve_bodies, serve_ids, serve_padded_vocabulary, serve_http, serve_client_gone):
            good &= attempt(f, s)
            assert s.p.poll() is None, f"the server died in {f.__name__}: " + "".join(s.log)[-4000:]
            s.alive()
            s.idle()
        r = refused(["serve", STORIES, "--port", str(s.port)], str(s.port), "use|port", timeout=20)
        assert r.code == 1
    finally:
        s.stop()
    assert good, "see above"


def test_server_end_tokens():
    """A09: every id that any file names ends the turn."""
    tok = json.load(open(f"{MILLET}/tokenizer.json"))
    nine = next(k for k, v in tok["model"]["vocab"].items() if v == 9)
    tc = json.load(open(f"{MILLET}/tokenizer_config.json"))
    tc["eos_token"] = nine
    m = model("ends", MILLET, config=set_key("eos_token_id", 5), files={
        "generation_config.json": json.dumps({"eos_token_id": [5, 7]}), "tokenizer_config.json": json.dumps(tc)})
    s = Server(m)
    try:
        for i in (5, 7, 9):
            code, j = s.send(COMP, {"prompt": "Hugo", "max_tokens": 4, "logit_bias": {str(i): 100}, "temperature": 0})
            assert code == 200 and j["choices"][0]["finish_reason"] == "stop" and j["choices"][0]["text"] == "", (i, j)
            code, j = s.send(COMP, {"prompt": "Hugo", "max_tokens": 4, "logit_bias": {str(i): 100}, "temperature": 0,
                                    "ignore_eos": True})
            assert code == 200 and j["choices"][0]["finish_reason"] == "length", (i, j)
    finally:
        s.stop()
    assert tare("convert", m, "-o", fresh("ends2")).code == 0
    assert json.load(open(path("ends2/generation_config.json")))["eos_token_id"] == [5, 7]


def test_server_nan_model():
    def poison(t):
        dt, shape, raw = t["model.norm.weight"]
        t["model.norm.weight"] = (dt, shape, b"\xc0\x7f" + raw[2:])
    m = model("nanmodel", MILLET, tensors=poison)
    try:
        s = Server(m)
    except AssertionError as why:
        assert re.search("NaN|finite", str(why)), why
        return
    try:
        for body in ({"prompt": "Hugo", "max_tokens": 3}, {"prompt": "Hugo", "max_tokens": 3, "temperature": 0, "logprobs": 2}):
            code, j = s.send(COMP, body)
            assert code >= 500 and re.search("NaN|finite", j["error"]["message"]), (code, j)
        s.idle()
    finally:
        s.stop()


def attempt(f, *args):
    start = time.time()
    name = f.__name__.removeprefix("test_")
    try:
        f(*args)
        print(f"ok {name} ({time.time() - start:.1f} s)", flush=True)
        return True
    except Skip as why:
        print(f"skip {name}: {why}", flush=True)
        return True
    except Exception as why:
        at = traceback.extract_tb(why.__traceback__)
        lines = ",".join(str(x.lineno) for x in at if x.filename == __file__)
        print(f"FAIL {name}: (lines {lines}) {type(why).__name__} {str(why)[:2500]}", flush=True)
        return False


def main():
    only = [a for a in sys.argv[1:] if not a.startswith("-")]
    good = True
    try:
        for k, f in list(globals().items()):
            if k.startswith("test_") and callable(f) and (not only or k in only):
                good &= attempt(f)
    finally:
        shutil.rmtree(TMP, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""`tare bench` on a tiny shape with random weights, on the CPU and on the emulated GPU: every scheme runs,
what it says of memory is what was predicted, the JSON has its fields, bad arguments are refused in words.
Prints "ok NAME", "skip NAME: why" or "FAIL NAME: why"."""
import json, os, subprocess, sys, tempfile

os.chdir(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TARE = os.path.abspath(os.environ.get("TARE", "build/tare"))
EMULATED = os.path.join(os.path.dirname(TARE), "libtare-emulated.so")
TINY = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 384,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 320,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 256,
       "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
       "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 256,
       "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
WINDOW = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 128,
          "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 256,
          "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 32,
          "sliding_window_pattern": 2, "query_pre_attn_scalar": 64, "tie_word_embeddings": True}
bad = 0


def run(*args):
    return subprocess.run([TARE, "bench", "-q", *args], capture_output=True, text=True, timeout=240)


def case(name, fn, *args):
    global bad
    try:
        fn(*args)
        print("ok", name, flush=True)
    except Exception as e:
        bad += 1
        print(f"FAIL {name}: {type(e).__name__}: {str(e)[:400]}", flush=True)


def report(*args):
    r = run("--json", *args)
    assert r.returncode == 0, (r.returncode, r.stderr)
    return json.loads(r.stdout)


def fast(path, *more):
    return ("--shape", path, "--repeat", "1", "--output-tokens", "4", *more)


def scheme(path, name, spec):
    j = report(*fast(path, "--scheme", name, "--batch", "1,3", "--context", "33"))
    assert j["random_weights"] is True and "speed only" in j["note"] and j["model"] is None and j["shape"] == path
    assert j["spec"].startswith(spec), j["spec"]
    assert j["memory"]["predicted_bytes"] == j["memory"]["actual_bytes"], j["memory"]
    assert [(r["batch"], r["prompt_tokens"]) for r in j["runs"]] == [(1, 33), (3, 33)]
    for r in j["runs"]:
        for k in ("ttft_ms", "ttft_last_ms", "prefill_tokens_per_s", "tpot_ms", "forward_ms", "tokens_per_s", "read_gbs", "share"):
            assert r[k] > 0, (k, r)
        assert abs(r["tokens_per_s"] * r["tpot_ms"] / 1e3 / r["batch"] - 1) < 1e-6 and r["operators"] is None
    assert j["roof"]["read_gbs"] > 0 and j["roof"]["bf16_tflops"] is None


def no_prefill(path):
    j = report(*fast(path, "--no-prefill", "--batch", "2", "--context", "100,40", "--kv-cache-dtype", "fp8"))
    assert [r["prompt_tokens"] for r in j["runs"]] == [100, 40] and j["kv"] == "fp8_e4m3"
    for r in j["runs"]:
        assert r["ttft_ms"] is None and r["prefill_tokens_per_s"] is None and r["tpot_ms"] > 0


def experts(path):
    j = report(*fast(path, "--scheme", "w4a16", "--batch", "2", "--context", "20"))
    assert "Moe" in j["architecture"] and j["runs"][0]["tpot_ms"] > 0 and j["runs"][0]["read_gbs"] is None


def windows(path):
    j = report(*fast(path, "--batch", "2", "--context", "150"))
    assert j["runs"][0]["tpot_ms"] > 0 and j["runs"][0]["read_gbs"] is None


def text(path):
    r = run(*fast(path, "--scheme", "int8"))
    assert r.returncode == 0, r.stderr
    for word in ("random weights: speed only", "TTFT", "TPOT", "tokens/s", "roof", "predicted", "steps of at most 512 tokens"):
        assert word in r.stdout, (word, r.stdout)


def emulated(path):
    j = report(*fast(path, "--device", "emulated", "--scheme", "fp8", "--batch", "2", "--context", "9", "--profile"))
    r = j["runs"][0]
    assert j["device"].startswith("emulated") and r["tpot_ms"] > 0 and j["roof"]["read_gbs"] > 0
    m = j["memory"]
    assert m["predicted_bytes"] == m["actual_bytes"] and m["predicted_weight_bytes"] == m["weight_bytes"] and m["device_free_bytes"] > 0, m
    for key in ("operators", "prompt_operators"):
        ops = r[key]
        assert {"attention", "kv_store"} <= {o["op"] for o in ops} or "rope_store" in {o["op"] for o in ops}, ops
        assert any(o["tflops"] and o["gbs"] and "x" in o["shape"] for o in ops), ops
        assert all(o["calls_per_step"] > 0 and o["us"] >= 0 for o in ops)
    assert sum(o["us_per_step"] for o in r["operators"]) > 0


def kernels(path, device, names, scheme):
    j = report("--shape", path, "--kernels", "--batch", "1,9", "--scheme", scheme, "--device", device)
    rows = j["kernels"]
    assert names <= {r["kernel"] for r in rows}, {r["kernel"] for r in rows}
    assert {(r["N"], r["K"]) for r in rows} == {(512, 256), (256, 256), (768, 256), (256, 384), (320, 256)}
    for key in {(r["linear"], r["M"]) for r in rows}:
        assert sum(r["chosen"] for r in rows if (r["linear"], r["M"]) == key) == 1, key
    assert all(r["us"] > 0 and r["gbs"] > 0 and r["tflops"] > 0 for r in rows)
    text = run("--shape", path, "--kernels", "--batch", "1", "--scheme", scheme, "--device", device)
    assert text.returncode == 0 and "random weights: speed only" in text.stdout and "*" in text.stdout, text


def tune(path, tmp):
    cache = {**os.environ, "XDG_CACHE_HOME": tmp}
    table = os.path.join(tmp, "tare", "tuned")

    def bench(*args):
        return subprocess.run([TARE, "bench", "--shape", path, "--device", "emulated", *args], capture_output=True, text=True, timeout=240, env=cache)
    r = bench("--tune", "--scheme", "w4a16", "--batch", "1,9", "--json")
    assert r.returncode == 0, r.stderr
    j = json.loads(r.stdout)
    assert j["file"] == table and {p["operator"] for p in j["plans"]} == {"wide", "rows", "dense"}, j
    assert {(p["N"], p["K"]) for p in j["plans"] if p["operator"] == "wide"} == {(512, 256), (256, 256), (768, 256), (256, 384)}
    assert all(p["M"] in (1, 16) and p["tried"] > 1 and not p["wrong"] and 0 < p["us"] <= p["default_us"] and p["plan"] for p in j["plans"])
    lines = open(table).read().splitlines()
    assert lines[0] == "tare tuned plans 2" and len(lines) == 2 + len(j["plans"]) and os.listdir(os.path.dirname(table)) == ["tuned"]
    small = ("--scheme", "w4a16", "--repeat", "1", "--output-tokens", "3", "--context", "9")
    r = bench(*small, "--json")
    assert r.returncode == 0 and table in r.stderr and r.stderr.count("plans of linears") == 1, r.stderr
    assert table in json.loads(r.stdout)["plans"], r.stdout
    text = bench("--tune", "--batch", "9")
    assert text.returncode == 0 and "default" in text.stdout and table in text.stdout, text
    assert len(open(table).read().splitlines()) > len(lines)
    open(table, "a").write("90 4 rows\n")
    r = bench(*small)
    assert r.returncode == 0 and f"{table}:" in r.stderr and "tare bench --tune" in r.stderr and "default rules" in r.stderr, r.stderr
    r = subprocess.run([TARE, "bench", "--shape", path, "--device", "emulated", "--tune", "--batch", "1"], capture_output=True, text=True,
                       env={"PATH": os.environ["PATH"]})
    assert r.returncode in (1, 2) and "XDG_CACHE_HOME" in r.stderr, r.stderr


def plan():
    def of(*args):
        return subprocess.run([TARE, "plan", "models/millet-7m", *args], capture_output=True, text=True, timeout=120)
    r = of("--device", "emulated", "--context", "2048", "--concurrency", "4", "--mem-fraction-static", "0.5", "--json")
    assert r.returncode == 0, r.stderr
    j = json.loads(r.stdout)
    assert abs(j["static_bytes"] - j["available_bytes"] / 2) < 2 and j["device_bytes"] >= j["available_bytes"]
    for s in j["schemes"]:
        assert s["fits"] and s["graphs_estimate"] > 0 and s["host_pinned"] > 0 and set(s["layouts"]) <= {"dense", "packed", "panels"}, s
        assert 0 < sum(s["layouts"].values()) <= s["resident_weights"] and s["total"] == s["resident_weights"] + s["kv_total"] + s["workspace"]
    assert not any(s["fits"] for s in json.loads(of("--device", "emulated", "--mem-fraction-static", "0.0001", "--json").stdout)["schemes"])
    text = of("--device", "emulated", "--scheme", "fp8").stdout
    for word in ("--mem-fraction-static", "CUDA context", "packed", "graphs", "pinned", "dense"):
        assert word in text, (word, text)
    assert "layouts" not in of("--json").stdout
    r = of("--device", "cuda:77")
    assert r.returncode and "without --device" in r.stderr, r.stderr
    r = of("--mem-fraction-static", "1.5")
    assert r.returncode and "--mem-fraction-static" in r.stderr, r.stderr


def refused(word, *args):
    r = run(*args)
    assert r.returncode in (1, 2) and word in r.stderr, (r.returncode, r.stderr)
    assert "unknown option" not in r.stderr


def main():
    with tempfile.TemporaryDirectory(prefix="bench-") as tmp:
        def shape(name, config):
            path = os.path.join(tmp, name + ".json")
            json.dump(config, open(path, "w"))
            return path
        tiny = shape("tiny", TINY)
        for name, spec in {"bf16": "w:bf16", "fp8": "w:fp8_e4m3,channel a:fp8_e4m3,token", "fp8-block": "w:fp8_e4m3,block128x128", "w4a16": "w:int4,g128 ",
                           "int8": "w:int8,channel a:int8,token", "mxfp4": "w:mxfp4,g32", "nvfp4": "w:nvfp4,g16", "int4-asym": "w:int4,g128,asym"}.items():
            case(f"scheme {name}", scheme, tiny, name, spec)
        case("no prefill", no_prefill, tiny)
        case("experts", experts, shape("moe", MOE))
        case("windows", windows, shape("window", WINDOW))
        case("text", text, tiny)
        case("kernels", kernels, tiny, "cpu", {"ref"}, "w4a16")
        if os.path.exists(EMULATED):
            case("emulated", emulated, tiny)
            case("plan", plan)
            case("tune", tune, tiny, os.path.join(tmp, "cache"))
            case("kernels emulated", kernels, tiny, "emulated", {"packed", "panels"}, "w4a16")
        else:
            print(f"skip emulated: there is no {EMULATED}")
        quantized = shape("quantized", dict(TINY, quantization_config={"quant_method": "fp8"}))
        for name, word, args in [
                ("tune without a shape", "--shape", ("--tune",)), ("tune on a CPU", "--device cuda", ("--shape", tiny, "--tune")),
                ("tune and kernels", "one of them", ("--shape", tiny, "--tune", "--kernels")),
                ("unknown shape", "llama-3.1-8b", ("--shape", "llama-9")), ("no such file", "none.json", ("--shape", tmp + "/none.json")),
                ("no JSON", "empty.json", ("--shape", shape("empty", []))), ("quantized config", "quantization", ("--shape", quantized)),
                ("unknown scheme", "fp9", ("--shape", tiny, "--scheme", "fp9")), ("batch 0", "--batch", ("--shape", tiny, "--batch", "0")),
                ("batch text", "--batch", ("--shape", tiny, "--batch", "1,x")), ("batch comma", "--batch", ("--shape", tiny, "--batch", "1,")),
                ("context 0", "--prompt-tokens", ("--shape", tiny, "--context", "0")), ("repeat 0", "--repeat", ("--shape", tiny, "--repeat", "0")),
                ("output 1", "--output-tokens", ("--shape", tiny, "--output-tokens", "1")), ("model and shape", "one of them", ("m", "--shape", tiny)),
                ("scheme of a model", "--quantization", ("m", "--scheme", "fp8")), ("no-prefill of a model", "--no-prefill", ("m", "--no-prefill")),
                ("quantization of a shape", "--scheme", ("--shape", tiny, "--quantization", "fp8")), ("neither", "no model", ()),
                ("kernels of a model", "--shape", ("m", "--kernels")),
                ("profile of the CPU", "GPU", fast(tiny, "--profile", "--context", "8"))]:
            case(f"refused: {name}", refused, word, *args)
    sys.exit(1 if bad else 0)


if not os.path.exists(TARE):
    print(f"skip test_bench: there is no {TARE}")
else:
    main()

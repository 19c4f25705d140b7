#!/usr/bin/env python3
"""What `tare convert --to DIALECT` and `tare quantize` write, read by the tools whose dialect it is.

  bitsandbytes        QuantState and dequantize_4bit of the library, on nf4 and fp4 quantized here, on nf4 whose
                      scales were nested, and on LLM.int8
  compressed-tensors  its own decompressors, on checkpoints that came from GPTQ (with an order of columns, too),
                      AWQ, auto-round, ModelOpt and DeepSeek blocks
  mxfp4               transformers' convert_moe_packed_tensors, and the model as it loads it

Each gives the values of `tare convert --to plain --dtype f32`, rounded to the type in which the library works.
Needs torch, compressed-tensors, bitsandbytes and transformers; without them it says so and is skipped (exit 77).
Usage: torch_convert_library.py [TARE [FOLDER]]; TARE may come from the environment
"""
import json
import os
import sys
import tempfile

try:
    import torch
    import bitsandbytes as bnb
    import transformers
    from bitsandbytes.functional import QuantState, dequantize_4bit
    from torch_ct_library import check_modules, load, run
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
except ImportError as why:
    print(f"skipped: {why}")
    sys.exit(77)

TARE = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("TARE", "build/tare")
HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = sys.argv[2] if len(sys.argv) > 2 else os.path.join(HERE, "..", "fixtures", "quant")


def config_of(path):
    with open(os.path.join(path, "config.json")) as f:
        return json.load(f)


def converted(source, to, tmp):
    """The output, its tensors, and the same weights as plain fp32."""
    out, plain = os.path.join(tmp, "out"), os.path.join(tmp, "plain")
    run(TARE, "convert", source, "-o", out, "--to", to, "--overwrite")
    run(TARE, "convert", out, "-o", plain, "--to", "plain", "--dtype", "f32", "--overwrite")
    return out, load(out), load(plain)


def check_bnb(tensors, plain):
    n = 0
    for name in [k for k in tensors if k.endswith(".absmax")]:
        weight = name[:-7]
        parts = {k[len(weight) + 1:]: v for k, v in tensors.items() if k.startswith(weight + ".")}
        state = QuantState.from_dict(parts, device=torch.device("cpu"))
        theirs, ours = dequantize_4bit(tensors[weight], state), plain[weight]
        assert torch.equal(ours.to(theirs.dtype), theirs), weight
        n += 1
    for name in [k for k in tensors if k.endswith(".SCB")]:
        weight = name[:-4] + ".weight"
        theirs = bnb.functional.int8_vectorwise_dequant(tensors[weight], tensors[name])
        assert torch.equal(plain[weight], theirs), weight
        n += 1
    return n


def check_mxfp4(out, tensors, plain):
    n = 0
    for name in [k for k in tensors if k.endswith("_blocks")]:
        module = name[:-7]
        theirs = convert_moe_packed_tensors(tensors[name], tensors[module + "_scales"], dtype=torch.float32)
        assert torch.equal(plain[module].reshape(theirs.shape), theirs), module
        n += 1
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True))
    state = model.state_dict()
    for k, v in plain.items():
        if "experts" in k and not k.endswith("_bias"):
            assert torch.equal(state[k].float().reshape(v.shape), v), k
    return n


def main():
    done = 0
    with tempfile.TemporaryDirectory() as tmp:
        source, made = os.path.join(FOLDER, "source"), os.path.join(tmp, "made")
        if not os.path.isdir(source):
            source = os.path.join(FOLDER, "_source_dense")
        for scheme in ("w:nf4,b64", "w:bnb_fp4,b64", "w:nf4,b128"):
            run(TARE, "quantize", source, "-o", made, "--scheme", scheme, "--overwrite")
            plain = os.path.join(tmp, "plain")
            run(TARE, "convert", made, "-o", plain, "--to", "plain", "--dtype", "f32", "--overwrite")
            print("ok bitsandbytes", scheme, check_bnb(load(made), load(plain)), "modules")
            done += 1
        for name in sorted(os.listdir(FOLDER)):
            path = os.path.join(FOLDER, name)
            if not os.path.exists(os.path.join(path, "golden.json")):
                continue
            method = config_of(path)["quantization_config"].get("quant_method")
            if method == "bitsandbytes":
                out, tensors, plain = converted(path, "bitsandbytes", tmp)
                print("ok bitsandbytes", name, check_bnb(tensors, plain), "modules")
            elif method == "mxfp4":
                out, tensors, plain = converted(path, "mxfp4", tmp)
                print("ok mxfp4", name, check_mxfp4(out, tensors, plain), "stacks")
            elif method != "compressed-tensors":
                try:
                    out, tensors, plain = converted(path, "compressed-tensors", tmp)
                except SystemExit as why:
                    if "cannot hold" not in str(why) and "would be" not in str(why):
                        raise
                    print("skip", name + ":", str(why).strip().split("\n")[-1][:140])
                    continue
                config = config_of(out)
                if len(config["quantization_config"]["config_groups"]) > 1:
                    print("skip", name + ": several groups")
                    continue
                n, values, dtype = check_modules(tensors, plain, config)
                print("ok compressed-tensors", name, n, "modules,", dtype)
            else:
                continue
            done += 1
    sys.exit(0 if done > 3 else 1)


main()

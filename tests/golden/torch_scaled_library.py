#!/usr/bin/env python3
"""What `tare convert --to fp8` and `--to modelopt` write, read by the tools whose dialects they are.

  fp8        transformers loads the folder (FineGrainedFP8Config, dequantized), from blocks of compressed-tensors
  modelopt   NVFP4QTensor of ModelOpt dequantizes the tensors, from nvfp4 of compressed-tensors

Both give the values of `tare convert --to plain --dtype f32`. Needs torch and transformers (for the second part
nvidia-modelopt); without them it says so and is skipped (exit 77).
Usage: torch_scaled_library.py [TARE [FOLDER]]; TARE may come from the environment
"""
import os
import re
import subprocess
import sys
import tempfile

try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as why:
    print(f"skipped: {why}")
    sys.exit(77)
try:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
except ImportError:
    NVFP4QTensor = None

TARE = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("TARE", "build/tare")
HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = sys.argv[2] if len(sys.argv) > 2 else os.path.join(HERE, "..", "fixtures", "quant")


def convert(source, out, to, *more):
    p = subprocess.run([TARE, "convert", source, "-o", out, "--to", to, "--overwrite", *more], capture_output=True,
                       text=True)
    if p.returncode:
        sys.exit(p.stderr)
    return out


def written(case, to, tmp):
    out = convert(os.path.join(FOLDER, case), os.path.join(tmp, "out"), to)
    plain = convert(out, os.path.join(tmp, "plain"), "plain", "--dtype", "f32")
    return out, load_file(os.path.join(plain, "model.safetensors"))


def check_fp8(case, tmp):
    out, plain = written(case, "fp8", tmp)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=transformers.FineGrainedFP8Config(dequantize=True))
    state = model.state_dict()
    for name, w in plain.items():
        if name in state:
            assert torch.equal(state[name].float(), w), name
            continue
        head, expert, part = re.match(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name).groups()  # stacked in memory
        half = {"gate_proj": slice(0, len(w)), "up_proj": slice(len(w), None)}.get(part, slice(None))
        stack = state[head + (".down_proj" if part == "down_proj" else ".gate_up_proj")]
        assert torch.equal(stack[int(expert)][half].float(), w), name
    print("ok fp8", case, len(plain), "tensors")


def check_modelopt(case, tmp):
    out, plain = written(case, "modelopt", tmp)
    tensors, n = load_file(os.path.join(out, "model.safetensors")), 0
    for name in [k[:-len(".weight_scale_2")] for k in tensors if k.endswith(".weight_scale_2")]:
        w = plain[name + ".weight"]
        q = NVFP4QTensor(w.shape, torch.float32, tensors[name + ".weight"])
        theirs = q.dequantize(dtype=torch.float32, scale=tensors[name + ".weight_scale"],
                              double_scale=tensors[name + ".weight_scale_2"], block_sizes={-1: 16})
        assert torch.equal(theirs, w), name
        n += 1
    print("ok modelopt", case, n, "modules")


def main():
    with tempfile.TemporaryDirectory() as tmp:
        for case in ("ct_fp8_block", "ct_moe_fp8_block", "deepseek_fp8_block"):
            if os.path.isdir(os.path.join(FOLDER, case)):
                check_fp8(case, tmp)
        if NVFP4QTensor is None:
            return print("skip modelopt: nvidia-modelopt is not installed")
        for case in ("ct_nvfp4", "ct_nvfp4a16", "modelopt_nvfp4"):
            if os.path.isdir(os.path.join(FOLDER, case)):
                check_modelopt(case, tmp)


main()

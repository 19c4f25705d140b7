#!/usr/bin/env python3
"""Every preset, quantized by tare, read by the library compressed-tensors.

For each scheme the model is quantized, opened here with safetensors, every module decompressed by
the library's own compressor for the format that the config names, and held bit for bit against
`tare convert --to plain --dtype f32` rounded to the type in which the library dequantized. Where
transformers is there, whole models are loaded through it as well and compared tensor by tensor.

Needs torch and compressed-tensors; without them it says so and is skipped (exit 77).
Usage: torch_ct_library.py [TARE [MODEL]]; TARE may come from the environment
"""
import json
import os
import subprocess
import sys
import tempfile

try:
    import torch
    from safetensors.torch import load_file
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
except ImportError as why:
    print(f"skipped: {why}")
    sys.exit(77)

SCHEMES = [
    "fp8", "fp8-tensor", "fp8-block", "fp8-w8a16", "int8", "int8-w8a16", "int4", "int4-asym",
    "int3", "int2", "nvfp4", "mxfp4", "w:mxfp8,g32", "w:int5,g32,asym", "w:int6,g64",
    "w:int7,channel", "w:int8,g32,asym", "w:int4,channel,asym", "w:int4,g128 a:int8,token",
    "w:int3,channel,asym", "w:int4,g64,asym a:int8,token",
]
SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point",
            "weight_g_idx", "weight_global_scale")


def run(*args):
    p = subprocess.run(args, capture_output=True, text=True)
    if p.returncode:
        sys.exit(f"{' '.join(args)}: exit {p.returncode}\n{p.stderr}")


def load(path):
    out = {}
    for name in sorted(os.listdir(path)):
        if name.endswith(".safetensors"):
            out.update(load_file(os.path.join(path, name)))
    return out


def check_modules(tensors, plain, config):
    """Returns (modules, values) compared; exits on the first difference."""
    q = dict(config["quantization_config"])
    method = q.pop("quant_method")
    assert method == "compressed-tensors"
    for key in ("sparsity_config", "transform_config", "version"):
        q.pop(key)
    parsed = QuantizationConfig.model_validate(q)
    (scheme,) = parsed.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    modules = sorted({n.rsplit(".", 1)[0] for n in tensors if n.endswith(".weight_scale")})
    values = 0
    for m in modules:
        state = {s: tensors[f"{m}.{s}"] for s in SUFFIXES if f"{m}.{s}" in tensors}
        theirs = compressor.decompress(state, scheme)["weight"]
        ours = plain[f"{m}.weight"]
        assert ours.dtype == torch.float32
        if not torch.equal(ours.to(theirs.dtype), theirs):
            bad = (ours.to(theirs.dtype) != theirs).sum().item()
            sys.exit(f"{m}: {bad} of {ours.numel()} values differ ({theirs.dtype})")
        values += ours.numel()
    return len(modules), values, theirs.dtype


def check_whole(path, plain):
    """The model as transformers loads it."""
    import transformers
    from transformers.utils.quantization_config import CompressedTensorsConfig
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16,
        quantization_config=CompressedTensorsConfig(run_compressed=False))
    state = model.state_dict()
    n = 0
    for name, ours in plain.items():
        if not torch.equal(ours.to(torch.bfloat16), state[name].to(torch.bfloat16)):
            sys.exit(f"{path}: {name} differs when loaded through transformers")
        n += 1
    return n


def main():
    tare = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("TARE", "build/tare")
    model = sys.argv[2] if len(sys.argv) > 2 else "models/millet-7m"
    whole = True
    try:
        import transformers  # noqa: F401
    except ImportError:
        whole = False
    with tempfile.TemporaryDirectory() as tmp:
        for i, scheme in enumerate(SCHEMES):
            q, p = f"{tmp}/q{i}", f"{tmp}/p{i}"
            run(tare, "quantize", model, "-o", q, "--scheme", scheme)
            run(tare, "convert", q, "-o", p, "--to", "plain", "--dtype", "f32")
            with open(f"{q}/config.json", encoding="utf-8") as f:
                config = json.load(f)
            plain = load(p)
            n, values, dtype = check_modules(load(q), plain, config)
            line = f"{scheme:34} {n} modules, {values} values equal in {dtype}"
            if whole:
                line += f"; {check_whole(q, plain)} tensors equal through transformers"
            print(line, flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What tare writes as GPTQ and AWQ, loaded by the tools' own code: GPTQModel's torch kernel (with its own
conversion of v1 zero points) and AutoAWQ's dequantize_gemm give bit by bit the fp16 of the weights that tare has.

Needs the packages gptqmodel and autoawq besides requirements-torch.txt; AutoAWQ's own requirements are too old for
it, so: pip install --no-deps gptqmodel autoawq, and what the import of the first asks for. Usage:
torch_packed_library.py [FOLDER of checkpoints]; TARE comes from the environment."""
import glob
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
FIXTURES = os.path.join(HERE, "..", "fixtures", "quant")
FOLDER = sys.argv[1] if len(sys.argv) > 1 else FIXTURES
TARE = os.path.abspath(os.environ.get("TARE", "build/tare"))
try:
    import torch
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module
    from safetensors.torch import load_file

    at = importlib.util.find_spec("awq")
    file = os.path.join(at.submodule_search_locations[0], "utils", "packing_utils.py")
    spec = importlib.util.spec_from_file_location("packing_utils", file)
    awq = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(awq)
except (ImportError, AttributeError) as why:
    print("skip packed_library:", why)
    sys.exit(0)
bad = 0


def report(good, name, why=""):
    global bad
    bad += not good
    print("ok" if good else "FAIL", name, why)


def tare(*args):
    return subprocess.run([TARE, *args, "--overwrite", "-q"], capture_output=True, text=True)


def settings(c, m):
    one = {k: c.get(k) for k in ("bits", "group_size", "sym", "desc_act")}
    for rule, over in c.get("dynamic", {}).items():
        if re.match(rule.split(":", 1)[1], m):
            return {**one, **over}
    return one


def by_gptqmodel(c, t, m):
    o = settings(c, m)
    layer = TorchLinear(in_features=t[m + ".g_idx"].shape[0], out_features=t[m + ".qweight"].shape[1],
                        pack_dtype=torch.int32, **o)
    layer.load_state_dict({s: t[f"{m}.{s}"] for s in ("qweight", "qzeros", "scales", "g_idx")}, strict=False)
    if c["checkpoint_format"] == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, o["bits"], torch.int32)
    return layer.eval().dequantize_weight().T


def by_autoawq(c, t, m):
    group = c["group_size"] if c["group_size"] > 0 else t[m + ".qweight"].shape[0]
    return awq.dequantize_gemm(t[m + ".qweight"], t[m + ".qzeros"], t[m + ".scales"], 4, group).T


def check(name, path, to, tmp):
    plain = os.path.join(tmp, "plain")
    p = tare("convert", path, "-o", plain, "--to", "plain", "--dtype", "f32")
    if p.returncode:
        return report(False, name, p.stderr.strip())
    with open(os.path.join(path, "config.json")) as f:
        c = json.load(f)["quantization_config"]
    t, w = (load_file(os.path.join(d, "model.safetensors")) for d in (path, plain))
    read = by_gptqmodel if to == "gptq" else by_autoawq
    modules = [k[:-8] for k in t if k.endswith(".qweight")]
    wrong = [m for m in modules
             if not torch.equal(read(c, t, m).to(torch.float32), w[m + ".weight"].to(torch.float16).to(torch.float32))]
    report(modules and not wrong, name, f"{len(modules)} modules" if not wrong else str(wrong[:2]))


def main():
    with tempfile.TemporaryDirectory() as tmp:
        made = os.path.join(tmp, "made")
        for scheme, to in (("w:int4,g128", "gptq"), ("w:int4,g64,asym", "gptq"), ("w:int3,g64", "gptq"),
                           ("w:int2,g32,asym", "gptq"), ("w:int8,channel", "gptq"), ("w:int4,g64,asym", "awq"),
                           ("w:int4,g128", "awq")):
            p = tare("quantize", os.path.join(FIXTURES, "source"), "-o", made, "--scheme", scheme, "--to", to)
            name = f"library_quantize_{re.sub('[:,]', '_', scheme)}_to_{to}"
            report(False, name, p.stderr.strip()) if p.returncode else check(name, made, to, tmp)
        for path in sorted(glob.glob(os.path.join(FOLDER, "*", "config.json"))):
            for to in ("gptq", "awq"):
                if tare("convert", os.path.dirname(path), "-o", made, "--to", to).returncode == 0:
                    check(f"library_{os.path.basename(os.path.dirname(path))}_to_{to}", made, to, tmp)
    return bad > 0


sys.exit(main())

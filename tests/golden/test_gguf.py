#!/usr/bin/env python3
"""GGUF against outside readers.

The committed expectations (tests/fixtures/gguf/expected.txt, which tests/unit/test_ckpt_gguf.c reads) are
what the installed package gguf decodes from the committed file, type by type. Then `tare convert` turns the
file into a Hugging Face folder that the packages safetensors and tokenizers open: same values, same ids."""
import hashlib
import json
import os
import subprocess
import sys
import tempfile

import gguf
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import make_gguf_fixture as fixture

FILE = os.path.join(fixture.DIR, "tiny.gguf")
bad = 0


def report(good, name):
    global bad
    bad += not good
    print("ok" if good else "FAIL", name)


def reference():
    """HF name -> fp32 values, and the ggml type."""
    names = {}
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, _, _, _ in fixture.tensors(None):
        names[table.get_name(name) + ".weight"] = name + ".weight"
    out = {}
    for t in gguf.GGUFReader(FILE).tensors:
        w = gguf.dequantize(t.data, t.tensor_type)
        name = names[t.name]
        if ".q_proj" in name:
            w = fixture.unpermute(w, fixture.HEADS)
        if ".k_proj" in name:
            w = fixture.unpermute(w, fixture.KV)
        out[name] = np.ascontiguousarray(w, dtype="<f4"), t.tensor_type.name
    return out


def check_expectations(values):
    with open(os.path.join(fixture.DIR, "expected.txt")) as f:
        want = {line.split()[0]: line.split()[3] for line in f}
    report(set(want) == set(values), "gguf_names")
    by_type = {}
    for name, (w, kind) in values.items():
        same = hashlib.sha256(w.tobytes()).hexdigest() == want.get(name)
        by_type[kind] = by_type.get(kind, True) and same
    for kind, same in sorted(by_type.items()):
        report(same, "gguf_expected_%s" % kind)


def check_convert(values, tare):
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "plain")
        run = subprocess.run([tare, "convert", FILE, "-o", out, "--dtype", "f32"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
        if run.returncode:
            print(run.stderr)
            return report(False, "gguf_convert")
        got = load_file(os.path.join(out, "model.safetensors"))
        report(set(got) == set(values), "gguf_convert_names")
        # fp32 passes through exactly: also the sign of zero.
        report(all(np.array_equal(got[n].view(np.uint32).ravel(), w.view(np.uint32).ravel())
                   for n, (w, _) in values.items() if n in got), "gguf_convert_values")
        tok = Tokenizer.from_file(os.path.join(out, "tokenizer.json"))
        report(tok.encode("hello wor12<eot>").ids == [1, 34, 37, 38, 39, 7], "gguf_convert_ids")
        report(tok.decode([34, 37, 38], skip_special_tokens=False) == "hello wor1", "gguf_convert_text")
        with open(os.path.join(out, "config.json")) as f:
            cfg = json.load(f)
        report(cfg["eos_token_id"] == [0, 7] and cfg["rms_norm_eps"] == 1e-5, "gguf_convert_config")
        with open(os.path.join(out, "tokenizer_config.json")) as f:
            report(json.load(f)["chat_template"] == fixture.TEMPLATE, "gguf_convert_template")


def main():
    values = reference()
    check_expectations(values)
    tare = os.environ.get("TARE")
    if tare and os.path.exists(tare):
        check_convert(values, os.path.abspath(tare))
    else:
        print("skip gguf_convert: no tare binary in $TARE")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

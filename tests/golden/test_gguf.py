#!/usr/bin/env python3
"""GGUF against outside readers.

The committed expectations (tests/fixtures/gguf/expected.txt, which tests/unit/test_ckpt_gguf.c reads) are
what the installed package gguf decodes from the committed file, type by type. Then `tare convert` turns the
file into a Hugging Face folder that the packages safetensors and tokenizers open: same values, same ids."""
import hashlib
import base64
import json
import os
import subprocess
import sys
import tempfile

import gguf
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

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


def write_vocabulary(path, model, tokens, types, scores=None, **ids):
    """A GGUF with a vocabulary and one tensor."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(1)
    w.add_context_length(64)
    w.add_embedding_length(8)
    w.add_feed_forward_length(8)
    w.add_head_count(1)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model(model)
    w.add_token_list(tokens)
    w.add_token_types(types)
    if scores:
        w.add_token_scores(scores)
    for name, value in ids.items():
        getattr(w, "add_" + name)(value)
    w.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def same_ids(tare, path, want, texts, name):
    for text in texts:
        out = subprocess.run([tare, "tokenize", path, "--json"], input=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        got = json.loads(out.stdout)["tokens"] if out.returncode == 0 else out.stderr
        if got != want(text):
            print(repr(text), got, want(text))
            return report(False, name)
    report(True, name)


def check_vocabularies(tare):
    """Vocabularies of the kinds t5 and bert, against tokenizers put together by hand."""
    import test_tokenizers as live
    texts = [t for t in live.texts() if "\x00" not in t and t][:60]
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "v.gguf")
        model = live.unigram()
        vocab = [v for v in model["vocab"] if v[0] != "<s>"] + [["</s>", 0.0]]
        ref = Tokenizer(models.Unigram([(a, b) for a, b in vocab], 0, False))
        ref.normalizer = normalizers.Sequence([
            normalizers.Precompiled(base64.b64decode(live.CHARSMAPS["own rules"])), normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " ")])
        ref.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        ref.add_special_tokens(["<unk>", "</s>"])
        end = ref.token_to_id("</s>")
        write_vocabulary(path, "t5", [v[0] for v in vocab], [2 if v[0] == "<unk>" else 3 if v[0] == "</s>" else 1 for v in vocab],
                         [v[1] for v in vocab], eos_token_id=end, unk_token_id=0, add_eos_token=True,
                         precompiled_charsmap=base64.b64decode(live.CHARSMAPS["own rules"]))
        same_ids(tare, path, lambda t: ref.encode(t).ids + [end], texts, "gguf_t5_ids")
        names = list(live.word_pieces()["vocab"])
        special = names[:5]
        ref = Tokenizer(models.WordPiece(dict(zip(names, range(len(names)))), unk_token="[UNK]"))
        ref.normalizer, ref.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        ref.add_special_tokens(special)
        stored = [n if n in special else n[2:] if n.startswith("##") else "\u2581" + n for n in names]
        write_vocabulary(path, "bert", stored, [3 if n in special else 1 for n in names], bos_token_id=2, sep_token_id=3, unk_token_id=1)
        same_ids(tare, path, lambda t: [2] + ref.encode(t).ids + [3], texts, "gguf_bert_ids")


def main():
    values = reference()
    check_expectations(values)
    tare = os.environ.get("TARE")
    if tare and os.path.exists(tare):
        check_convert(values, os.path.abspath(tare))
        check_vocabularies(os.path.abspath(tare))
    else:
        print("skip gguf_convert: no tare binary in $TARE")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""SentencePiece .model files against the library `sentencepiece`, live: ids (special tokens literal, as the library never
finds them in a text), decoded and streamed text.

Small models are trained here on millet-7m's sample with all the options that a .model file carries; TOKENIZERS=FILE:...
adds real ones (names that end in .model or .model.gz). live_sentencepiece.py"""
import base64
import gzip
import json
import os
import tempfile

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

import test_tokenizers as live

ROOT = live.ROOT
RULES = "61\t62\n61 300\t43\nAA\t41\n63 64 65\t46\nD\t47\n2026\t2E 2E 2E\nA9\t20 63 20\nE9\t\n3000\t20\n1FBD\t20 313\n"


def models(folder):
    """(title, path) of trained models."""
    sample = os.path.join(ROOT, "models/millet-7m/sample.txt")
    rules = os.path.join(folder, "rules.tsv")
    open(rules, "w").write(RULES)
    plain = {"input": sample, "vocab_size": 400, "minloglevel": 2, "hard_vocab_limit": False, "num_threads": 2}
    options = {
        "as it is": {}, "byte fallback": {"byte_fallback": True, "vocab_size": 700},
        "identity, Llama": {"byte_fallback": True, "vocab_size": 700, "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
                            "allow_whitespace_only_pieces": True, "split_digits": True},
        "no prefix": {"add_dummy_prefix": False}, "case folded": {"normalization_rule_name": "nmt_nfkc_cf"},
        "own rules": {"normalization_rule_tsv": rules}, "no prefix, spaces kept": {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
        "suffix": {"treat_whitespace_as_suffix": True}, "control": {"control_symbols": ["<pad>", "<mask>"], "pad_id": 3, "unk_surface": "?"},
        "user defined": {"user_defined_symbols": ["<|im_start|>", "lower", "low", "the l", " ", "22", "中文"]},
        "user defined, fallback": {"user_defined_symbols": ["<0x40>x", "er", "▁w"], "byte_fallback": True, "vocab_size": 700},
        "across words": {"split_by_whitespace": False, "split_by_unicode_script": False, "split_by_number": False},
    }
    for kind in ("unigram", "bpe"):
        for title, more in options.items():
            path = os.path.join(folder, "m%d" % len(os.listdir(folder)))
            sentencepiece.SentencePieceTrainer.train(model_prefix=path, model_type=kind, **dict(plain, **more))
            yield "%s, %s" % (kind, title), path + ".model"
        unused = retyped(path + ".model", path + "-unused.model")
        yield "%s, unused pieces" % kind, unused


def varint(n):
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def retyped(path, to):
    """The model with every third normal piece made unused."""
    data, at, out, count = open(path, "rb").read(), 0, b"", 0
    while at < len(data) and data[at] == 0x0A:
        size, shift, start = 0, 0, at
        at += 1
        while True:
            b = data[at]
            size |= (b & 127) << shift
            shift, at = shift + 7, at + 1
            if b < 128:
                break
        body = data[at:at + size]
        at += size
        text = body[2:2 + body[1]].decode()
        normal = b"\x18" not in body[2 + body[1] + 5:]
        count += normal and len(text) > 1
        if normal and len(text) > 1 and count % 3 == 0:
            body += b"\x18\x05"
            out += b"\x0a" + varint(len(body)) + body
        else:
            out += data[start:at]
    open(to, "wb").write(out + data[at:])
    return to


def twin(model):
    """tokenizer.json with the same pieces, scores and character map; None for BPE or without a map."""
    m = sentencepiece_model_pb2.ModelProto()
    m.ParseFromString(model)
    if m.trainer_spec.model_type != 1 or not m.normalizer_spec.precompiled_charsmap:
        return None
    vocab = [[p.piece, p.score] for p in m.pieces]
    ms = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None, "decoder": ms, "pre_tokenizer": ms,
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(m.normalizer_spec.precompiled_charsmap).decode()},
            "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}}


def compare(d, path, lines):
    sp = sentencepiece.SentencePieceProcessor(model_file=path)
    a = d.ask(open=path)
    if a["error"]:
        return "refused: " + a["error"]
    for text in lines:
        want = sp.encode(text)
        got = d.ask(hex=text.encode().hex(), special=False, literal=True)
        if got.get("error") or got["ids"] != want:
            return "%r: %s instead of %s" % (text[:80], got.get("ids", got.get("error")), want)
        back = sp.decode(want)
        if got["decoded"] != back:
            return "%r: decoded %r instead of %r" % (text[:80], got["decoded"][:80], back[:80])
        if got["streamed"] != got["decoded"] and "\ufffd" not in got["decoded"]:
            return "%r: streamed %r instead of %r" % (text[:80], got["streamed"][:80], got["decoded"][:80])
    return None


def check_twin(d, title, path, folder, lines):
    """The pieces and the character map of a unigram model as tokenizer.json, against the library `tokenizers`."""
    j = twin(open(path, "rb").read())
    if not j:
        return
    twin_path = os.path.join(folder, "twin.json")
    json.dump(j, open(twin_path, "w"), ensure_ascii=False)
    live.report(title + ", as tokenizer.json", live.compare(d, twin_path, title, lines))


def main():
    d = live.Driver(live.build_driver())
    lines = [t for t in live.texts() if "\x00" not in t]
    sample = open(os.path.join(ROOT, "models/millet-7m/sample.txt"), encoding="utf-8").read()
    lines += [sample[i:i + 700] for i in range(0, min(len(sample), 28000), 700)]
    with tempfile.TemporaryDirectory() as folder:
        for title, path in models(folder):
            live.report(title, compare(d, path, lines))
            check_twin(d, title, path, folder, lines)
        for path in os.environ.get("TOKENIZERS", "").split(":"):
            name = path
            if path.endswith(".model.gz"):
                path = os.path.join(folder, "real.model")
                open(path, "wb").write(gzip.open(name).read())
            if path.endswith(".model"):
                live.report(os.path.basename(os.path.dirname(name)), compare(d, path, lines))
                check_twin(d, os.path.basename(os.path.dirname(name)), path, folder, lines)
    if d.close() != 0:
        live.report("driver ends well", "exit status not 0")
    raise SystemExit(1 if live.bad else 0)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes tests/fixtures/text/spm-*.model and spm.jsonl, and the twin of one of them as tokenizer.json: small models that
the Python library `sentencepiece` trains on millet-7m's sample, with its ids and texts; the twin's ids by `tokenizers`.

The two answers differ where a character map is applied by grapheme clusters (the twin) or by the longest rule (the
.model): both are kept, each for its own kind of file. make_spm_golden.py"""
import json
import os
import shutil
import tempfile

import sentencepiece
from tokenizers import Tokenizer

import live_sentencepiece
import test_tokenizers as live
from make_text_golden import OUT, rows

MODELS = {
    "spm-unigram": {"model_type": "unigram", "vocab_size": 240, "user_defined_symbols": ["lower", "<|im_start|>"], "control_symbols": ["<mask>"]},
    "spm-bpe": {"model_type": "bpe", "vocab_size": 480, "byte_fallback": True, "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False, "character_coverage": 0.99},
    "spm-suffix": {"model_type": "bpe", "vocab_size": 220, "treat_whitespace_as_suffix": True, "unk_surface": "?"},
}


def main():
    lines = [t for t in live.texts() if "\x00" not in t]
    lines = ["\u00aa\u0300", "a\u0300b", "각", "ắ", "ἐνθάδ᾽ ἵξομαι", "a <0x40> b", "@", "\n", "\U00010348"] + lines[6:24] + lines[24::5]
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(OUT, "spm.jsonl"), "w") as f:
        rules = os.path.join(folder, "rules.tsv")
        open(rules, "w").write(live_sentencepiece.RULES)
        for name, options in MODELS.items():
            path = os.path.join(folder, name)
            if "normalization_rule_name" not in options:
                options = dict(options, normalization_rule_tsv=rules)
            sentencepiece.SentencePieceTrainer.train(input=os.path.join(live.ROOT, "models/millet-7m/sample.txt"), model_prefix=path, minloglevel=2,
                                                     hard_vocab_limit=False, **options)
            shutil.copy(path + ".model", OUT)
            sp = sentencepiece.SentencePieceProcessor(model_file=path + ".model")
            got = [{"text": t, "ids": sp.encode(t), "decoded": sp.decode(sp.encode(t))} for t in lines]
            f.write(json.dumps({"path": "tests/fixtures/text/%s.model" % name, "rows": got}, ensure_ascii=False) + "\n")
        j = live_sentencepiece.twin(open(os.path.join(folder, "spm-unigram.model"), "rb").read())
        text = json.dumps(j, ensure_ascii=False)
        open(os.path.join(OUT, "spm-unigram.json"), "w").write(text)
        f.write(json.dumps({"path": "tests/fixtures/text/spm-unigram.json", "rows": rows(Tokenizer.from_str(text), lines)}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

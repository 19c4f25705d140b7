#!/usr/bin/env python3
"""Writes tests/fixtures/text/: ids and texts by the library `tokenizers`, read by tests/unit/test_text_*.c.

stages.jsonl     one small tokenizer a line, stages as in test_tokenizers.py, the model by name from models.json
models.json      the two small vocabularies
real.jsonl       texts for millet-7m and the two story tokenizers beside this file
Skipped and decoded texts of tokens that are both special and normalized are left out: there the library prints
the normalized form of the token, tare the token."""
import json
import os

from tokenizers import Tokenizer

import test_tokenizers as live

OUT = os.path.join(live.ROOT, "tests/fixtures/text")


def rows(ref, lines, decode=True):
    out = []
    for text in lines:
        if "\x00" in text:  # JSON escapes of NUL are refused by the reader
            continue
        row = {"text": text, "ids": ref.encode(text, add_special_tokens=False).ids}
        special = ref.encode(text, add_special_tokens=True).ids
        if special != row["ids"]:
            row["special"] = special
        if decode:
            row["decoded"] = ref.decode(row["ids"], skip_special_tokens=False)
            skipped = ref.decode(row["ids"], skip_special_tokens=True)
            if skipped != row["decoded"]:
                row["skipped"] = skipped
        out.append(row)
    return out


def main():
    names, models = {}, {}
    lines = live.texts()
    with open(os.path.join(OUT, "stages.jsonl"), "w") as f:
        for i, (name, j) in enumerate(live.cases()):
            ref = Tokenizer.from_str(json.dumps(j))
            model = j.pop("model")
            key = json.dumps(model, sort_keys=True)
            if key not in names:
                names[key] = "m%d" % len(names)
                models[names[key]] = model
            j = {k: v for k, v in j.items() if v is not None and k not in ("version", "truncation", "padding")}
            j.update(name=name, model=names[key],
                     rows=rows(ref, lines[6:17] + lines[24 + i % 7:-1:23]))
            f.write(json.dumps(j, ensure_ascii=False) + "\n")
    json.dump(models, open(os.path.join(OUT, "models.json"), "w"), ensure_ascii=False)
    with open(os.path.join(OUT, "real.jsonl"), "w") as f:
        for path in ("models/millet-7m/tokenizer.json", "tests/fixtures/text/stories260K.json",
                     "tests/fixtures/text/tinystories-656k.json"):
            ref = Tokenizer.from_file(os.path.join(live.ROOT, path))
            f.write(json.dumps({"path": path, "rows": rows(ref, lines[:24] + lines[24::3], "656k" not in path)},
                               ensure_ascii=False) + "\n")


main()

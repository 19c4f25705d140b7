#!/usr/bin/env python3
"""Writes tests/fixtures/text/: ids and texts by the library `tokenizers`, read by tests/unit/test_text_*.c.

stages.jsonl     one small tokenizer a line, stages as in test_tokenizers.py, the model by name from models.json
models.json      the two small vocabularies
real.jsonl       texts for millet-7m and the two story tokenizers beside this file
A row without ids is a text that the library refuses."""
import json
import os

from tokenizers import Tokenizer

import test_tokenizers as live

OUT = os.path.join(live.ROOT, "tests/fixtures/text")


def rows(ref, lines):
    out = []
    for text in lines:
        if "\x00" in text:  # JSON escapes of NUL are refused by the reader
            continue
        got, refused = live.library(lambda: ref.encode(text, add_special_tokens=False).ids)
        if refused:
            out.append({"text": text})
            continue
        row = {"text": text, "ids": got}
        special = ref.encode(text, add_special_tokens=True).ids
        if special != row["ids"]:
            row["special"] = special
        ref.encode_special_tokens = True
        literal = ref.encode(text, add_special_tokens=False).ids
        ref.encode_special_tokens = False
        if literal != row["ids"]:
            row["literal"] = literal
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
        for i, (name, j) in enumerate(list(live.cases()) + list(live.model_cases())):
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
            f.write(json.dumps({"path": path, "rows": rows(ref, lines[:24] + lines[24::3])},
                               ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

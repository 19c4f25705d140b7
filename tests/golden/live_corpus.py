#!/usr/bin/env python3
"""Real texts through real tokenizers, document by document against the live library `tokenizers`: ids, decoded text, and
streamed text against decoded text. For each tokenizer the number of documents that differ is printed; 0 is ok.

    TOKENIZERS=FILE:FILE...  tokenizer.json files (.gz is fine); millet-7m's is always taken
    CORPUS=PATH:PATH...      files or folders: .txt, .jsonl, .json, .csv, .tsv, .md, .c, .h, .py, .sh (.gz is fine). A line of
                             .jsonl, .csv and .tsv is a document, other files are cut into pieces of about 8 kB
    CORPUS_MB                megabytes to take, spread evenly over all (default 10)
Without CORPUS the project's own sources are the corpus. VECTORS=1 also compares vectors.jsonl.gz beside a tokenizer:
{"text", "ids", "ids_with_special"?, "decoded"?, "decoded_skip_special"?}. live_corpus.py"""
import gzip
import json
import os
import tempfile
import time

from tokenizers import Tokenizer

import test_tokenizers as live

LINES, WHOLE = (".jsonl", ".csv", ".tsv"), (".txt", ".json", ".md", ".c", ".h", ".py", ".sh", ".def")


def read(path):
    raw = gzip.open(path).read() if path.endswith(".gz") else open(path, "rb").read()
    return raw.decode("utf-8", "replace").replace("\x00", "")


def strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for v in value if isinstance(value, list) else value.values():
            yield from strings(v)


def documents(path):
    name = path[:-3] if path.endswith(".gz") else path
    text = read(path)
    if name.endswith(LINES):
        for line in text.split("\n"):
            try:
                yield "\n".join(strings(json.loads(line))) if name.endswith(".jsonl") else line
            except ValueError:
                yield line
    else:
        for at in range(0, len(text), 8000):
            yield text[at:at + 8000]


def corpus():
    """Documents of all files in turn, until there are enough of them."""
    roots = [p for p in os.environ.get("CORPUS", "").split(":") if p] + [os.path.join(live.ROOT, d) for d in ("src", "tests", "tools", "docs")]
    files = []
    for root in roots:
        found = [root] if os.path.isfile(root) else [os.path.join(d, f) for d, _, fs in os.walk(root) for f in fs]
        files += sorted(f for f in found if (f[:-3] if f.endswith(".gz") else f).endswith(LINES + WHOLE) and "fixtures" not in f)
    every = [[d for d in documents(f) if d] for f in files]
    total = sum(len(d) for docs in every for d in docs)
    share = min(1.0, float(os.environ.get("CORPUS_MB", "10")) * 1e6 / max(total, 1) * 1.02)
    out = []
    for docs in every:
        keep = max(1, round(len(docs) * share)) if docs else 0
        out += [docs[i * len(docs) // keep] for i in range(keep)]
    return out


def differs(d, ref, text):
    want = ref.encode(text, add_special_tokens=True).ids
    got = d.ask(hex=text.encode().hex(), special=True)
    if got.get("error") or got["ids"] != want:
        return "ids of %r" % text[:60]
    if got["decoded"] != ref.decode(want, skip_special_tokens=False):
        return "text of %r" % text[:60]
    return "stream of %r" % text[:60] if got["streamed"] != got["decoded"] and "\ufffd" not in got["decoded"] else None


def check_vectors(d, path, title):
    n, bad = 0, []
    for line in read(path).split("\n"):
        if not line:
            continue
        v = json.loads(line)
        got = d.ask(hex=v["text"].encode().hex(), special=False, literal=title.endswith(".model"))
        special = d.ask(hex=v["text"].encode().hex(), special=True)
        wrong = [k for k, a, b in (("ids", got.get("ids"), v["ids"]), ("decoded", got.get("decoded"), v.get("decoded", v["text"])),
                                   ("special", special.get("ids"), v.get("ids_with_special", special.get("ids"))),
                                   ("skipped", got.get("skipped"), v.get("decoded_skip_special", got.get("skipped"))),
                                   ("streamed", got.get("streamed"), got.get("decoded"))) if a != b
                 and not (k == "streamed" and "\ufffd" in b)]
        n += 1
        bad += [(v["text"][:50], wrong)] if wrong else []
    live.report("vectors of %s: %d of %d differ" % (title, len(bad), n), str(bad[:3]) if bad else None)


def main():
    d = live.Driver(live.build_driver())
    docs = corpus()
    size = sum(len(x.encode()) for x in docs)
    print("%d documents, %.1f MB" % (len(docs), size / 1e6), flush=True)
    paths = [os.path.join(live.ROOT, "models/millet-7m/tokenizer.json")] + [p for p in os.environ.get("TOKENIZERS", "").split(":") if p]
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            name = path[:-3] if path.endswith(".gz") else path
            title = os.path.basename(os.path.dirname(path)) + (".model" if name.endswith(".model") else "")
            plain = os.path.join(folder, "t" + os.path.splitext(name)[1])
            open(plain, "wb").write((gzip.open if path.endswith(".gz") else open)(path, "rb").read())
            a = d.ask(open=plain)
            if a["error"]:
                live.report(title, "refused: " + a["error"])
                continue
            if os.environ.get("VECTORS"):
                sub = ("spm", "") if name.endswith(".model") else ("hf", "")
                for vectors in [v for s in sub for v in [os.path.join(os.path.dirname(path), s, "vectors.jsonl.gz")] if os.path.exists(v)][:1]:
                    check_vectors(d, vectors, title)
            if name.endswith(".model"):
                continue
            t0, ref = time.time(), Tokenizer.from_file(plain)
            bad = [x for x in (differs(d, ref, t) for t in docs) if x]
            live.report("%s: %d of %d documents differ (%.0f s)" % (title, len(bad), len(docs), time.time() - t0), "; ".join(bad[:3]) or None)
    if d.close() != 0:
        live.report("driver ends well", "exit status not 0")
    raise SystemExit(1 if live.bad else 0)


if __name__ == "__main__":
    main()

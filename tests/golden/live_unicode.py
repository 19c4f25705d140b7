#!/usr/bin/env python3
"""Every character through every piece of a tokenizer that asks what a character is, against the live library
`tokenizers`: between letters, behind a letter and a combining mark, and beside its neighbours. live_unicode.py"""
import json
import os
import tempfile

from tokenizers import Tokenizer

import test_tokenizers as live

CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cn Co Han".split()


def configs():
    raw = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

    def cut(stage):
        return live.make(live.byte_level(), pre={"type": "Sequence", "pretokenizers": [stage, raw]}, dec=raw)

    def norm(stage):
        return live.make(live.byte_level(), norm=stage, pre=raw, dec=raw)
    for stage in ({"type": "Whitespace"}, {"type": "WhitespaceSplit"}, {"type": "Digits", "individual_digits": True}, {"type": "UnicodeScripts"},
                  {"type": "Punctuation", "behavior": "Isolated"}, {"type": "BertPreTokenizer"}):
        # Cuts show only where merges stop: letters around make tokens of their own.
        yield stage["type"], cut(stage)
    for g in CATEGORIES + ["L}\\p{M"]:
        yield "\\p{%s}" % g, cut({"type": "Split", "pattern": {"Regex": r"[\p{%s}]" % g}, "behavior": "Removed", "invert": False})
    for c in (r"\w", r"\s", r"\d", "[[:punct:]]"):  # [[:alpha:]]: docs/UNICODE.md says what remains
        yield c, cut({"type": "Split", "pattern": {"Regex": c}, "behavior": "Removed", "invert": False})
    for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt"):
        yield name, norm({"type": name})
    for key in ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase"):
        flags = {"clean_text": False, "handle_chinese_chars": False, "strip_accents": False, "lowercase": False}
        yield "BertNormalizer " + key, norm(dict({**flags, key: True}, type="BertNormalizer"))
    yield "Precompiled", norm({"type": "Precompiled", "precompiled_charsmap": live.CHARSMAPS["own rules"]})


def texts():
    """All planes with characters, and every 97th code point of the others."""
    points = [c for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000 and (c < 0x32400 or 0xE0000 <= c < 0xE0200 or c % 97 == 0)]
    for at in range(0, len(points), 400):
        part = [chr(c) for c in points[at:at + 400]]
        yield "".join("t" + c + "the" for c in part) + " " + "".join("a" + c + "\u0301\u0323er" for c in part) + "".join(part)


def main():
    d = live.Driver(live.build_driver())
    every = list(texts())
    with tempfile.TemporaryDirectory() as folder:
        for name, j in configs():
            path = os.path.join(folder, "t.json")
            json.dump(j, open(path, "w"))
            ref = Tokenizer.from_file(path)
            a, bad, n = d.ask(open=path), [], 0
            if a["error"]:
                live.report(name, "refused: " + a["error"])
                continue
            for text in every:
                want, got = ref.encode(text).ids, d.ask(hex=text.encode().hex(), only_ids=True)
                if got.get("ids") != want:
                    n += 1
                    k = next((i for i, (x, y) in enumerate(zip(want, got.get("ids", []))) if x != y), 0)
                    bad.append("%s near %s" % (got.get("error"), ascii(ref.decode(want[max(0, k - 6):k + 6]))))
            live.report("%s, all code points" % name, "%d texts differ: %s" % (n, "; ".join(bad[:4])) if n else None)
    d.close()
    raise SystemExit(1 if live.bad else 0)


if __name__ == "__main__":
    main()

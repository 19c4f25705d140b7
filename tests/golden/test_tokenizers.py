#!/usr/bin/env python3
"""Tokenizers against the Hugging Face library `tokenizers`, live: ids, decoded text and streamed text.

Small vocabularies are trained by hand below; around them stand all the normalizers, pre-tokenizers, decoders,
post-processors and flags of added tokens that tare knows, in many combinations. The texts are chosen to hit the
borders: spaces of all kinds, digits, combining marks, emoji sequences, look-alikes of special and byte tokens.
TOKENIZERS=FILE:FILE... adds real tokenizer.json files. The program tok_lines.c is built against libtare.a."""
import json
import os
import random
import subprocess
import sys
import tempfile

from tokenizers import Tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
TARE = os.environ.get("TARE", "build/tare")
BUILD = os.path.join(ROOT, os.path.dirname(TARE)) if not os.path.isabs(TARE) else os.path.dirname(TARE)
PKGS = "libcjson libmicrohttpd libpcre2-8 libutf8proc libxxhash sqlite3 libcrypto".split()
bad = 0


def report(name, problem):
    global bad
    bad += problem is not None
    print("ok" if problem is None else "FAIL", name, "" if problem is None else problem)


def build_driver():
    out = os.path.join(BUILD, "tok_lines")
    flags = subprocess.run(["pkg-config", "--cflags"] + PKGS, capture_output=True, text=True).stdout.split()
    libs = subprocess.run(["pkg-config", "--libs"] + PKGS, capture_output=True, text=True).stdout.split()
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O1", "-I", os.path.join(ROOT, "src"),
                    os.path.join(HERE, "tok_lines.c")] + flags + ["-o", out, os.path.join(BUILD, "libtare.a")] +
                   libs + ["-lm", "-ldl", "-pthread"] + os.environ.get("SAN_FLAGS", "").split(), check=True)
    return out


class Driver:
    def __init__(self, program):
        self.p = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, **q):
        self.p.stdin.write(json.dumps(q).encode() + b"\n")
        self.p.stdin.flush()
        line = self.p.stdout.readline()
        if not line:
            raise SystemExit("FAIL the driver died")
        return json.loads(line)

    def close(self):
        self.p.stdin.close()
        return self.p.wait()


# ---- texts ---------------------------------------------------------------------------------------

WORDS = ["the", "The", "hello", "world", "low", "lower", "newest", "widest", "don't", "I'll", "WE'RE", "x1y22z333",
         "2024", "3.14", "naïve", "Straße", "ﬁn", "Å", "e\u0301", "한국어", "각", "中文字", "日本", "ア", "русский", "עברית",
         "🙂", "👩\u200d👩\u200d👧", "👍🏽", "\u0130", "\u017f", "\u212a", "①", "Ⅷ", "½", "١٢٣", "a_b", "<0x41>", "<s>",
         "</s>", "<mask>", "<|im_start|>", "<pad>", "▁", "Ġ", "▁low", "...", "?!", "«q»", "—", "$5", "a\u200bb", "\x00", "\x7f"]
SPACES = ["", " ", "  ", "   ", "\n", "\n\n", " \n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028", "\u180e", "\u200b", "\x1c", "\x85"]


def texts():
    rng = random.Random(7)
    out = ["", " ", "  ", "\n", "a <0x40> b", "@", "\n", "\U00010348", "<|im_start|>user", "<pad>text</s>",
           "a <mask>", "<mask>", "x<mask>", "<mask>x", "a\u3000<mask> b", "a\u200b<mask>", " <mask>  <mask>  ",
           "the lower", " the lower ", "▁the", "low" * 200, " " * 300, "a b " * 120]
    for _ in range(160):
        n = rng.randint(1, 9)
        out.append("".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(n)))
    return out


# ---- vocabularies --------------------------------------------------------------------------------

def byte_chars():
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    table, extra = {}, 0
    for b in range(256):
        table[b] = chr(b) if b in keep else chr(256 + extra)
        extra += b not in keep
    return table


def grow(vocab, words):
    """Merges that build the words from the left, and some that build them from the right."""
    merges = []
    for i, word in enumerate(words):
        parts = list(word)
        while len(parts) > 1:
            k = 0 if i % 2 == 0 else len(parts) - 2
            pair = (parts[k], parts[k + 1])
            if pair not in merges:
                merges.append(pair)
            vocab.setdefault(parts[k] + parts[k + 1], len(vocab))
            parts[k:k + 2] = [parts[k] + parts[k + 1]]
    return merges


def byte_level():
    table = byte_chars()
    vocab = {table[b]: b for b in range(256)}
    words = ["".join(table[c] for c in w.encode()) for w in
             ["the", " the", "er", " low", "low", "est", "hello", " world", "22", "中", "  ", "    ", "'ll", "\n\n", "русс"]]
    return vocab, grow(vocab, words)


def pieces(mark="▁", unk=True, fallback=True):
    vocab = {"<unk>": 0} if unk else {}
    if fallback:
        for b in range(256):
            vocab["<0x%02X>" % b] = len(vocab)
    for c in mark + "abcdefghijklmnopqrstuvwxyzTHIW'.,<>0123456789|_中é":
        vocab.setdefault(c, len(vocab))
    merges = grow(vocab, [mark + "the", mark + "low", "er", "est", mark * 2, "hello", "low", mark + "w", "24"])
    return vocab, merges


def added(content, number, **flags):
    row = {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False, "special": True}
    row.update(flags)
    return row


def make(model, norm=None, pre=None, dec=None, post=None, extra=(), **fields):
    vocab, merges = model
    tokens = []
    for content, flags in extra:  # one that the vocabulary has keeps its id there
        new = len(vocab) + sum(t["id"] >= len(vocab) for t in tokens)
        tokens.append(added(content, vocab.get(content, new), **flags))
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": norm,
            "pre_tokenizer": pre, "post_processor": post, "decoder": dec,
            "model": dict({"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                           "ignore_merges": False, "vocab": vocab, "merges": ["%s %s" % m for m in merges]}, **fields)}


def cases():
    bl = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    raw = dict(bl, use_regex=False)
    prefixed = dict(bl, add_prefix_space=True)
    plain = [("<s>", {}), ("</s>", {})]

    def seq(kind, *stages):
        return {"type": "Sequence", {"n": "normalizers", "p": "pretokenizers", "d": "decoders"}[kind]: list(stages)}

    def split(pattern, behavior="Isolated", invert=False, regex=True):
        return {"type": "Split", "pattern": {"Regex" if regex else "String": pattern}, "behavior": behavior,
                "invert": invert}

    yield "byte level", make(byte_level(), pre=bl, dec=bl, extra=plain)
    yield "byte level, prefix space", make(byte_level(), pre=prefixed, dec=bl, extra=plain)
    yield "byte level, no decoder", make(byte_level(), pre=bl)
    yield "ignore_merges", make(byte_level(), pre=bl, dec=bl, ignore_merges=True)
    for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"):
        yield name, make(byte_level(), norm={"type": name}, pre=bl, dec=bl, extra=plain + [("Å<x>", {"normalized": True})])
    yield "Strip both", make(byte_level(), norm={"type": "Strip", "strip_left": True, "strip_right": True}, pre=bl, dec=bl,
                             extra=plain)
    yield "Replace by regex", make(byte_level(), pre=bl, dec=bl, norm={"type": "Replace", "pattern": {"Regex": "\\s+"},
                                                                      "content": " "})
    yield "Sequence of normalizers", make(byte_level(), pre=bl, dec=bl, norm=seq(
        "n", {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Replace", "pattern": {"String": "ll"}, "content": "L"}))
    for behavior in ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        for invert in (False, True):
            yield "Split %s%s" % (behavior, " inverted" if invert else ""), make(
                byte_level(), pre=seq("p", split("\\d|[aeiou]|\\s", behavior, invert), raw), dec=bl)
        yield "Split by string %s" % behavior, make(byte_level(), pre=seq("p", split("l", behavior, False, False), raw), dec=bl)
        yield "Punctuation %s" % behavior, make(
            byte_level(), pre=seq("p", {"type": "Punctuation", "behavior": behavior}, bl), dec=bl)
    yield "Digits alone", make(byte_level(), pre=seq("p", {"type": "Digits", "individual_digits": True}, bl), dec=bl)
    yield "Digits together", make(byte_level(), pre=seq("p", {"type": "Digits", "individual_digits": False}, bl), dec=bl)
    yield "Whitespace", make(byte_level(), pre=seq("p", {"type": "Whitespace"}, raw), dec=bl)
    yield "WhitespaceSplit", make(byte_level(), pre=seq("p", {"type": "WhitespaceSplit"}, raw), dec=bl)
    yield "CharDelimiterSplit", make(byte_level(), pre=seq("p", {"type": "CharDelimiterSplit", "delimiter": "e"}, raw), dec=bl)
    yield "Qwen pattern", make(byte_level(), norm={"type": "NFC"}, dec=bl, pre=seq("p", split(
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
        "|\\s+(?!\\S)|\\s+"), raw))

    space = {"type": "Prepend", "prepend": "▁"}
    swap = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = seq("d", {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
               {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0})
    bos = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                    {"Sequence": {"id": "A", "type_id": 0}},
                                                    {"SpecialToken": {"id": "</s>", "type_id": 0}}],
           "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
           "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
                              "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}}}
    some = plain + [("<|im_start|>", {"special": False}), ("<pad>", {"special": False})]
    yield "pieces", make(pieces(), norm=seq("n", space, swap), dec=back, post=bos, extra=some, unk_token="<unk>",
                         fuse_unk=True, byte_fallback=True)
    yield "pieces without fallback, fused", make(pieces(fallback=False), norm=seq("n", space, swap), dec=back, extra=some,
                                                 unk_token="<unk>", fuse_unk=True)
    yield "pieces without fallback, not fused", make(pieces(fallback=False), norm=seq("n", space, swap), dec=back,
                                                     extra=some, unk_token="<unk>")
    yield "pieces without unknown token", make(pieces(unk=False, fallback=False), norm=seq("n", space, swap), dec=back)
    for scheme in ("always", "first", "never"):
        for cut in (True, False):
            ms = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": cut}
            yield "Metaspace %s%s" % (scheme, "" if cut else " whole"), make(
                pieces(), pre=ms, dec=seq("d", {"type": "ByteFallback"}, ms), extra=some, unk_token="<unk>",
                fuse_unk=True, byte_fallback=True)
    for flags in ({"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}, {"single_word": True},
                  {"single_word": True, "lstrip": True}, {"special": False, "normalized": True}):
        yield "added token %s" % " ".join(sorted(flags)), make(
            byte_level(), norm={"type": "NFC"}, pre=bl, dec=bl, extra=plain + [("<mask>", flags), ("low", flags), ("lower", flags)])
    yield "end_of_word_suffix", make(
        ({"l": 0, "o": 1, "w": 2, "w</w>": 3, "lo": 4, "low</w>": 5, "e": 6, "r</w>": 7, "er</w>": 8, "<unk>": 9, "t": 10,
          "h": 11, "e</w>": 12}, [("l", "o"), ("lo", "w</w>"), ("e", "r</w>")]),
        pre={"type": "WhitespaceSplit"}, unk_token="<unk>", end_of_word_suffix="</w>")
    yield "continuing_subword_prefix", make(
        ({"l": 0, "##o": 1, "##w": 2, "lo": 3, "low": 4, "##e": 5, "##r": 6, "##er": 7, "<unk>": 8},
         [("l", "##o"), ("lo", "##w"), ("##e", "##r")]),
        pre={"type": "WhitespaceSplit"}, unk_token="<unk>", continuing_subword_prefix="##")


def compare(d, path, name, lines):
    ref = Tokenizer.from_file(path)
    a = d.ask(open=path)
    if a["error"]:
        return "refused: " + a["error"]
    for text in lines:
        for special in (False, True):
            want = ref.encode(text, add_special_tokens=special).ids
            got = d.ask(hex=text.encode().hex(), special=special)
            if got.get("error") or got["ids"] != want:
                return "%r: %s instead of %s" % (text[:80], got.get("ids", got.get("error")), want)
        for key, skip in (("decoded", False), ("skipped", True)):
            text_out = ref.decode(want, skip_special_tokens=skip)
            if got[key] != text_out:
                return "%r: %s %r instead of %r" % (text[:80], key, got[key][:80], text_out[:80])
        if got["streamed"] != got["decoded"] and "\ufffd" not in got["decoded"]:
            return "%r: streamed %r instead of %r" % (text[:80], got["streamed"][:80], got["decoded"][:80])
    return None


def three_forms(d, folder):
    """Merges as strings, as pairs, and as pairs with a token that holds a space."""
    base = make(byte_level(), pre={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True})
    pairs = json.loads(json.dumps(base))
    pairs["model"]["merges"] = [m.split(" ") for m in base["model"]["merges"]]
    spaced = make(({"a": 0, " ": 1, "b": 2, "a b": 3, "a ": 4}, []))
    spaced["model"]["merges"] = [["a", " "], ["a ", "b"]]
    out = []
    for i, j in enumerate((base, pairs, spaced)):
        path = os.path.join(folder, "form%d.json" % i)
        json.dump(j, open(path, "w"))
        out.append(compare(d, path, "", texts()[:60] if i < 2 else ["a b", "aab", "a  b a b"]))
    report("merges in three forms", next((x for x in out if x), None))


def main():
    d = Driver(build_driver())
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, j) in enumerate(cases()):
            path = os.path.join(folder, "%d.json" % i)
            with open(path, "w") as f:
                json.dump(j, f, ensure_ascii=False)
            report(name, compare(d, path, name, texts()))
        three_forms(d, folder)
        real = [os.path.join(ROOT, "models/millet-7m/tokenizer.json")] + [
            x for x in os.environ.get("TOKENIZERS", "").split(":") if x]
        for path in real:
            if os.path.exists(path):
                report(os.path.relpath(path, ROOT), compare(d, path, path, texts()))
    if d.close() != 0:
        report("driver ends well", "exit status not 0")
    sys.exit(bad != 0)


if __name__ == "__main__":
    main()

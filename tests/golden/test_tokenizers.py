#!/usr/bin/env python3
"""Tokenizers against the Hugging Face library `tokenizers`, live: ids, decoded text and streamed text.

Small vocabularies are trained by hand below; around them stand all the normalizers, pre-tokenizers, decoders,
post-processors and flags of added tokens that tare knows, in many combinations. The texts are chosen to hit the
borders: spaces of all kinds, digits, combining marks, emoji sequences, look-alikes of special and byte tokens.
TOKENIZERS=FILE:FILE... adds real tokenizer.json files. The program tok_lines.c is built against libtare.a."""
import base64
import json
import os
import random
import subprocess
import sys
import tempfile
import zlib

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
         "</s>", "[UNK]", "[CLS]", "##er", "ÀÉ", "ΑΣ", "ậ…", "\u00aa\u0300", "a\u0300\u0301", "ἐνθάδ᾽", "ﬀ", "㍿", "\u0600a",
         "\U000323a0", "\U00010d50", "\u1c89", "\u32ff", "\U0001e030", "\uFFFD", "\ufeff", "ー", "カタカナ", "。", "①、ひ〇々", "don 't .",
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


def unigram(fallback=False):
    """Scores that leave ties, a fused unknown run, and pieces that overlap."""
    vocab = [["<unk>", 0.0], ["▁", -2.0], ["▁the", -3.5], ["▁low", -4.25], ["er", -3.0], ["est", -3.75], ["lower", -9.0],
             ["▁lower", -7.25], ["the", -4.0], ["hello", -6.5], ["▁▁", -2.5], ["ab", -3.0], ["ba", -3.0], ["▁w", -3.25],
             ["中", -5.5], ["中文", -6.0], ["é", -4.5], ["24", -4.75], ["<s>", -1.0]]
    vocab += [[c, -4.0 - 0.125 * i] for i, c in enumerate("abcdefghijklmnopqrstuvwxyzTH'.,012345|")]
    if fallback:
        vocab += [["<0x%02X>" % b, -12.0] for b in range(256)]
    return {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": fallback}


def word_pieces(words=True):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "low", "##er", "##est", "lower", "hello", "world", "new", "##ew",
             "##w", "don", "'", "t", "##t", ".", "中", "文", "##文", "naive", "strasse", "x", "##1", "##2", "a", "##a", "##b", "i", "ll",
             "ß", "е", "##ж"] + list("bcdefghjklmnopqrsuvwyz") + ["##" + c for c in "cdefghijklmnopqrsuvxyz"]
    vocab = {}
    for n in names:
        vocab.setdefault(n, len(vocab))
    return {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 12, "vocab": vocab}


def other_model(model, vocab_names, **rest):
    """A tokenizer of another model than BPE; vocab_names: what the vocabulary holds, for ids of added tokens."""
    j = make((vocab_names, []), **rest)
    j["model"] = model
    return j


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


# A character map with rules of several lengths, an empty one and one of three characters, as a SentencePiece trainer
# wrote it (zlib, base64): a b; a+0300 C; 00AA A; A+e E; c+d+e F; CR G; 0600 H; 0915 I; 00A9 (c); 00C0 a; 00E9 nothing;
# 1100 J; 2026 ...; 1FBD space+0313.
CHARSMAPS = {"own rules": base64.b64encode(zlib.decompress(base64.b64decode(
    "eJwl02dsllUUAODzNfUHxsYYS4whxpKAtqCfMtSyXMVa615QREA7sBjAvUU/pYq4UNtqwcUo1RZk2bqgFYvCD6pC3Fq1dYZERRQREZXnlR9Pzn"
    "nPeU9yk3tuZEfEMREHNqSi6oCIQyIyfcmcEJHTJ+JI+cFUJv3DJdMiDhWa9VpuizCSyeEIIpmTHCY2lmVFvWYykvFvTXZW9JO366fEJrVMXVYk"
    "ob/BPJrfiujIzYqB8gEczVEUkM9gBnHs/iPHcaQZwvEMYyiOHsM5iRMZQSGjGMkYRnMKJ3Map1LE6ZzBWM6kmLMo4WxKOZdzOJ/zuJALuJiLuJ"
    "RLGM84JlDGRC5jEpczhclcyRVUUE4VlVzF1KSeG1Gd/NeWiqvFGUznGmZyHddyA9dzEzdyCzfjmuJW7uB2ZnEnd3MX98T+y5vNvdxHDXO4n7k8"
    "wEM8yCM8zDwe5XEeo5YnqKeOp3iS+TTwNAt4lmd4nudYxEKWsJilNPICTTTzIsto4SWWs5IVrGYVL7OGNlp5lVd4nddYyxu0s4436cDaxXo20M"
    "k7vM0mNib1g1LR2ZqKzfKuwlS8m0Te5z22soUP+NR2fyR+yCd8zGf/1yO+4HO+pJuv+YpeeviWb/ie7/iRH9iW1LtT0UtPdSp+9v0T2/mFHfzK"
    "7/zGH+zkT3bxF7v5mz38w17+418ir6s28isKIp1OewxFHkCx5S+x+KWWszz2AakvnQk="))).decode()}
CLASSES = [r"\p{L}+", r"\p{N}", r"\p{M}", r"[^\s\p{L}\p{N}]+", r"\w+", r"\W", r"\d", r"[\w']+", r"\b", r"^.", r".$", r"\p{Han}+", r"[\p{Hiragana}\p{Latin}]+", r"\P{Han}", r"\p{^Cyrillic}+", r"[[:punct:]]",
           r"[[:alpha:]]+", r"\s+(?!\S)|\s+", "(?i:ſ|k|ß)", r"\h+", r"\p{Lu}\p{Ll}+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r"\p{N}{1,3}+", r"[\p{L}&&[^\p{Han}]]+", r"[^a-z&&[^aeiou]]+", r"[a-f[x-z]0-9]+",
           r"[^a-f[x-z]]+", r"[[:alpha:]&&[a-m]]+", r"[\u4e00-\u9fff]+|\u0061", "(?m:t.*)", r"\H+", r"[\H]+", r"[\v\t]+", "l{,2}", r"[\w]", r"[\Wa]", r"[^\W\d]+"]


def model_cases():
    """The models beside BPE, and the stages that go with them."""
    ms = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    marks = [("<mask>", {"lstrip": True}), ("<pad>", {})]
    for fallback in (False, True):
        model = unigram(fallback)
        names = {v[0]: i for i, v in enumerate(model["vocab"])}
        title = "Unigram%s" % (", byte fallback" if fallback else "")
        yield title, other_model(model, names, norm={"type": "Nmt"}, pre=ms, dec=ms, extra=marks)
        yield title + ", whole text", other_model(model, names, pre=dict(ms, split=False), dec={"type": "Sequence", "decoders": [
            {"type": "ByteFallback"}, ms]}, extra=marks)
    model = unigram()
    names = {v[0]: i for i, v in enumerate(model["vocab"])}
    model["unk_id"] = None
    yield "Unigram without unknown token", other_model(model, names, pre=ms, dec=ms)
    for title, rules in CHARSMAPS.items():
        yield "Precompiled, %s" % title, other_model(unigram(), names, norm={"type": "Precompiled", "precompiled_charsmap": rules},
                                                     pre=ms, dec=ms, extra=marks)
    piece = word_pieces()
    bert = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    cls = {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}
    special = [(x, {}) for x in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")]
    for cleanup in (True, False):
        yield "BERT%s" % ("" if cleanup else ", no cleanup"), other_model(
            piece, piece["vocab"], norm=bert, pre={"type": "BertPreTokenizer"}, dec={"type": "WordPiece", "prefix": "##", "cleanup": cleanup},
            post=cls, extra=special)
    for key in ("clean_text", "handle_chinese_chars", "lowercase"):
        yield "BertNormalizer without %s" % key, other_model(
            piece, piece["vocab"], norm=dict(bert, **{key: False}), pre={"type": "BertPreTokenizer"}, dec={"type": "WordPiece", "prefix": "##", "cleanup": True}, extra=special)
    for accents in (True, False):
        yield "BertNormalizer, strip_accents %s" % accents, other_model(
            piece, piece["vocab"], norm=dict(bert, strip_accents=accents, lowercase=not accents), pre={"type": "BertPreTokenizer"}, extra=special)
    roberta = {"type": "RobertaProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2], "trim_offsets": True, "add_prefix_space": True}
    yield "WordPiece, Whitespace", other_model(dict(piece, max_input_chars_per_word=100, continuing_subword_prefix="", unk_token="[PAD]"), piece["vocab"],
                                               norm={"type": "Lowercase"}, pre={"type": "Whitespace"}, post=roberta, extra=special)
    missing = {k: v for k, v in piece["vocab"].items() if k != "[UNK]"}
    yield "WordPiece without unknown token", other_model(dict(piece, vocab=missing), missing, norm={"type": "Lowercase"}, pre={"type": "Whitespace"})
    level = {"type": "WordLevel", "vocab": piece["vocab"], "unk_token": "[UNK]"}
    for unk in ("[UNK]", "<none>"):
        yield "WordLevel, %s" % unk, other_model(dict(level, unk_token=unk), piece["vocab"], norm={"type": "Lowercase"}, pre={"type": "Whitespace"},
                                                 dec={"type": "Fuse"})
    spell = {"type": "WordLevel", "vocab": {c: i for i, c in enumerate("abcdehlotw'.!?, |xr")}, "unk_token": "x"}
    each = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    for cleanup in (True, False):
        yield "CTC%s" % ("" if cleanup else ", no cleanup"), other_model(
            spell, spell["vocab"], pre=each, dec={"type": "CTC", "pad_token": "x", "word_delimiter_token": "|", "cleanup": cleanup})
    yield "BPEDecoder", other_model({"type": "WordLevel", "unk_token": "u", "vocab": {"l": 0, "lo</w>": 1, "w</w>": 2, "u": 3, "</w>": 4}}, {}, pre={
        "type": "WhitespaceSplit"}, norm={"type": "Replace", "pattern": {"Regex": "[aeiou]"}, "content": "o</w> "}, dec={"type": "BPEDecoder", "suffix": "</w>"})
    raw = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

    def pre(*stages):
        return {"type": "Sequence", "pretokenizers": list(stages) + [raw]}
    yield "UnicodeScripts", make(byte_level(), pre=pre({"type": "UnicodeScripts"}), dec=raw)
    for length in (1, 3, None):
        yield "FixedLength %s" % length, make(byte_level(), dec=raw, pre=pre(
            {"type": "FixedLength", "length": length} if length else {"type": "FixedLength"}))
    yield "BertPreTokenizer", make(byte_level(), pre=pre({"type": "BertPreTokenizer"}), dec=raw)
    yield "Punctuation, no behavior", make(byte_level(), pre=pre({"type": "Punctuation"}), dec=raw)
    yield "ByteLevel normalizer", make(byte_level(), norm={"type": "ByteLevel"}, dec=raw, extra=[("é<x>", {"special": False, "normalized": True})])
    yield "NFD and StripAccents", make(byte_level(), norm={"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}, pre=raw, dec=raw)
    for left, right in ((True, False), (False, True)):
        yield "Strip left %s right %s" % (left, right), make(byte_level(), norm={"type": "Strip", "strip_left": left, "strip_right": right}, pre=raw, dec=raw)
    for pattern in CLASSES:
        yield "Split by %s" % pattern, make(byte_level(), pre=pre({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}), dec=raw)
    plain = {"type": "WordLevel", "unk_token": "unk", "vocab": {"unk": 0, "hello": 1, "lower": 2, "Hello": 3, "3": 4, "o": 5}}
    strip = {"type": "Strip", "content": "r", "start": 0, "stop": 2}  # the library does not survive a token of nothing but that
    for stage in (strip, dict(strip, content="h", start=1, stop=0), {"type": "Sequence", "decoders": [{"type": "Fuse"}, dict(strip, content="h", start=1, stop=0)]}):
        yield "decoder Strip %s" % json.dumps(stage)[:90], other_model(plain, plain["vocab"], pre={"type": "Whitespace"}, dec=stage)
    both = {"type": "Sequence", "processors": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
                                               dict(roberta, sep=["</s>", 257], cls=["<s>", 256])]}
    yield "post-processors in sequence", make(byte_level(), pre=raw, dec=raw, post=both, extra=[("<s>", {}), ("</s>", {})])
    for prefix, scheme in ((True, {}), (True, {"prepend_scheme": "always"}), (False, {"prepend_scheme": "never"})):
        ms = dict({"type": "Metaspace", "replacement": "▁", "add_prefix_space": prefix}, **scheme)
        yield "Metaspace of old files, add_prefix_space %s %s" % (prefix, list(scheme.values())), make(
            pieces(), pre=ms, dec=ms, unk_token="<unk>", byte_fallback=True)
    lower = {"type": "Lowercase"}
    for flags in ({"special": True, "normalized": True}, {"special": False, "normalized": True}):
        yield "added token %s, lowered" % sorted(k for k in flags if flags[k]), make(
            byte_level(), norm=lower, pre=raw, dec=raw, extra=[("<MASK>", flags), ("<s>", flags)])


def library(ask):
    """Answer of the library, or its error."""
    try:
        return ask(), None
    except Exception as e:  # its errors are plain Exceptions
        return None, str(e)


def compare_text(d, ref, text):
    want = None
    for special in (False, True):
        for literal in (False, True):
            ref.encode_special_tokens = literal
            want, refused = library(lambda: ref.encode(text, add_special_tokens=special).ids)
            got = d.ask(hex=text.encode().hex(), special=special, literal=literal)
            if refused:
                if not got.get("error"):
                    return "%r: %s, the library says %s" % (text[:80], got["ids"], refused)
            elif got.get("error") or got["ids"] != want:
                return "%r%s: %s instead of %s" % (text[:80], " literal" if literal else "", got.get("ids", got.get("error")), want)
    if want is None:
        return None
    for key, skip in (("decoded", False), ("skipped", True)):
        text_out = ref.decode(want, skip_special_tokens=skip)
        if got[key] != text_out:
            return "%r: %s %r instead of %r" % (text[:80], key, got[key][:80], text_out[:80])
    if got["streamed"] != got["decoded"] and "\ufffd" not in got["decoded"]:
        return "%r: streamed %r instead of %r" % (text[:80], got["streamed"][:80], got["decoded"][:80])
    return None


def compare(d, path, name, lines):
    ref = Tokenizer.from_file(path)
    a = d.ask(open=path)
    if a["error"]:
        return "refused: " + a["error"]
    return next((x for x in (compare_text(d, ref, t) for t in lines) if x), None)


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
        for i, (name, j) in enumerate(list(cases()) + list(model_cases())):
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

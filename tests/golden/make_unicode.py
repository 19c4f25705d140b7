#!/usr/bin/env python3
"""Writes src/text/tok_unicode.def and docs/UNICODE.md: what the library `tokenizers` takes each code point for,
asked through its own normalizers, pre-tokenizers and regular expressions, and where PCRE2 and utf8proc (the shared
libraries installed here) say something else. Takes about ten minutes: make_unicode.py"""
import ctypes
import ctypes.util
import os
import unicodedata

import tokenizers
from tokenizers import Regex, normalizers as N, pre_tokenizers as P

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ALL = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
# In the order of utf8proc_category_t.
CATEGORIES = "Cn Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co".split()
FORMS = {"NFC": 8, "NFD": 16, "NFKC": 12, "NFKD": 20}  # options of utf8proc_map
utf8proc = ctypes.CDLL(ctypes.util.find_library("utf8proc"))
pcre2 = ctypes.CDLL(ctypes.util.find_library("pcre2-8"))
libc = ctypes.CDLL(None)
utf8proc.utf8proc_map.restype = ctypes.c_ssize_t
utf8proc.utf8proc_version.restype = utf8proc.utf8proc_unicode_version.restype = ctypes.c_char_p
pcre2.pcre2_compile_8.restype = pcre2.pcre2_match_data_create_8.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]


def mapped(text, options):
    out, raw = ctypes.c_void_p(), text.encode()
    n = utf8proc.utf8proc_map(raw, ctypes.c_ssize_t(len(raw)), ctypes.byref(out), ctypes.c_int(options | 2))
    got = ctypes.string_at(out, n).decode()
    libc.free(out)
    return got


def by_pcre2(pattern):
    """Code points that a class of PCRE2 holds."""
    code, at, raw = ctypes.c_int(), ctypes.c_size_t(), pattern.encode()
    re = ctypes.c_void_p(pcre2.pcre2_compile_8(raw, ctypes.c_size_t(len(raw)), ctypes.c_uint32(0x00080000 | 0x00020000),
                                               ctypes.byref(code), ctypes.byref(at), None))
    data = ctypes.c_void_p(pcre2.pcre2_match_data_create_8(ctypes.c_uint32(4), None))
    out = set()
    for c in ALL:
        raw = chr(c).encode()
        if pcre2.pcre2_match_8(re, raw, ctypes.c_size_t(len(raw)), ctypes.c_size_t(0), ctypes.c_uint32(0), data, None) > 0:
            out.add(c)
    return out


def by_regex(pattern):
    split = P.Split(Regex(pattern), "removed")
    return {c for c in ALL if not split.pre_tokenize_str(chr(c))}


def scripts():
    """Runs [lo, hi, number]; -1 for what belongs to any script. Two characters of one script are not parted."""
    ask, runs, reps, last = P.UnicodeScripts().pre_tokenize_str, [], [], None
    for c in ALL:
        if not ask(chr(c)):
            number = -1
        else:
            order = ([last] if last is not None else []) + list(range(len(reps)))
            number = next((i for i in order if len(ask(chr(reps[i]) + chr(c))) == 1), len(reps))
            if number == len(reps):
                reps.append(c)
            last = number
        if runs and runs[-1][1] == c - 1 and runs[-1][2] == number:
            runs[-1][1] = c
        else:
            runs.append([c, c, number])
    return runs


def foreign(forms):
    """What the library's Unicode forms do not know, or know otherwise than utf8proc."""
    out = {c for name, options in FORMS.items() for c in ALL if mapped(chr(c), options) != forms[name].get(c, chr(c))}
    nfd, nfc = N.NFD().normalize_str, N.NFC().normalize_str
    marks = {}
    for c in ALL:
        if unicodedata.combining(chr(c)) and (nfd(chr(c) + "\u0334") != chr(c) + "\u0334" or nfd("\u0345" + chr(c)) != "\u0345" + chr(c)):
            marks.setdefault(unicodedata.combining(chr(c)), chr(c))  # one mark of each class that the library orders
    for c in ALL:
        ordered = [f(s) != s for s in (chr(c) + "\u0334", "\u0345" + chr(c)) for f in (nfd, lambda s: mapped(s, 16))]
        if any(ordered) and any(mapped(s, 16) != nfd(s) for m in marks.values() for s in (chr(c) + m, m + chr(c))):
            out.add(c)
    pairs = {mapped(chr(c), 16) for c in ALL} | set(forms["NFD"].values())
    for p in pairs:  # the parts of a composition that the library does not make
        if len(p) > 1 and not set(map(ord, p)) & out and mapped(p, 8) != nfc(p):
            out.update(map(ord, p))
    return out


def answers():
    """What the library says, by name: sets of code points, maps from a code point to text, runs of scripts."""
    a = {}
    for name, ask in (("lower", N.Lowercase()), ("NFC", N.NFC()), ("NFD", N.NFD()), ("NFKC", N.NFKC()), ("NFKD", N.NFKD())):
        a[name] = {c: to for c in ALL if (to := ask.normalize_str(chr(c))) != chr(c)}
    words, digits, punct = P.Whitespace(), P.Digits(True), P.Punctuation("removed")
    a["word"] = {c for c in ALL if [x[0] for x in words.pre_tokenize_str("a" + chr(c))] == ["a" + chr(c)]}
    a["numeric"] = {c for c in ALL if len(digits.pre_tokenize_str("a" + chr(c))) == 2}
    a["punct"] = {c for c in ALL if not punct.pre_tokenize_str(chr(c))}
    off = {"clean_text": False, "handle_chinese_chars": False, "strip_accents": False, "lowercase": False}
    clean, accents, marks = N.BertNormalizer(**dict(off, clean_text=True)), N.BertNormalizer(**dict(off, strip_accents=True)), N.StripAccents()
    a["other"] = {c for c in ALL if clean.normalize_str("a" + chr(c) + "b") == "ab" and c not in (0, 0xFFFD)}
    a["nonspacing"] = {c for c in ALL if not accents.normalize_str(chr(c))}
    a["combining"] = {c for c in ALL if not marks.normalize_str(chr(c))}
    a["script"] = scripts()
    a["foreign"] = foreign(a)
    for g in CATEGORIES:
        if g != "Cs":
            a["re_" + g] = by_regex(r"\p{%s}" % g)
    a["re_Han"] = by_regex(r"\p{Han}")
    return a


# ---- tables --------------------------------------------------------------------------------------

def runs(codes):
    out = []
    for c in sorted(codes):
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def wrapped(items, width=98):
    line, lines = "   ", []
    for x in items:
        if len(line) + len(x) + 2 > width:
            lines.append(line)
            line = "   "
        line += " " + x + ","
    return "\n".join(lines + [line])


def pairs(name, codes):
    return "static const uint32_t %s_pairs[] = {\n%s};\n" % (name, wrapped("0x%X, 0x%X" % tuple(r) for r in runs(codes)))


def lower_rows(lower):
    """Where utf8proc's lower case differs: runs of equal distance, step 0 for a single target."""
    rows = []
    for c in ALL:
        to = lower.get(c, chr(c))
        if to == chr(utf8proc.utf8proc_tolower(c)):
            continue
        second = ord(to[1]) if len(to) > 1 else 0
        if rows and rows[-1][1] == c - 1 and not second and not rows[-1][4] and rows[-1][2] + c - rows[-1][0] == ord(to[0]):
            rows[-1][1], rows[-1][3] = c, 1
        else:
            rows.append([c, c, ord(to[0]), 0, second])
    return rows


def category_rows(a):
    """Where the library's regular expressions and PCRE2's put a code point into another category."""
    theirs, ours, rows = {}, {}, []
    for g in CATEGORIES:
        if g == "Cs":
            continue
        theirs.update((c, g) for c in a["re_" + g])
        ours.update((c, g) for c in by_pcre2(r"\p{%s}" % g))
    ours_han = by_pcre2(r"\p{sc:Han}")
    for c in ALL:
        if theirs[c] == ours[c] and (c in a["re_Han"]) == (c in ours_han):
            continue
        key = (theirs[c], ours[c], c in a["re_Han"])
        if rows and rows[-1][1] == c - 1 and rows[-1][2] == key:
            rows[-1][1] = c
        else:
            rows.append([c, c, key])
    low = [r for r in rows if r[0] < 0x800 or 0x4000 <= r[0] <= 0x9FFF]
    if low:
        raise SystemExit("tok__stand_in passes over %r" % low)
    return rows, ours


def stand_ins(ours, han, length):
    lo, hi = {3: (0x800, 0xFFFF), 4: (0x10000, 0x10FFFF)}[length]
    first = {}
    for c in ALL:
        if lo <= c <= hi and c not in han:
            first.setdefault(ours[c], c)
    return [first.get(g, 0) for g in CATEGORIES]


def write_def(a, rows, ours):
    head = ("/* Written by tests/golden/make_unicode.py from what tokenizers %s answers; not to be edited. */\n"
            "/* clang-format off */\n" % tokenizers.__version__)
    common = max(set(r[2] for r in a["script"]), key=lambda s: sum(r[2] == s for r in a["script"]))
    with open(os.path.join(ROOT, "src/text/tok_unicode.def"), "w") as f:
        f.write(head)
        for name in ("word", "numeric", "punct", "other", "nonspacing", "combining", "foreign"):
            f.write(pairs(name, a[name]))
        f.write("static const shift lower_shifts[] = {\n%s};\n" % wrapped(
            "{0x%X, 0x%X, 0x%X, %d, 0x%X}" % tuple(r) for r in lower_rows(a["lower"])))
        f.write("#define SCRIPT_OF_THE_REST %d\nstatic const script_range script_ranges[] = {\n%s};\n" % (common, wrapped(
            "{0x%X, 0x%X, %d}" % tuple(r) for r in a["script"] if r[2] != common)))
        f.write("static const category_range category_ranges[] = {\n%s};\n" % wrapped(
            "{0x%X, 0x%X, %d, %s}" % (lo, hi, CATEGORIES.index(k[0]), "true" if k[2] else "false") for lo, hi, k in rows))
        f.write("static const uint32_t stand_ins[2][%d] = {\n" % len(CATEGORIES))
        for length in (3, 4):
            f.write("    {\n%s},\n" % wrapped("0x%X" % c for c in stand_ins(ours, a["re_Han"], length)))
        f.write("};\n/* clang-format on */\n")


# ---- document ------------------------------------------------------------------------------------

def listed(codes):
    return " ".join("%X" % lo if lo == hi else "%X-%X" % (lo, hi) for lo, hi in runs(codes)) or "none"


def write_doc(a, rows):
    version = ctypes.create_string_buffer(64)
    pcre2.pcre2_config_8(ctypes.c_uint32(11), version)
    uni = ctypes.create_string_buffer(64)
    pcre2.pcre2_config_8(ctypes.c_uint32(10), uni)
    with open(os.path.join(ROOT, "docs/UNICODE.md"), "w") as f:
        f.write("""# Unicode versions

Written by `python3 tests/golden/make_unicode.py` (about ten minutes), which asks the libraries themselves.

Token ids depend on what a character is taken for, and the library that models were trained with (`tokenizers` %s) mixes several
versions of Unicode. tare matches with PCRE2 %s (Unicode %s) and normalizes with utf8proc %s (Unicode %s).
Where they differ the library's answer counts. The tables in `src/text/tok_unicode.def` close every difference listed here:

| what | in the library | in tare |
|---|---|---|
| categories and \\p{Han} in regular expressions | Oniguruma, Unicode 16 | PCRE2; the text is matched in a copy in which each character below is replaced by an old one of the same category, length and Han or not |
| \\w of `Whitespace` and `single_word` | crate regex | table |
| `Digits` | Rust's `is_numeric` | table |
| `Punctuation`, `BertPreTokenizer`, `BertNormalizer` | crate unicode_categories, Unicode 8 | tables |
| `StripAccents`, NFC, NFD, NFKC, NFKD | crate unicode-normalization-alignments, Unicode 12 | table of marks; utf8proc, the text parted at characters that the library does not know |
| `Lowercase` | Rust, Unicode 17 | utf8proc and the differences |
| `UnicodeScripts` | a table of its own | table |

What remains: `[[:alpha:]]` is PCRE2's property Alphabetic (marks such as 363-36F have it only since Unicode 16); a regular expression that
names a script other than Han (`\\p{Cyrillic}` …) sees PCRE2's script for characters added
since; one that names a script younger than PCRE2's Unicode is refused; grapheme clusters in `Precompiled` are utf8proc's
(Unicode 15: no rule for Indic conjuncts, which matters only behind a cluster of three bytes and more).

## Categories in regular expressions

Code points, by the library's category and PCRE2's.

| library | PCRE2 | Han | code points |
|---|---|---|---|
""" .replace("\\\\", "\\") % (tokenizers.__version__, version.value.decode().split()[0], uni.value.decode(),
                 utf8proc.utf8proc_version().decode(), utf8proc.utf8proc_unicode_version().decode()))
        groups = {}
        for lo, hi, key in rows:
            groups.setdefault(key, set()).update(range(lo, hi + 1))
        for (theirs, ours, han), codes in sorted(groups.items()):
            f.write("| %s | %s | %s | %s |\n" % (theirs, ours, "yes" if han else "", listed(codes)))
        f.write("\n## Other differences\n\n| property | utf8proc only | library only |\n|---|---|---|\n")
        mine = {}
        for c in ALL:
            mine.setdefault(CATEGORIES[utf8proc.utf8proc_category(c)], set()).add(c)

        def of(*names):
            return set().union(*(mine.get(n, set()) for n in names))
        ascii_punct = {c for c in range(128) if chr(c) in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"}
        for title, name, codes in (
                ("\\w (L, M, Nd, Nl, Pc; joiners and Other_Alphabetic are the library's alone)", "word",
                 of("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "Pc")),
                ("numeric (N)", "numeric", of("Nd", "Nl", "No")),
                ("punctuation (P and ASCII)", "punct", of("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po") | ascii_punct),
                ("control, format, private (Cc, Cf, Co)", "other", of("Cc", "Cf", "Co") - {0, 9, 10, 13}),
                ("nonspacing marks (Mn)", "nonspacing", of("Mn")), ("marks (M)", "combining", of("Mn", "Mc", "Me"))):
            f.write("| %s | %s | %s |\n" % (title.replace("\\", "\\"), listed(codes - a[name]), listed(a[name] - codes)))
        f.write("\n## Unicode forms\n\nCharacters with a decomposition or a combining class that the library does not know: %s\n" % listed(a["foreign"]))
        f.write("\n## Lower case\n\nutf8proc has another lower case, or none, for: %s\n" % listed(
            c for lo, hi, *_ in lower_rows(a["lower"]) for c in range(lo, hi + 1)))


def main():
    a = answers()
    rows, ours = category_rows(a)
    write_def(a, rows, ours)
    write_doc(a, rows)


if __name__ == "__main__":
    main()

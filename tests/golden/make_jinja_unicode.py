#!/usr/bin/env python3
"""Writes src/text/jinja_unicode.def: what Python's strings know of code points beyond general categories and one-to-one
case mappings (which the program takes from utf8proc). Run with Python 3.11 (Unicode 14); code points that this Python
does not know are left to utf8proc."""
import ctypes
import pathlib
import sys
import unicodedata

lib = ctypes.CDLL("libutf8proc.so.2")
for f in ("utf8proc_toupper", "utf8proc_tolower", "utf8proc_totitle"):
    getattr(lib, f).argtypes = [ctypes.c_int32]
    getattr(lib, f).restype = ctypes.c_int32
POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000 and unicodedata.category(chr(c)) != "Cn"]


def ranges(test):
    out = []
    for c in POINTS:
        if test(chr(c)):
            if out and out[-1][1] == c - 1:
                out[-1][1] = c
            else:
                out.append([c, c])
    return out


def mappings(full, simple):
    return [(c, [ord(x) for x in full(chr(c))]) for c in POINTS
            if [ord(x) for x in full(chr(c))] != [getattr(lib, simple)(c) if simple else c]]


def ignorable(c):
    """A capital sigma at the end of a word looks past it. Nearly a matter of categories: the table has what differs."""
    return ("a" + c + "Σ").lower()[-1] == "ς" and ("." + c + "Σ").lower()[-1] == "σ"


def main():
    path = pathlib.Path(__file__).resolve().parent.parent.parent / "src" / "text" / "jinja_unicode.def"
    lines = ["/* Made by tests/golden/make_jinja_unicode.py from Python %d.%d, Unicode %s. Macros:" % (*sys.version_info[:2], unicodedata.unidata_version),
             " * R(set, first, last) a range of a set; M(kind, from, to, to, to) a mapping, 0 = nothing. */"]
    sets = {"DIGIT": lambda c: c.isdigit() and unicodedata.category(c) != "Nd",
            "NUMERIC": lambda c: c.isnumeric() and unicodedata.category(c) not in ("Nd", "Nl", "No"),
            "LOWER": lambda c: c.islower() and unicodedata.category(c) != "Ll",
            "UPPER": lambda c: c.isupper() and unicodedata.category(c) != "Lu",
            "IGNORABLE": lambda c: ignorable(c) != (unicodedata.category(c) in ("Mn", "Me", "Cf", "Lm", "Sk"))}
    for name, test in sets.items():
        lines += ["R(%s, 0x%x, 0x%x)" % (name, a, b) for a, b in ranges(test)]
    for kind, full, simple in (("UPPER", str.upper, "utf8proc_toupper"), ("LOWER", str.lower, "utf8proc_tolower"),
                               ("TITLE", str.title, "utf8proc_totitle")):
        lines += ["M(%s, 0x%x, %s)" % (kind, c, ", ".join("0x%x" % x for x in (to + [0, 0])[:3])) for c, to in mappings(full, simple)]
    path.write_text("\n".join(lines) + "\n")
    print(len(lines), "lines")


main()

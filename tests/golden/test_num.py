#!/usr/bin/env python3
"""The committed codec vectors are what the installed ml_dtypes computes today, section by section.
The C side of the comparison is tests/unit/test_num_codecs.c, which reads the same file."""
import struct
import sys

import make_num_golden as golden


def sections(data):
    at, out = 8, {}
    while at < len(data):
        name, kind, count = struct.unpack_from("<16sII", data, at)
        out[name.rstrip(b"\0").decode(), kind] = data[at + 24 : at + 24 + 8 * count]
        at += 24 + 8 * count
    return out


def main():
    with open(golden.PATH, "rb") as f:
        stored = sections(f.read())
    now = sections(golden.build())
    bad = 0
    for key in sorted(set(stored) | set(now)):
        same = stored.get(key) == now.get(key)
        bad += not same
        print("ok" if same else "FAIL", "num_golden_%s_%s" % (key[0], "encode" if key[1] else "decode"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

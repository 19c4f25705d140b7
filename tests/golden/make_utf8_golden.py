#!/usr/bin/env python3
"""Byte strings and their decoding by Python, for tests/unit/test_base_utf8.c.

Writes tests/fixtures/base/utf8.bin: records of uint8 n, n bytes, uint16 (little endian) m, m bytes;
the second is the first decoded with errors="replace" and encoded again.
"""
import os
import struct


def strings():
    interesting = [0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF,
                   0xE0, 0xE1, 0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xF8, 0xFF]
    for a in interesting:
        yield bytes([a])
        for b in interesting:
            yield bytes([a, b])
            yield bytes([a, b, 0x80])
            yield bytes([a, b, 0xBF, 0x80])
            yield bytes([a, b, 0x41])
    s = 12345
    for _ in range(2000):
        s = (s * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        n, out = 1 + (s >> 40) % 24, []
        for _ in range(n):
            s = (s * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
            out.append(interesting[(s >> 33) % 26] if s >> 20 & 1 else (s >> 33) & 255)
        yield bytes(out)
    for text in ["héllo wörld", "日本語", "🦊🏳️‍🌈", "\U0010ffff\ud7ff\ue000"]:
        raw = text.encode()
        for cut in range(1, len(raw) + 1):
            yield raw[:cut]


def build():
    out = b""
    for s in strings():
        d = s.decode("utf-8", "replace").encode()
        out += struct.pack("<B", len(s)) + s + struct.pack("<H", len(d)) + d
    return out


PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "base", "utf8.bin")

if __name__ == "__main__":
    with open(PATH, "wb") as f:
        f.write(build())
    print("wrote", os.path.normpath(PATH), os.path.getsize(PATH), "bytes")

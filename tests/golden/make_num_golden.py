#!/usr/bin/env python3
"""Golden vectors of the element codecs, computed with ml_dtypes and numpy only.

    make_num_golden.py            writes tests/fixtures/num/golden.bin
    build(), as a module          the same bytes, for test_num.py

Layout, little endian: 8 bytes "TNUM1\\0\\0\\0", then sections up to the end of the file:
    char name[16]      element type of src/num/dtypes.def, NUL padded
    uint32 kind        0 = decode pairs (code, float32 bits), 1 = encode pairs (float32 bits, code)
    uint32 count
    uint32 pairs[count][2]
Values are clamped to the largest finite value before the cast: that is the saturation that tare
promises for types of 8 bits and less. NaN is compared as NaN, not by payload.
"""
import os
import struct
import warnings
from fractions import Fraction

import ml_dtypes
import numpy as np

warnings.simplefilter("ignore")

SMALL = {  # name: (ml_dtypes type, bits, largest finite value, has NaN)
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, 8, 448.0, True),
    "fp8_e5m2": (ml_dtypes.float8_e5m2, 8, 57344.0, True),
    "fp8_e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 8, 240.0, True),
    "fp4": (ml_dtypes.float4_e2m1fn, 4, 6.0, False),
}
NF4 = np.array(
    [-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1], np.float32)


def bits(x):
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def section(name, kind, a, b):
    pairs = np.stack([np.asarray(a, np.uint32), np.asarray(b, np.uint32)], 1)
    return struct.pack("<16sII", name.encode(), kind, len(pairs)) + pairs.astype("<u4").tobytes()


def noise(n, seed, lo, hi):
    """Floats of both signs, uniform in exponent between 2^lo and 2^hi; a plain LCG, so that the
    bytes do not depend on the numpy version."""
    s, out = seed, np.empty(n, np.float64)
    for i in range(n):
        s = (s * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        u, sign = (s >> 33) / 2**31, -1 if s >> 20 & 1 else 1
        s = (s * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        out[i] = sign * (1 + (s >> 33) / 2**31) * 2.0 ** np.floor(lo + u * (hi - lo))
    return out.astype(np.float32)


def around(values):
    """The midpoints of neighbouring values and the floats next to them, both signs."""
    v = np.unique(np.abs(values[np.isfinite(values)]).astype(np.float64))
    mid = ((v[1:] + v[:-1]) / 2).astype(np.float32)
    inf = np.float32(np.inf)
    x = np.concatenate([mid, np.nextafter(mid, inf), np.nextafter(mid, -inf), v.astype(np.float32)])
    return np.concatenate([x, -x])


EDGES = np.array([0.0, -0.0, np.inf, -np.inf, 3e38, -3e38, 1e-45, -1e-45, 1e-30, 464, 465, 61439,
                  61440, 65519, 65520, 1e9], np.float32)


def small_floats(name):
    t, nbits, top, has_nan = SMALL[name]
    codes = np.arange(1 << nbits, dtype=np.uint8)
    values = codes.view(t).astype(np.float32)
    x = np.concatenate([around(values), EDGES, noise(600, 1 + nbits, -20, 18)])
    if has_nan:
        x = np.append(x, np.float32(np.nan))
    enc = np.clip(x, np.float32(-top), np.float32(top)).astype(t).view(np.uint8)
    return section(name, 0, codes, bits(values)) + section(name, 1, bits(x), enc)


def e8m0():
    t = ml_dtypes.float8_e8m0fnu
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(t).astype(np.float32)
    x = np.abs(np.concatenate([around(values[1:]), noise(600, 77, -125, 127)]))
    x = x[(x >= 2.0**-126) & (x < 1.5 * 2.0**127)]  # above, ml_dtypes gives NaN instead of saturating
    x = np.append(x, np.float32(np.nan))
    return section("e8m0", 0, codes, bits(values)) + section("e8m0", 1, bits(x),
                                                            x.astype(t).view(np.uint8))


def half(name, t):
    x = np.concatenate([EDGES, noise(1500, 99, -27, 17), noise(500, 100, -140, 127)])
    return section(name, 1, bits(x), x.astype(t).view(np.uint16))


def integers(nbits):
    lo, hi = -(1 << (nbits - 1)), (1 << (nbits - 1)) - 1
    mask = (1 << nbits) - 1
    codes = np.arange(1 << nbits)
    values = np.where(codes > hi, codes - (1 << nbits), codes)
    if nbits in (2, 4):  # the same table from ml_dtypes
        t = {2: ml_dtypes.int2, 4: ml_dtypes.int4}[nbits]
        again = codes.astype(np.uint8).view(t).astype(np.int32)
        assert (again == values).all()
    half_steps = np.arange(2 * lo - 3, 2 * hi + 4).astype(np.float32) / 2
    x = np.concatenate([half_steps, EDGES, noise(200, nbits, -3, nbits + 1)])
    q = np.clip(np.rint(x.astype(np.float64)), lo, hi).astype(np.int64) & mask
    name = "int%d" % nbits
    return section(name, 0, codes, bits(values)) + section(name, 1, bits(x), q)


def nearest_float32(decimal):
    """The float32 literal that a C compiler makes of a decimal: rounded once, not through float64."""
    exact, x = Fraction(decimal), np.float32(float(decimal))
    near = [np.nextafter(x, -np.inf, dtype=np.float32), x, np.nextafter(x, np.inf, dtype=np.float32)]
    return min(near, key=lambda f: abs(Fraction(float(f)) - exact))


# The decision borders of bitsandbytes (csrc/kernels.cu, dQuantizeNF4), as they are written there.
NF4_BORDERS = """-0.8480964004993439 -0.6106329262256622 -0.4599952697753906 -0.33967943489551544
-0.23460740596055984 -0.13791173323988914 -0.045525018125772476 0.03979014977812767
0.1202552504837513 0.2035212516784668 0.2920137718319893 0.3893125355243683 0.5016634166240692
0.6427869200706482 0.8614784181118011""".split()


def nf4():
    mid = np.array([nearest_float32(d) for d in NF4_BORDERS], np.float32)
    assert (np.abs(mid - (NF4[1:] + NF4[:-1]) / np.float32(2)) < 6e-8).all()
    inf = np.float32(np.inf)
    x = np.concatenate([NF4, np.nextafter(mid, inf), mid, EDGES, noise(600, 4, -8, 2)])
    enc = (x[:, None] > mid[None, :]).sum(1)
    return section("nf4", 0, np.arange(16), bits(NF4)) + section("nf4", 1, bits(x), enc)


# Values and borders of bitsandbytes' own 4-bit float (csrc/kernels.cu, dQuantizeFP4).
BNB_FP4 = np.array([0, 0.005208333488553762, 0.6666666865348816, 1, 0.3333333432674408, 0.5,
                    0.1666666716337204, 0.25], np.float32)
BNB_FP4_BORDERS = "0.00260417 0.0859375 0.20833333 0.29166667 0.4166667 0.583333 0.8333333".split()


def bnb_fp4():
    mid = np.array([nearest_float32(d) for d in BNB_FP4_BORDERS], np.float32)
    order = np.argsort(BNB_FP4)
    assert (np.abs(mid - (BNB_FP4[order][1:] + BNB_FP4[order][:-1]) / np.float32(2)) < 1e-6).all()
    table = np.concatenate([BNB_FP4, np.where(BNB_FP4 == 0, BNB_FP4, -BNB_FP4)])
    pos = np.concatenate([table, np.nextafter(mid, np.float32(np.inf)), mid])
    x = np.concatenate([pos, -pos, EDGES, noise(600, 5, -10, 2)])
    enc = order[(np.abs(x)[:, None] > mid[None, :]).sum(1)] + np.where(x < 0, 8, 0)
    return section("bnb_fp4", 0, np.arange(16), bits(table)) + section("bnb_fp4", 1, bits(x), enc)


def build():
    out = b"TNUM1\0\0\0"
    for name in SMALL:
        out += small_floats(name)
    out += e8m0() + nf4() + bnb_fp4()
    out += half("bf16", ml_dtypes.bfloat16) + half("f16", np.float16)
    for b in range(2, 9):
        out += integers(b)
    return out


PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "num", "golden.bin")

if __name__ == "__main__":
    with open(PATH, "wb") as f:
        f.write(build())
    print("wrote", os.path.normpath(PATH), os.path.getsize(PATH), "bytes, ml_dtypes",
          ml_dtypes.__version__)

#!/usr/bin/env python3
"""Writes tests/fixtures/eval/stats_golden.txt: paired statistics computed without src/eval.

McNemar by exact fractions. Tango's interval from the definition with 40 digits: the restricted
maximum-likelihood estimate is found by maximising the trinomial log-likelihood numerically, not by
the closed formula that the program uses. The binomial tail by exact fractions.

Line types:  m b c p        i n b c lo_pp hi_pp        t n k p_num p_den tail
"""
from fractions import Fraction
from math import comb
import os
import mpmath as mp

mp.mp.dps = 40
Z = mp.sqrt(2) * mp.erfinv(mp.mpf("0.95"))


def mcnemar(b, c):
    n = b + c
    if n == 0 or b == c:
        return 1.0
    k = min(b, c)
    p = Fraction(2 * sum(comb(n, i) for i in range(k + 1)), 2**n)
    return float(min(p, Fraction(1)))


def restricted(n, b, c, lam):
    """Maximises b ln(q + lam) + c ln q + (n - b - c) ln(1 - 2q - lam) over q = P(wrong -> right)."""
    lo, hi = max(mp.mpf(0), -lam), (1 - lam) / 2

    def slope(q):
        s = mp.mpf(0)
        if b:
            s += b / (q + lam)
        if c:
            s += c / q
        if n - b - c:
            s -= 2 * (n - b - c) / (1 - 2 * q - lam)
        return s

    eps = mp.mpf(10) ** -35
    a, z = lo + eps, hi - eps
    if slope(a) <= 0:
        return lo
    if slope(z) >= 0:
        return hi
    for _ in range(160):
        m = (a + z) / 2
        if slope(m) > 0:
            a = m
        else:
            z = m
    return (a + z) / 2


def score(n, b, c, lam):
    q = restricted(n, b, c, lam)
    var = n * (2 * q + lam - lam * lam)
    d = b - c - n * lam
    if var <= 0:
        return mp.mpf(0) if d == 0 else mp.sign(d) * mp.inf
    return d / mp.sqrt(var)


def edge(n, b, c, far):
    near = mp.mpf(b - c) / n
    if abs(score(n, b, c, far)) <= Z:
        return far
    for _ in range(110):
        m = (near + far) / 2
        if abs(score(n, b, c, m)) <= Z:
            near = m
        else:
            far = m
    return (near + far) / 2


def interval(n, b, c):
    tiny = mp.mpf(10) ** -30
    hi = edge(n, b, c, 1 - tiny)
    lo = edge(n, b, c, -1 + tiny)
    return float(-100 * hi), float(-100 * lo)


def tail(n, k, p):
    return float(sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1)))


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    out = os.path.join(here, "..", "fixtures", "eval", "stats_golden.txt")
    with open(out, "w") as f:
        for b, c in [(0, 0), (1, 0), (0, 5), (3, 3), (10, 2), (2, 10), (12, 12), (25, 10), (100, 60),
                     (0, 40), (300, 250), (1000, 1), (700, 701)]:
            f.write(f"m {b} {c} {mcnemar(b, c)!r}\n")
        for n, b, c in [(5, 0, 0), (1, 0, 0), (1, 1, 0), (50, 0, 0), (381, 0, 0), (500, 0, 0), (5, 5, 0), (10, 0, 10),
                        (164, 3, 1), (500, 12, 6), (500, 30, 10), (1319, 40, 35), (1000, 3, 0),
                        (1000, 0, 7), (14042, 300, 250), (250, 250, 0), (20, 4, 16), (44, 1, 9)]:
            lo, hi = interval(n, b, c)
            f.write(f"i {n} {b} {c} {lo!r} {hi!r}\n")
        for n, k, num, den in [(500, 125, 1, 4), (500, 150, 1, 4), (100, 58, 1, 2), (20, 20, 1, 2), (1172, 340, 1, 4),
                               (10, 0, 1, 4), (500, 300, 262, 500), (4, 4, 1, 26)]:
            f.write(f"t {n} {k} {num} {den} {tail(n, k, Fraction(num, den))!r}\n")


if __name__ == "__main__":
    main()

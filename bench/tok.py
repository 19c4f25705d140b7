#!/usr/bin/env python3
"""Tokenizing and loading against the Hugging Face library `tokenizers`, one thread each, alternating in one run.

usage: tok.py [--rounds N] [--document BYTES] [--only-ids] --tokenizer FILE... [--text NAME=FILE...] [--lines MB...]

Each text is cut at line ends into documents of about BYTES (0: the text is one document); every side encodes them one
after another. The library runs three ways: encode (ids, offsets and all), encode_batch of one, encode_batch_fast of one
(no offsets); "best" is the fastest of the three. "first" is the first pass after loading, caches empty, against encode.
--lines: single lines without spaces of these sizes: time, memory that encoding added to the process, ids.
Processor time (user and system), medians over the rounds. All ids are compared in the same run. BUILD names the build folder (default build), whose
bench/tok is the other side. Results with dates stand in bench/NOTES.md."""
import argparse, array, os, random, statistics, string, struct, subprocess, sys, tempfile, time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
import tokenizers  # noqa: E402 (reads the environment)


class Tare:
    def __init__(self):
        self.p = subprocess.Popen([os.path.join(os.environ.get("BUILD", "build"), "bench/tok"), "-"], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        self.p.stdin.write(line + "\n")
        self.p.stdin.flush()
        answer = self.p.stdout.readline()
        if not answer:
            raise SystemExit(f"tok.py: '{line}' failed")
        return [float(x) for x in answer.split()]


    def forget_peak(self):
        with open(f"/proc/{self.p.pid}/clear_refs", "w") as f:
            f.write("5")

    def memory_mb(self, key):
        with open(f"/proc/{self.p.pid}/status") as f:
            return next(int(x.split()[1]) for x in f if x.startswith(key)) / 1024

    def close(self):
        self.p.stdin.close()
        self.p.wait()


def pack(path, docs):
    with open(path, "wb") as f:
        for d in docs:
            b = d.encode()
            f.write(struct.pack("<I", len(b)) + b)


def documents(path, size):
    text = open(path, encoding="utf-8", newline="").read()
    if not size:
        return [text]
    out, part, n = [], [], 0
    for line in text.splitlines(keepends=True):
        part.append(line)
        n += len(line.encode())
        if n >= size:
            out.append("".join(part))
            part, n = [], 0
    return out + ["".join(part)] if part else out


def library(ref, docs, way):
    start = time.process_time()
    if way == "encode":
        for d in docs:
            ref.encode(d, add_special_tokens=False)
    elif way == "batch":
        for d in docs:
            ref.encode_batch([d], add_special_tokens=False)
    else:
        for d in docs:
            ref.encode_batch_fast([d], add_special_tokens=False)
    return time.process_time() - start


def own_ids(tare, folder):
    """The ids of one document after another, by tare."""
    path, at = os.path.join(folder, "ids"), 0
    tare.ask("ids " + path)
    got = open(path, "rb").read()
    while at < len(got):
        n, = struct.unpack_from("<I", got, at)
        yield array.array("i", got[at + 4:at + 4 + 4 * n]).tolist()
        at += 4 + 4 * n


def differing(tare, ref, docs, folder):
    return sum(mine != ref.encode(d, add_special_tokens=False).ids for mine, d in zip(own_ids(tare, folder), docs, strict=True))


WAYS = ("encode", "batch", "fast")
med = statistics.median


def measure(tare, path, docs, rounds, folder, only_ids):
    tare.ask("open " + path)
    ref = tokenizers.Tokenizer.from_file(path)
    first, own, lib = None, [], {w: [] for w in WAYS}
    if not only_ids:
        first = (tare.ask("encode")[0], library(ref, docs, "encode"))
        for _ in range(rounds):
            own.append(tare.ask("encode")[0])
            for w in WAYS:
                lib[w].append(library(ref, docs, w))
    return first, own, lib, differing(tare, ref, docs, folder)


def load_times(tare, path, rounds):
    own, lib = [], []
    for _ in range(rounds):
        own.append(tare.ask("open " + path)[0])
        start = time.process_time()
        tokenizers.Tokenizer.from_file(path)
        lib.append(time.process_time() - start)
    return med(own), med(lib)


def line(alphabet, n):
    rng = random.Random(n)
    return "".join(rng.choices(alphabet, k=n // len(alphabet[0].encode())))


LINES = {"letters": "abcdefghijklmnopqrstuvwxyz", "base64": string.ascii_letters + string.digits + "+/", "one letter": "a",
         "Chinese": "的一是不了人我在有他这中大来上国"}


def one_line(path, ref, text, folder):
    tare = Tare()
    packed = os.path.join(folder, "line")
    pack(packed, [text])
    tare.ask("docs " + packed)
    tare.ask("open " + path)
    tare.forget_peak()
    before = tare.memory_mb("VmRSS")
    own = tare.ask("encode")[0]
    memory = tare.memory_mb("VmHWM") - before
    start = time.process_time()
    encoded = ref.encode(text, add_special_tokens=False)
    lib = time.process_time() - start
    bad = next(own_ids(tare, folder)) != encoded.ids
    tare.close()
    return own, memory, lib, bad


def lines(tokenizers_, sizes, folder):
    print("\n| tokenizer | line | MB | tare, s | s per MB | memory added, MB | library, s | ratio | ids |\n|---|---|---|---|---|---|---|---|---|")
    total = 0
    for path, name in tokenizers_.items():
        ref = tokenizers.Tokenizer.from_file(path)
        for kind, alphabet in LINES.items():
            for mb in sizes:
                own, memory, lib, bad = one_line(path, ref, line(alphabet, int(mb * 1e6)), folder)
                total += bad
                print(f"| {name} | {kind} | {mb:g} | {own:.3f} | {own / mb:.3f} | {memory:.0f} | {lib:.3f} | {lib / own:.1f} | "
                      f"{'differ' if bad else 'equal'} |", flush=True)
    return total


def header(document, rounds):
    print(f"tokenizers {tokenizers.__version__}, documents of about {document} bytes, {rounds} rounds")
    print("| tokenizer | text | MB | tare MB/s | library MB/s | its best MB/s | ratio | ratio to best | first pass | documents that differ |")
    print("|---|---|---|---|---|---|---|---|---|---|")


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--document", type=int, default=4096)
    a.add_argument("--only-ids", action="store_true")
    a.add_argument("--tokenizer", nargs="+", required=True)
    a.add_argument("--text", nargs="+", default=[])
    a.add_argument("--lines", nargs="+", type=float, default=[])
    a = a.parse_args()
    names = {p: os.path.splitext(os.path.basename(p))[0] for p in a.tokenizer}
    if len(set(names.values())) < len(names):
        names = {p: os.path.basename(os.path.dirname(p)) or p for p in a.tokenizer}
    tare, total_bad, slowest = Tare(), 0, None
    if a.text:
        header(a.document, a.rounds)
    with tempfile.TemporaryDirectory() as folder:
        for text in a.text:
            label, _, file = text.partition("=")
            docs = documents(file, a.document)
            packed = os.path.join(folder, "docs")
            pack(packed, docs)
            n, size = tare.ask("docs " + packed)
            assert n == len(docs)
            for path in a.tokenizer:
                first, own, lib, bad = measure(tare, path, docs, a.rounds, folder, a.only_ids)
                total_bad += bad
                if a.only_ids:
                    print(f"| {names[path]} | {label} | {size / 1e6:.1f} | - | - | - | - | - | - | {bad} of {len(docs)} |", flush=True)
                    continue
                best = min(WAYS, key=lambda w: med(lib[w]))
                ratio = med(x / y for x, y in zip(lib["encode"], own))
                to_best = med(x / y for x, y in zip(lib[best], own))
                if slowest is None or to_best < slowest[0]:
                    slowest = (to_best, names[path], label)
                print(f"| {names[path]} | {label} | {size / 1e6:.1f} | {size / med(own) / 1e6:.1f} | {size / med(lib['encode']) / 1e6:.1f} | "
                      f"{size / med(lib[best]) / 1e6:.1f} ({best}) | {ratio:.2f} | {to_best:.2f} | {first[1] / first[0]:.2f} | {bad} of {len(docs)} |",
                      flush=True)
        if slowest:
            print(f"lowest ratio to the library's best: {slowest[0]:.2f} ({slowest[1]}, {slowest[2]})\n")
            print("| tokenizer | file MB | tare load, s | library load, s |\n|---|---|---|---|")
            for path in a.tokenizer:
                own, lib = load_times(tare, path, a.rounds)
                print(f"| {names[path]} | {os.path.getsize(path) / 1e6:.1f} | {own:.3f} | {lib:.3f} |", flush=True)
        if a.lines:
            total_bad += lines(names, a.lines, folder)
    print(f"documents that differ: {total_bad}")
    sys.exit(total_bad != 0)


main()

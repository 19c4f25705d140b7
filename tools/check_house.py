#!/usr/bin/env python3
"""House checks: who includes whom, lengths, banned calls, registries covered by tests, session-free text.

Each rule prints "ok NAME" or "FAIL NAME" with the places; the exit status is 1 if any failed.
"""
import os, re, shutil, subprocess, sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
os.chdir(ROOT)

# Module -> modules whose headers it may include (docs/ARCHITECTURE.md has the reasons).
MAY = {
    "base": [],
    "num": ["base"],
    "ckpt": ["base", "num"],
    "text": ["base"],
    "kern": ["base", "num"],
    "quant": ["base", "num", "ckpt", "kern"],
    "kv": ["base", "num", "kern"],
    "model": ["base", "num", "ckpt", "kern", "quant", "kv"],
    "plan": ["base", "num", "ckpt", "quant", "kern", "kv", "model/arch.h"],
    "engine": ["base", "num", "text", "kern", "kv", "model", "plan", "ckpt", "quant"],
    "bake": ["base", "num", "ckpt", "text", "kern", "quant", "kv", "model", "plan"],
    "serve": ["base", "engine", "text"],
    "eval": ["base", "ckpt", "text", "plan", "engine"],
    "cli": ["base", "num", "ckpt", "text", "kern", "quant", "kv", "model", "plan", "engine", "bake", "serve", "eval"],
}
FILE_MAX, FUNC_MAX, KERNEL_MAX = 1500, 120, 300
BANNED = ["sprintf", "strcpy", "strcat", "atoi", "atof", "gets", "strtok", "alloca", "rand", "tmpnam", "mktemp"]
REGISTRIES = {          # table -> what proves that tests walk it: its name in a test
    "num_infos": "element types", "qspec_presets": "presets", "gguf_types": "GGUF block types",
    "kern_linear_rows": "linear kernels", "kern_op_rows": "operator kernels", "kv_formats": "KV formats",
    "quant_dialects": "dialects", "quant_algos": "algorithms", "arch_rows": "architectures",
    "tok__models": "tokenizer models", "tok__normalizers": "normalizers", "tok__pretokenizers": "pre-tokenizers",
    "tok__decoders": "decoders", "tok__postprocessors": "post-processors",
    "serve__routes": "routes", "eval__tasks": "task types", "commands": "commands",
}


def sources():
    out = []
    for d in ("src", "tests", "bench"):
        for p, _, fs in os.walk(d):
            out += [os.path.join(p, f) for f in fs if f.endswith((".c", ".h", ".cu", ".cuh", ".cc"))]
    return sorted(out)


def strip(text):
    """Comments and string contents blanked, line structure kept."""
    def blank(m):
        return re.sub(r"[^\n]", " ", m.group(0))
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)


FILES = {f: open(f, encoding="utf-8").read() for f in sources()}
CODE = {f: strip(t) for f, t in FILES.items()}
results = []


def rule(name, problems):
    results.append(not problems)
    print(("ok " if not problems else "FAIL ") + name)
    for p in problems[:20]:
        print("    " + p)


def layers():
    bad = []
    for f, text in FILES.items():
        if not f.startswith("src/"):
            continue
        mod = f.split("/")[1]
        for i, line in enumerate(text.split("\n"), 1):
            m = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if not m:
                continue
            inc = m.group(1)
            to = inc.split("/")[0]
            if to != mod and to not in MAY[mod] and inc not in MAY[mod]:
                bad.append(f"{f}:{i}: {mod} may not include {inc}")
    return bad


def functions(code):
    """(name, first line, length) of each function: a '{' at depth 0 that follows a ')'."""
    out, depth, start, name = [], 0, 0, ""
    lines = code.split("\n")
    for i, line in enumerate(lines):
        if line.lstrip().startswith("#"):
            continue
        for ch in line:
            if ch == "{":
                if depth == 0:
                    head = " ".join(lines[max(0, i - 6):i + 1])
                    head = head[:head.rfind("{")].rstrip()
                    start, name = i, ""
                    if head.endswith(")"):
                        m = re.findall(r"([A-Za-z_]\w*)\s*\(", head)
                        name = m[0] if m else "?"
                        m2 = re.search(r"([A-Za-z_]\w*)\s*\([^{};]*\)\s*$", head)
                        name = m2.group(1) if m2 else name
                depth += 1
            elif ch == "}":
                depth = max(0, depth - 1)
                if depth == 0 and name:
                    out.append((name, start + 1, i - start + 1))
                    name = ""
    return out


def lengths():
    bad, all_len = [], []
    for f, text in FILES.items():
        n = text.count("\n")
        if n > FILE_MAX:
            bad.append(f"{f}: {n} lines (at most {FILE_MAX})")
        if not f.startswith("src/"):
            continue
        top = KERNEL_MAX if "/kern/" in f else FUNC_MAX
        for name, line, k in functions(CODE[f]):
            all_len.append(k)
            if k > top:
                bad.append(f"{f}:{line}: {name} has {k} lines (at most {top})")
    all_len.sort()
    if all_len:
        print(f"    {len(all_len)} functions: median {all_len[len(all_len) // 2]}, "
              f"p90 {all_len[len(all_len) * 9 // 10]}, longest {all_len[-1]} lines")
    return bad


def banned():
    bad = []
    pat = re.compile(r"\b(" + "|".join(BANNED) + r")\s*\(")
    for f, code in CODE.items():
        if not f.startswith("src/"):
            continue
        for i, line in enumerate(code.split("\n"), 1):
            m = pat.search(line)
            if m:
                bad.append(f"{f}:{i}: {m.group(1)} is banned")
            if not f.startswith("src/cli/") and re.search(r"\b_?exit\s*\(", line) and "_exit" not in line:
                bad.append(f"{f}:{i}: exit in a library")
            if re.search(r"\bfast.?math\b", FILES[f].split("\n")[i - 1], re.I) and "pragma" in line:
                bad.append(f"{f}:{i}: fast-math")
    return bad


def essays():
    return [f"{f}: does not open with a comment that says what it owns" for f, t in FILES.items()
            if f.startswith("src/") and f.endswith((".c", ".cu", ".cc")) and not t.lstrip().startswith("/*")]


def guards():
    """*_body.h are templates: included once for each instruction set, on purpose without a guard."""
    return [f"{f}: no include guard" for f, t in FILES.items()
            if f.startswith("src/") and f.endswith(".h") and not f.endswith("_body.h") and "#ifndef" not in t and "#pragma once" not in t]


def registries():
    tests = "".join(t for f, t in FILES.items() if f.startswith("tests/"))
    return [f"no test walks {name} ({what})" for name, what in REGISTRIES.items() if not re.search(rf"\b{name}\b", tests)]


def private():
    """Module-private names (kv__x) and other modules' internal headers stay inside the module."""
    bad = []
    for f, code in CODE.items():
        if not f.startswith("src/"):
            continue
        mod = f.split("/")[1]
        for m in re.finditer(r"\b([a-z]+)__([a-z]\w*)\s*\(", code):
            if m.group(1) in MAY and m.group(1) != mod:
                bad.append(f"{f}: {m.group(0)[:-1]} is private to {m.group(1)}")
    return bad


def formatting():
    exe = next((x for x in ("clang-format", "clang-format-14") if shutil.which(x)), None)
    if not exe:
        print("skip formatting: clang-format is not installed")
        return None
    p = subprocess.run([exe, "--dry-run", "-Werror"] + list(FILES), capture_output=True, text=True)
    return sorted({l.split(":")[0] + ": not formatted (make format)" for l in p.stderr.split("\n") if ": error:" in l})


def kept_files():
    """What git keeps; without git (a release archive), every file outside the folders that are made."""
    try:
        return subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        out = []
        for folder, sub, files in os.walk("."):
            sub[:] = [x for x in sub if x not in ("build", "out", ".git", "__pycache__")]
            out += [os.path.relpath(os.path.join(folder, f), ".") for f in files]
        return out


def traces():
    """No machine paths, hosts or session words in what is kept."""
    pat = re.compile(r"/work/|\.\./shared|/root/|pypi\.org|files\.pythonhosted|deb\.debian\.org|\bhelper agent\b|\bsubagent|\bthis session\b", re.I)
    bad = []
    for p in kept_files():
        if not p or p.startswith(("models/", "tests/fixtures/")) or p == "tools/check_house.py" or not os.path.isfile(p):
            continue
        try:
            text = open(p, encoding="utf-8").read()
        except (UnicodeDecodeError, OSError):
            continue
        bad += [f"{p}:{i}: {m.group(0)}" for i, l in enumerate(text.split("\n"), 1) for m in [pat.search(l)] if m]
    return bad


def generated():
    tare = os.environ.get("TARE", "build/tare")
    if not os.path.exists(tare):
        print("skip generated docs: no program built")
        return None
    want = subprocess.run([tare, "completions", "markdown"], capture_output=True, text=True).stdout
    have = open("docs/OPTIONS.md", encoding="utf-8").read() if os.path.exists("docs/OPTIONS.md") else ""
    stale = subprocess.run([sys.executable, "tools/gen_docs.py", "--check"], capture_output=True, text=True).stdout.split()
    return [f"{p} is out of date (make docs)" for p in stale + ([] if want == have else ["docs/OPTIONS.md"])]


for title, fn in [("includes point down", layers), ("file and function lengths", lengths), ("banned calls", banned),
                  ("every source opens with its essay", essays), ("include guards", guards),
                  ("private names stay private", private), ("registries are walked by tests", registries),
                  ("no traces of a machine", traces), ("formatting", formatting), ("generated documents", generated)]:
    p = fn()
    if p is not None:
        rule(title, p)
sys.exit(0 if all(results) else 1)

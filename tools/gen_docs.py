#!/usr/bin/env python3
"""docs/ERRORS.md and docs/SUPPORT.md from the program's own tables (X-macro files and registries).
With --check nothing is written: the names of those that are out of date are printed."""
import os, re, sys

os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def read(p):
    return open(p, encoding="utf-8").read() if os.path.exists(p) else ""


def table(text, start):
    """Rows `{...}` of the initializer that begins at `start`."""
    m = re.search(start + r"[^=]*=\s*\{(.*?)\n\};", text, re.S)
    return re.findall(r"^\s*\{(.*?)\},?\s*$", m.group(1), re.S | re.M) if m else []


def strings(row):
    row = re.sub(r'"\s*\n\s*"', "", row)
    return re.findall(r'"((?:[^"\\]|\\.)*)"', row)


out = ["# Errors", "", "Made from src/base/errors.def by `make docs`. A function returns the negative code; the server maps it to the HTTP status.", "",
       "| code | name | HTTP | meaning |", "|---|---|---|---|"]
for i, (name, http, text) in enumerate(re.findall(r'^ERR\((\w+), (\d+), "([^"]*)"\)', read("src/base/errors.def"), re.M), 1):
    out.append(f"| {i} | {name} | {http} | {text} |")
made = {"docs/ERRORS.md": "\n".join(out) + "\n"}

s = ["# Support", "", "Made from the program's registries by `make docs`.", "", "## Element types", "", "| name | bits | largest | what |", "|---|---|---|---|"]
for name, bits, mx, doc in re.findall(r'^DTYPE\(\w+, "([^"]*)", "[^"]*", (\d+), \w, ([^,]+), "([^"]*)"\)', read("src/num/dtypes.def"), re.M):
    s.append(f"| {name} | {bits} | {mx} | {doc} |")
s += ["", "## Presets (quantize: round to nearest; compressed-tensors written, read, run)", "", "| preset | scheme | what |", "|---|---|---|"]
for r in table(read("src/num/qspec.c"), r"qspec_presets\[\]"):
    v = strings(r)
    s.append(f"| {v[0]} | `{v[1]}` | {v[2]} |")
s += ["", "## KV cache formats", "", "| name | also | what |", "|---|---|---|"]
for r in table(read("src/kv/formats.c"), r"kv_formats\[\]"):
    v = strings(r)
    s.append(f"| {v[0]} | {v[1]} | {v[2]} |")
s += ["", "## Architectures", "", "| recipe | Hugging Face names |", "|---|---|"]
for r in table(read("src/model/arch.c"), r"arch_rows\[\]"):
    v = strings(r)
    s.append(f"| {v[0]} | {v[1]} |")
s += ["", "## Checkpoint dialects", "", "| dialect | quant_method |", "|---|---|"]
for f in sorted(os.listdir("src/quant")):
    for m in re.findall(r"const quant_dialect \w+ = \{(.*?)\};", read("src/quant/" + f), re.S):
        v = strings(m)
        s.append(f"| {v[0]} | {v[1] if len(v) > 1 else ''} |")
s += ["", "## GGUF block types (read)", "", ", ".join(re.findall(r'\{\d+, "(\w+)"', read("src/ckpt/gguf_types.c"))), ""]
s += ["## Pieces of tokenizer.json", "", "| piece | types |", "|---|---|"]
for title, f in (("normalizers", "normalize"), ("pre-tokenizers", "split"), ("decoders", "decode"), ("post-processors", "post")):
    rows = re.search(r"tok_stage_kind kinds\[\] = \{(.*?)\n\};", read(f"src/text/tok_{f}.c"), re.S)
    types = re.findall(r'[.]type = "(\w+)"', rows.group(1))
    s.append(f"| {title} | {', '.join(types)} |")
models = sorted(m for f in os.listdir("src/text") for m in re.findall(r'const tok_model_kind tok__\w+ = \{"(\w+)"', read("src/text/" + f)))
s += [f"| models | {', '.join(models)} |", ""]
made["docs/SUPPORT.md"] = "\n".join(s) + "\n"
for path, text in made.items():
    if "--check" not in sys.argv:
        open(path, "w", encoding="utf-8").write(text)
    elif read(path) != text:
        print(path)

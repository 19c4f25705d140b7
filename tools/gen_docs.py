#!/usr/bin/env python3
"""docs/ERRORS.md and docs/SUPPORT.md from the program's own tables (X-macro files and registries) and from what
the tests walk: a dialect that no test reads, an architecture without a row of results, a test that is named and is
not there end with an error. With --check nothing is written: the names of those that are out of date are printed."""
import json, os, re, sys

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


def need(good, why):
    if not good:
        sys.exit("gen_docs: " + why)


def dialect_rows():
    """name -> (methods, is it written)"""
    found = {}
    for f in sorted(os.listdir("src/quant")):
        for m in re.findall(r"const quant_dialect \w+ = \{(.*?)\};", read("src/quant/" + f), re.S):
            v = strings(m)
            found[v[0]] = (v[1] if len(v) > 1 else "", ".store =" in m)
    return found


def fixture_cases():
    """quant_method -> folders of tests/fixtures/quant, all of which test_quant_golden.c and test_dialect_logits.py walk"""
    found, root = {}, "tests/fixtures/quant"
    for f in sorted(os.listdir(root)):
        q = json.loads(read(f"{root}/{f}/config.json") or "{}").get("quantization_config")
        if q:
            found.setdefault(q.get("quant_method") or ("modelopt" if "quant_algo" in q else "?"), []).append(f)
    return found


# What was written is read by the tool itself, or by transformers; run by `make golden` where torch is needed.
READ_BY = {"compressed-tensors": "torch_ct_library.py", "bitsandbytes": "torch_convert_library.py", "mxfp4": "torch_convert_library.py",
           "fp8": "torch_scaled_library.py", "modelopt": "torch_scaled_library.py", "gptq": "torch_packed_library.py", "awq": "torch_packed_library.py"}


def dialects():
    cases, own = fixture_cases(), read("tests/golden/test_scaled.py")
    out = ["", "## Checkpoint dialects", "",
           "Read: weights equal to the bit (or as close as the tool states) to the tool's own, tests/unit/test_quant_golden.c over the folders of tests/fixtures/quant",
           "that are named. Run: logits against the tool's, tests/golden/test_dialect_logits.py over the same folders. A dialect without a folder is made by",
           "tests/golden/test_scaled.py from the layout in its docs, weights and logits by numpy. Write: there and back without a changed number,",
           "tests/unit/test_convert.c, and loaded by the tool in the test of tests/golden that is named.", "",
           "| dialect | quant_method | read and run | write |", "|---|---|---|---|"]
    for name, (methods, store) in dialect_rows().items():
        folders = [f for m in methods.split() for f in cases.get(m, [])]
        made = [m for m in methods.split() if f'"quant_method": "{m}"' in own]
        how = ", ".join(folders) if folders else f"made: test_scaled.py ({made[0]})" if made else ""
        if name == "plain":
            how, wrote = "tests/unit/test_model_golden.c, test_bake.c", "yes: test_bake.c"
        else:
            need(how, f"no test reads the dialect '{name}'")
            need(not store or name in READ_BY, f"no test says that a tool reads '{name}', which is written")
            need(not store or os.path.exists("tests/golden/" + READ_BY[name]) and name in read("tests/golden/" + READ_BY[name]).lower(),
                 f"{READ_BY.get(name)} does not check '{name}'")
            wrote = f"yes: {READ_BY[name]}" if store else "no"
        out.append(f"| {name} | {methods} | {how} | {wrote} |")
    return out


def architectures():
    """Rows are those of the registry; cells are what tests/unit/test_support.c saw, which fails where they differ."""
    lines = [x.split("\t") for x in read("tests/fixtures/support/architectures.tsv").splitlines()]
    names, seen, notes = lines[0][2:], {x[0]: x for x in lines[1:]}, []
    rows = table(read("src/model/arch.c"), r"arch_rows\[\]")
    need([strings(r)[0] for r in rows] == [x[0] for x in lines[1:]], "tests/fixtures/support/architectures.tsv: test_support --write")
    need(set(names) == {n for n, (_, store) in dialect_rows().items() if store}, "tests/fixtures/support/architectures.tsv: other dialects are written now")

    def cell(text):
        if text == "yes":
            return text
        where = re.sub(r"^partly: (\S+) and (\d+) more ", r"\1 and \2 more ", text)
        if where not in notes:
            notes.append(where)
        return ("partly" if text.startswith("partly") else "no") + f" ({notes.index(where) + 1})"

    out = ["", "## Architectures", "",
           "Logits of each equal those of transformers to 1e-4 (tests/unit/test_model_golden.c). Quantized while loading as fp8, int8, int4 groups",
           "and mxfp4: tests/unit/test_model_schemes.c. Under a dialect: `quantize` writes it, it is loaded again, and its logits equal those of quantizing",
           "while loading (tests/unit/test_support.c).", "",
           "| recipe | Hugging Face names | while loading | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for r in rows:
        v = strings(r)
        need(os.path.isdir("tests/fixtures/arch/" + seen[v[0]][1]), f"no case of {v[0]}")
        out.append(f"| {v[0]} | {v[1]} | yes | " + " | ".join(cell(c) for c in seen[v[0]][2:]) + " |")
    return out + [""] + [f"{i}. {n}" for i, n in enumerate(notes, 1)]


def faults():
    """tests/fixtures/support/faults.tsv: what users of other engines reported, and the test of each."""
    out = ["", "## Faults that were reported of other engines, and their tests", "", "| | fault | tests |", "|---|---|---|"]
    for line in read("tests/fixtures/support/faults.tsv").splitlines():
        key, what, tests = line.split("\t")
        for t in tests.split(", "):
            f, _, name = t.partition(":")
            need(name and re.search(r"\b" + re.escape(name) + r"\b", read("tests/" + f)), f"fault {key}: there is no {name} in tests/{f}")
        out.append(f"| {key} | {what} | {tests} |")
    return out


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
s += architectures() + dialects() + faults()
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

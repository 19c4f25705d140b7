#!/usr/bin/env python3
"""`tare inspect` on published configs without weights (tests/fixtures/configs): each row of expected.tsv,
which was held against the configs by hand, and what no row may do: crash, count tensors that are not
there, say that something runs and why it does not. Prints "ok NAME" or "FAIL NAME: why"."""
import gzip, json, os, shutil, subprocess, sys, tempfile

os.chdir(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TARE = os.path.abspath(os.environ.get("TARE", "build/tare"))
DIR = "tests/fixtures/configs"
if not os.path.exists(TARE):
    print(f"skip test_inspect: there is no {TARE}")
    sys.exit(0)


def inspect(path):
    r = subprocess.run([TARE, "inspect", path, "--json"], capture_output=True, text=True, timeout=60)
    assert r.returncode == 0, (r.returncode, r.stderr)
    human = subprocess.run([TARE, "inspect", path], capture_output=True, text=True, timeout=60)
    assert human.returncode == 0 and "no weight files here" in human.stdout, human
    return json.loads(r.stdout), human.stdout


def check(want, path):
    j, text = inspect(path)
    caught = sum(r["modules"] or 0 for r in j["ignore"])
    index = j.get("index")
    have = {"architecture": j["architecture"], "text": j["text_architecture"] or "-", "format": j["format"], "w": j["w"], "a": j["a"], "kv": j["kv"],
            "runs": "yes" if j["runs"] else "no", "rules": str(len(j["ignore"])), "caught": str(caught) if j["runs"] else "-",
            "index": f"{index['tensors']}/{index['of_the_dialect']}" if index else "-"}
    for k, v in have.items():
        assert v == want[k], f"{k} is '{v}', expected '{want[k]}'"
    assert j["runs"] == (j["why_not"] is None)
    if not j["runs"]:
        assert want["why_not"] in j["why_not"] and want["why_not"] in text, j["why_not"]
    assert not j["weights"] and not j["modules"] and not j["unquantized"] and j["bytes"]["total"] == 0 and j["params"] is None
    assert (j["runs"] and j["text_architecture"] is not None) == ("images and sound are not taken" in text)
    assert "runs           yes" in text if j["runs"] else "runs           no: " in text
    return j


def main():
    lines = open(f"{DIR}/expected.tsv").read().splitlines()
    keys, bad, seen = lines[0].split("\t"), 0, 0
    table = {r[0]: dict(zip(keys, r)) for r in (x.split("\t") for x in lines[1:])}
    tmp = tempfile.mkdtemp(prefix="inspect-")
    try:
        for line in gzip.open(f"{DIR}/configs.jsonl.gz", "rt"):
            row = json.loads(line)
            name, files = row["name"], row["files"]
            folder = os.path.join(tmp, name)
            os.mkdir(folder)
            for f, v in files.items():
                json.dump(v, open(os.path.join(folder, f), "w"))
            try:
                a = check(table[name], folder)
                # The same by a config's own path, and by names as collections of configs have them.
                b = check(table[name], os.path.join(folder, "config.json"))
                for f, v in files.items():
                    json.dump(v, open(os.path.join(tmp, f"{name}_{f}"), "w"))
                c = check(table[name], os.path.join(tmp, f"{name}_config.json"))
                assert a["groups"] == b["groups"] == c["groups"] and a["ignore"] == b["ignore"] == c["ignore"]
                print("ok", name)
                seen += 1
            except (AssertionError, KeyError, subprocess.TimeoutExpired) as why:
                print(f"FAIL {name}: {type(why).__name__} {str(why)[:600]}")
                bad += 1
        assert seen + bad == len(table), f"{seen + bad} configs, {len(table)} rows"
        # Weights are asked for by every other command.
        for cmd in (["plan"], ["quantize", "--scheme", "fp8", "-o", os.path.join(tmp, "out")], ["convert", "-o", os.path.join(tmp, "out")]):
            r = subprocess.run([TARE, cmd[0], os.path.join(tmp, "Qwen--Qwen3-8B"), *cmd[1:]], capture_output=True, text=True, timeout=60)
            good = r.returncode == 1 and "no .safetensors file" in r.stderr and not os.path.exists(os.path.join(tmp, "out"))
            print("ok" if good else "FAIL", f"{cmd[0]}_needs_weights", "" if good else r)
            bad += not good
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return bad > 0


sys.exit(main())

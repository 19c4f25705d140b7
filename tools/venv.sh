#!/bin/sh
# Makes build/venv with the pinned Python oracles of tests/requirements.txt and prints its python on the
# last line; without network (and no ready environment) prints nothing and says why on standard error.
set -u
cd "$(dirname "$0")/.." || exit 1
dir=${VENV:-build/venv}
stamp=$dir/.ready
want=$(cksum <tests/requirements.txt)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then echo "$dir/bin/python"; exit 0; fi
mkdir -p "$(dirname "$dir")"
python3 -m venv "$dir" >&2 || { echo "venv: python3 -m venv failed" >&2; exit 0; }
echo "venv: installing the Python oracles (tests/requirements.txt)" >&2
if "$dir/bin/pip" install -q --disable-pip-version-check --retries 1 --timeout 20 -r tests/requirements.txt >"$dir/pip.log" 2>&1; then
    printf '%s' "$want" >"$stamp"
    echo "$dir/bin/python"
else
    tail -n 2 "$dir/pip.log" >&2
    echo "venv: packages could not be installed (no network?): the Python oracles are skipped" >&2
fi

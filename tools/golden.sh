#!/bin/bash
# Checks that need torch: every preset reopened by the Python library compressed-tensors, and perplexity against
# transformers; and tokenizers against the libraries on trained models and whole corpora (live_*.py; CORPUS, TOKENIZERS and
# VECTORS name more texts and tokenizers). Makes its own environment in build/torch. golden.sh BUILD-DIR
set -u
cd "$(dirname "$0")/.." || exit 1
py=${TORCH_PYTHON:-}
if [ -z "$py" ]; then
    python3 -m venv build/torch && build/torch/bin/pip install -q -r tests/golden/requirements-torch.txt || exit 1
    py=build/torch/bin/python
fi
rc=0
for script in tests/golden/torch_*.py tests/golden/live_*.py; do
    echo "== $script"
    TARE=${1:-build}/tare "$py" "$script" || rc=1
done
exit $rc

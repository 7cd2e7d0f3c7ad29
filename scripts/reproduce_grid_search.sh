#!/usr/bin/env bash
# Predicts the paper's grid search and compares it with the published results: see
# benchmarks/grid_search.py. No GPU; a minute or two. The exit status is 1 if a winner differs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if [[ -z ${PYTHON-} && -x .venv/bin/python ]]; then
    python=.venv/bin/python
fi
exec "$python" benchmarks/grid_search.py "$@"

#!/usr/bin/env bash
# Predicts the paper's grid search (98.5B model, 40 A100-80GB, three sequence lengths) and prints it
# beside the published table. No GPU and no cluster; a minute or two. Ends with 1 if a winner differs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if [[ -z ${PYTHON-} && -x .venv/bin/python ]]; then
    python=.venv/bin/python
fi
exec "$python" -m megatron_vshape.cli.main sweep configs/sweeps/grid_98b_a100.yaml \
    --predict-only --compare configs/sweeps/grid_98b_a100_published.csv \
    --headroom 0 "$@"

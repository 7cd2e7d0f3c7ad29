#!/usr/bin/env bash
# Trains 2,000 steps on four ranks, planned anew every 100, beside Megatron's 1F1B; nothing may grow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

usage() {
    cat <<'TEXT'
usage: bash scripts/soak.sh [PYTEST ARGS]

Compares every loss with 1F1B's, and live tensors, open files, threads and memory of each rank
every 100 steps. On two cores it takes about twenty minutes.
TEXT
}

if [[ ${1-} == -h || ${1-} == --help ]]; then
    usage
    exit
fi
make_environment .venv megatron,search,draw,sweep,playground,dev constraints.txt
exec .venv/bin/python -m pytest tests/faults/test_soak.py -q -W ignore -m slow "$@"

#!/usr/bin/env bash
# Injects every fault of tests/faults into small runs and prints a table: injected, survived, lost.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

usage() {
    cat <<'TEXT'
usage: bash scripts/faults.sh [PYTEST ARGS]

Kills of a rank in every kind of pass on three devices, with restarts; stalls of 30 s; NaN, inf and
exceptions; full disks and kills while saving; 10,000 hostile files. On two cores it takes about
half an hour. PYTEST ARGS choose among them, as in -k killed.
TEXT
}

if [[ ${1-} == -h || ${1-} == --help ]]; then
    usage
    exit
fi
make_environment .venv megatron,search,draw,sweep,playground,dev constraints.txt
exec .venv/bin/python -m pytest tests/faults -q -W ignore -m "slow or not slow" \
    --ignore tests/faults/test_soak.py "$@"

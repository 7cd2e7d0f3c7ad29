#!/usr/bin/env bash
# Measures on one GPU all that configs/costs has a place for, what is worth most first.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
# shellcheck source=scripts/lib.sh
source scripts/lib.sh

usage() {
    cat <<'TEXT'
usage: bash scripts/gpu_session.sh FOLDER [PART ...]

  1    gradients, split against whole; what splitting costs; the ranks of the 9.6B model
  2    the ranks of the 21B model
  3    the ranks of the 38.5B model
  4    two ranks on one GPU over NCCL

A part ends within nine minutes, whatever happens; without PART all are run. Each leaves in FOLDER
its tables (part1.md), what it said besides (part1.log), and the costs, what they are about and the
adaptive plan of its model. Ends with 1 where a figure misses its limit or a part fails. PYTHON
names the interpreter; a GPU with less memory takes smaller models, and fails on those too large.
TEXT
}

# bench SECONDS SCRIPT ARGS...: runs it for so long at most, into the files of the part.
bench() {
    local seconds=$1
    shift
    printf '\n## %s\n\n' "$*" | tee -a "$folder/part$part.md"
    timeout --kill-after=10 "$seconds" "${PYTHON:-python3}" "scripts/$1" "${@:2}" \
        2> >(tee -a "$folder/part$part.log" >&2) | tee -a "$folder/part$part.md"
    local status=${PIPESTATUS[0]}
    ((status == 0)) || failed+=("part $part, $1: status $status")
}

emulate() {
    bench "$1" bench_gpu.py emulate --model "configs/models/$2.yaml" --devices 8 --microbatches 24 \
        --write "$folder"
}

run_part() {
    case $1 in
        1)
            bench 120 bench_gpu.py numerics
            bench 110 bench_gpu.py split
            emulate 300 gpt_9_6b
            ;;
        2) emulate 530 gpt_21b ;;
        3) emulate 530 gpt_38_5b ;;
        4) bench 460 bench_nccl.py --ranks 2 ;;
    esac
}

case ${1-} in
    -h | --help) usage && exit ;;
    '') usage >&2 && exit 2 ;;
esac
folder=$1
shift
(($#)) || set -- 1 2 3 4
for part in "$@"; do
    [[ $part =~ ^[1-4]$ ]] || die "there is no part $part: choose from 1 to 4"
done
mkdir -p "$folder" || exit
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
failed=()
for part in "$@"; do
    run_part "$part"
done
((${#failed[@]} == 0)) || die "failed:" "${failed[@]/%/;}"

#!/usr/bin/env bash
# Measures on one GPU all that configs/costs has a place for, in commands of nine minutes at most.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
# shellcheck source=scripts/lib.sh
source scripts/lib.sh

usage() {
    cat <<'TEXT'
usage: bash scripts/gpu_session.sh FOLDER [COMMAND ...]
       bash scripts/gpu_session.sh --list    what each command measures, and for how long at most

Runs the commands, or all of them, what is worth most first. Each leaves in FOLDER its tables
(COMMAND.md) and its other output (COMMAND.log). Exits with 1 if a figure misses its limit or a part
fails. PYTHON sets the interpreter. On a GPU with less memory, models that are too large fail.
TEXT
}

commands=(graph-weights graph-ranks splitting graphs trainer allocator nccl warmup encoder offload sizes)

run_command() {
    case $1 in
        splitting)
            about "gradients, split against whole and fp32; what splitting costs at hidden 4096"
            bench 150 scripts/bench_gpu.py numerics
            bench 150 scripts/bench_gpu.py split --hidden 4096
            ;;
        graphs)
            about "a chunk in CUDA graphs: whose memory its results are in, and what is kept of them"
            bench 60 benchmarks/check_graphs.py
            ;;
        graph-weights)
            about "CUDA graphs of F, B and W: gradients bit by bit, times of passes, memory, FP8"
            bench 460 benchmarks/check_graph_weights.py --output "$folder/graph-weights.json"
            ;;
        graph-ranks)
            about "CUDA graphs of F, B and W on four ranks that share the GPU, over NCCL: gradients"
            bench 460 benchmarks/check_graph_ranks.py
            ;;
        trainer)
            about "Megatron's trainer with Transformer Engine, one rank at a time: memory and passes"
            bench 460 scripts/measure_ranks.py measure --output "$folder/trainer.json"
            ;;
        allocator)
            about "the calls of torch's allocator in training steps, which its model must reproduce"
            bench 460 benchmarks/check_allocator.py record "$folder/allocator"
            ;;
        nccl)
            about "ranks that share the GPU: losses, and what hangs where passes wait for it"
            bench 460 benchmarks/bench_nccl.py --ranks 2
            ;;
        warmup)
            about "a warm-up of two ranks that share the GPU, over NCCL: losses of later steps"
            bench 180 benchmarks/check_warmup.py
            ;;
        encoder)
            about "the image encoder of Qwen3-VL-8B in layers of its language model"
            bench 120 benchmarks/encoder_ratio.py
            ;;
        offload)
            about "copies to host memory while passes run"
            bench 100 scripts/bench_gpu.py copies --hidden 4096
            ;;
        sizes)
            about "what splitting costs at other sizes"
            bench 300 scripts/bench_gpu.py split --hidden 2048 3072 5120 6144 8192
            ;;
    esac
}

# about TEXT: says what a command measures.
about() {
    if [[ -n $listing ]]; then
        printf '%s: %s\n' "$command" "$1"
    else
        printf '# %s: %s\n' "$command" "$1" | tee "$folder/$command.md"
        [[ -z $fallback ]] || printf '\n%s\n' "$fallback" | tee -a "$folder/$command.md"
    fi
}

# bench SECONDS SCRIPT ARGS...: runs a script for so long at most, into the files of the command.
bench() {
    local seconds=$1 script=$2 status
    shift
    if [[ -n $listing ]]; then
        printf '    at most %d s: python %s\n' "$seconds" "$*"
        return
    fi
    shift
    printf '\n## %s\n\n' "${script##*/} $*" | tee -a "$folder/$command.md"
    timeout --kill-after=10 "$seconds" "$python" "$script" "$@" \
        2> >(tee -a "$folder/$command.log" >&2) | tee -a "$folder/$command.md"
    status=${PIPESTATUS[0]}
    ((status == 0)) || failed+=("$command, ${script##*/} $1: status $status")
}

# Some machines do not let memory be mapped piece by piece, which expandable segments need. Sets
# fallback to a sentence where that is so, and does without, unless the user has chosen himself.
choose_allocator() {
    fallback=''
    [[ -z ${PYTORCH_CUDA_ALLOC_CONF+set}${PYTORCH_ALLOC_CONF+set} ]] || return
    ! allocates || return
    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False
    export PYTORCH_ALLOC_CONF=$PYTORCH_CUDA_ALLOC_CONF
    if allocates; then
        fallback="expandable segments do not work here: measured without"
    else # something else is wrong, which the commands tell
        unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF
    fi
}

allocates() {
    timeout 35 "$python" - 2>/dev/null <<'PYTHON'
import os

import torch

from megatron_vshape.environment import complete

complete(os.environ, kernels=True, ordered=False)

kept = [torch.ones(mib << 20, dtype=torch.uint8, device="cuda") for mib in (1, 64, 1024)]
torch.cuda.synchronize()
PYTHON
}

case ${1-} in
    -h | --help) usage && exit ;;
    --list)
        listing=yes folder=FOLDER
        for command in "${commands[@]}"; do
            run_command "$command"
        done
        exit
        ;;
    '' | -*) usage >&2 && exit 2 ;;
esac
listing='' folder=$1 python=${PYTHON:-python3}
shift
(($#)) || set -- "${commands[@]}"
for command in "$@"; do
    [[ " ${commands[*]} " == *" $command "* ]] ||
        die "there is no command $command: choose from ${commands[*]}"
done
mkdir -p "$folder" || exit
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
choose_allocator
failed=()
for command in "$@"; do
    run_command "$command"
done
((${#failed[@]} == 0)) || die "failed:" "${failed[@]/%/;}"

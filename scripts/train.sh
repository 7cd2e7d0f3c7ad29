#!/usr/bin/env bash
# Trains a small GPT on real text with a pipeline schedule of this package.
# On a fresh machine it first makes what it needs; a second run starts at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

usage() {
    cat <<'TEXT'
usage: bash scripts/train.sh [OPTIONS] [-- ARGS]

  --schedule NAME     1f1b, interleaved-1f1b, v-min, v-half (default), v-zb, or a schedule file
  --text FILE         a UTF-8 text of your own (default: the documentation that ships with Python)
  --data-path PREFIX  a Megatron data set of your own, PREFIX.bin and PREFIX.idx; its tokenizer is
                      PREFIX.model (SentencePiece), or what ARGS say
  --steps N           training steps (default 200)
  --ranks N           pipeline ranks (default 4)
  --verbose           show all that Megatron prints, which is otherwise only in the log
  -- ARGS             flags for Megatron's trainer; they come last, so they win

Where there is a GPU for each rank it trains over NCCL in bf16, else on the CPU over gloo in fp32.
TEXT
}

# parse_options ARGS...: sets the variables below.
parse_options() {
    schedule=v-half text='' data_path='' steps=200 ranks=4 verbose='' megatron_args=()
    while (($#)); do
        case $1 in
            -h | --help) usage && exit ;;
            --verbose) verbose=--verbose && shift ;;
            --) shift && megatron_args=("$@") && return ;;
            --schedule | --text | --data-path | --steps | --ranks)
                (($# > 1)) || die "$1 needs a value"
                local name=${1#--}
                printf -v "${name//-/_}" '%s' "$2"
                shift 2
                ;;
            *) die "unknown option $1; flags for Megatron's trainer go after --" ;;
        esac
    done
}

check_options() {
    [[ $steps =~ ^[1-9][0-9]*$ ]] || die "--steps must be a positive number, not '$steps'"
    [[ $ranks =~ ^[1-9][0-9]*$ ]] || die "--ranks must be a positive number, not '$ranks'"
    [[ -z $text || -z $data_path ]] || die "--text and --data-path exclude each other"
    if [[ -n $data_path ]]; then
        [[ -f $data_path.bin && -f $data_path.idx ]] ||
            die "--data-path $data_path: there is no $data_path.bin with a $data_path.idx"
    fi
}

count_gpus() {
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true
    else
        echo 0
    fi
}

# Sets device_args, and hides GPUs that are too few: the ranks would not agree on a device.
choose_device() {
    if (($(count_gpus) >= ranks)); then
        device_args=(--distributed-backend nccl --bf16)
        return
    fi
    export CUDA_VISIBLE_DEVICES=''
    device_args=(--distributed-backend gloo)
}

parse_options "$@"
check_options
make_environment .venv megatron,search,draw constraints.txt
# Megatron and its libraries warn of each optional package that is not there, on every rank.
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
if [[ -z $data_path ]]; then
    data_path=$(.venv/bin/python scripts/prepare_text.py ${text:+--text "$text"})
fi
tokenizer_args=()
if [[ -f $data_path.model ]]; then
    tokenizer_args=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$data_path.model")
fi
choose_device

# One layer for each of the 2 * ranks stages of a V, and eight where that divides.
layers=$((8 % (2 * ranks) == 0 ? 8 : 2 * ranks))
# Warm up for a twentieth, and show ten losses.
warmup=$(((steps + 19) / 20))
log_interval=$(((steps + 9) / 10))
runs=runs/$(basename "$schedule" .json)
# The passes of four steps are measured, and what follows from them is held against four later ones.
profile_args=()
if ((steps >= 12)) && [[ $schedule != 1f1b && $schedule != interleaved-1f1b ]]; then
    profile_args=(--pipeline-profile-iterations 3:6)
fi
say "training $steps steps with --pipeline-schedule $schedule on $ranks ranks," \
    "${device_args[1]}; TensorBoard's files go to $runs, the full log to $runs/log.txt"

exec .venv/bin/python scripts/watch_training.py ${verbose:+"$verbose"} --log "$runs/log.txt" \
    .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    scripts/pretrain_gpt.py \
    --pipeline-schedule "$schedule" --pipeline-model-parallel-size "$ranks" \
    --num-layers "$layers" --hidden-size 128 --num-attention-heads 4 \
    --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope \
    --micro-batch-size 1 --global-batch-size 16 \
    --attention-dropout 0 --hidden-dropout 0 \
    --data-path "$data_path" --split 90,8,2 --num-workers 0 "${tokenizer_args[@]}" \
    --train-iters "$steps" --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine \
    --lr-warmup-iters "$warmup" --weight-decay 0.1 --adam-beta2 0.95 \
    --eval-interval 100 --eval-iters 2 --log-interval "$log_interval" \
    --tensorboard-dir "$runs" --tensorboard-log-interval 1 \
    --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion \
    --no-persist-layer-norm --no-rope-fusion \
    "${profile_args[@]}" "${device_args[@]}" "${megatron_args[@]}"

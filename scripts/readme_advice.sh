#!/usr/bin/env bash
# Reproduces the example of README.md: advise on a public SLURM script, Llama 3 70B of swiss-ai.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

folder=.cache/readme
url=https://raw.githubusercontent.com/swiss-ai/Megatron-LM/81d44dbe25c22190989fa8a12284bdb8d1303b40
make_environment .venv megatron,search constraints.txt
mkdir -p "$folder"
curl --fail --silent --show-error --location --output "$folder/submit-llama3-70b.sh" \
    "$url/submit-llama3-70b.sh"
export XDG_CACHE_HOME=$PWD/.cache
.venv/bin/megatron-vshape advise --gpus 128xGH200 --vocabulary 131072 --fetch \
    --write "$folder/best.sh" -- "$folder/submit-llama3-70b.sh"

"""Flags and environment of a dry run: those of the command without its files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import Command

FILES = """
    --data-path --train-data-path --valid-data-path --test-data-path --data-cache-path
    --data-args-path --per-split-data-args-path --per-dataset-sequences-path --vocab-file
    --merge-file --tokenizer-model --tokenizer-metadata --tiktoken-pattern --split --mock-data
    --tokenizer-type --vocab-size --trust-remote-code --tokenizer-prompt-format --num-workers
    --no-mmap-bin-files --finetune --load --save --save-interval --save-retain-interval
    --pretrained-checkpoint --exit-interval --exit-duration-in-mins --exit-signal-handler
    --use-checkpoint-args --use-checkpoint-opt_param-scheduler --override-opt_param-scheduler
    --override-opt-param-scheduler --use-persistent-ckpt-worker --async-save
    --async-strategy --async-ckpt-use-cpu-shm --auto-detect-ckpt-format --ckpt-step
    --ckpt-fully-parallel-load --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save
    --ckpt-fully-parallel-load-per-rank-objects --ckpt-drop-redundant-extra-state
    --ckpt-assume-constant-structure --dist-ckpt-strictness --dist-ckpt-save-pre-mcore-014
    --dist-ckpt-optim-fully-reshardable --non-persistent-save-interval --non-persistent-ckpt-type
    --no-ckpt-load-validate-sharding-integrity --no-load-optim --no-load-rng --no-save-optim
    --no-save-rng --no-use-tokenizer-model-from-checkpoint-args --dataloader-type
    --tensorboard-dir --tensorboard-log-interval --tensorboard-queue-size --wandb-project
    --wandb-entity --wandb-exp-name --wandb-save-dir --log-interval --log-progress --log-energy
    --log-memory-to-tensorboard --log-timers-to-tensorboard --log-memory-interval
    --log-validation-ppl-to-tensorboard --logging-level --log-straggler --straggler-minmax-count
    --disable-straggler-on-startup --enable-experimental-wandb --eval-iters --eval-interval
    --eval-global-batch-size --profile --profile-step-start --profile-step-end --profile-ranks
    --use-pytorch-profiler --record-memory-history --memory-snapshot-path
    --run-workload-inspector-server
    --enable-ft-package --calc-ft-timeouts --enable-one-logger --one-logger-project
    --one-logger-run-name --one-logger-async --distributed-backend --distributed-timeout-minutes
    --local-rank --high-priority-stream-groups --check-weight-hash-across-dp-replicas-interval
    --use-mcore-models --manual-gc --manual-gc-interval
    --lazy-mpu-init --data-parallel-random-init --pipeline-trace --pipeline-timeout
    --reset-attention-mask
    --fim-data --fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix
    --fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token
""".split()
"""Flags of data, tokenizers, checkpoints and logs, which do not change the memory of a step.
--eval-iters and similar flags are replaced."""


VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "GPTSentencePieceTokenizer": 256000,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
    "TikTokenizer": 131072,
}
"""Usual vocabulary sizes of tokenizers; --vocabulary overrides them."""


def evaluation_of(command: Command) -> list[str]:
    """Return the flags of a command's evaluation, which `without_files` removes."""
    flags = ("--eval-iters", "--eval-global-batch-size")
    values = {flag: command.value(flag) for flag in flags}
    values["--eval-iters"] = values["--eval-iters"] or str(_EVAL_ITERS)
    return [word for flag, value in values.items() if value is not None for word in (flag, value)]


_EVAL_ITERS = 100
"""Default of Megatron's --eval-iters."""


def without_files(command: Command, vocabulary: int | None = None) -> list[str]:
    """Return the flags without those about files, plus the flags that a dry run needs.

    Raises:
        ScheduleError: The vocabulary size is unknown.
    """
    flags = [_absolute_path(word) for word in command.without(FILES.__contains__).flags]
    size = vocabulary or command.number("--vocab-size", 0) or count_tokens(command)
    flags += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(size)]
    flags += ["--num-workers", "0", "--log-interval", "1", "--eval-iters", "0"]
    if not command.has("--lr"):
        flags += ["--lr", "1e-4", "--min-lr", "1e-5"]
    if not command.has("--train-iters") and not command.has("--train-samples"):
        flags += ["--train-iters", "100"]
    return flags


def _absolute_path(word: str) -> str:
    """Make the path of an existing file absolute: a dry run has a working directory of its own."""
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{flag}{equals}{Path(value).resolve()}" if os.path.isfile(value) else word


def count_tokens(command: Command) -> int:
    """Return the number of tokens of a command's tokenizer.

    The files of a Hugging Face tokenizer are read if they are in a local folder.

    Raises:
        ScheduleError: neither the command nor a file has the number.
    """
    kind = command.value("--tokenizer-type", "GPT2BPETokenizer") or ""
    size = command.number("--padded-vocab-size", 0) or VOCABULARIES.get(kind, 0)
    size = size or _tokens_in_folder(Path(command.value("--tokenizer-model") or ""))
    if not size:
        raise ScheduleError(
            f"--tokenizer-type {kind} has no known number of tokens, and there is no "
            "local folder with its files: add --vocabulary N before the --"
        )
    return size


def _tokens_in_folder(folder: Path) -> int:
    """Return the tokens in a Hugging Face tokenizer's folder; 0 if there is none."""
    try:
        content = json.loads((folder / "tokenizer.json").read_text())
        tokens = [*content["model"]["vocab"].values()]
        tokens += [token["id"] for token in content.get("added_tokens", [])]
        return 1 + max(map(int, tokens))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        pass  # some models have no such file, or a list of tokens in it
    try:
        return int(json.loads((folder / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


_CHECKED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_GRAPH_REGISTER", "CUDA_GRAPHS_USE_NODE_PRIORITY")


VARIABLES = ("NVTE_", "CUBLAS_", "CUDA_DEVICE_", "PYTORCH_", *_CHECKED)
"""Prefixes of the environment variables that affect the allocations of a command, and those that
Megatron checks, such as NCCL_GRAPH_REGISTER with CUDA graphs and expandable segments."""


def environment_of(command: Command) -> dict[str, str]:
    """Return the environment variables that affect the command's allocations."""
    return variables_of_step({**os.environ, **command.environment})


def variables_of_step(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with one of the prefixes `VARIABLES`."""
    return {name: value for name, value in variables.items() if name.startswith(VARIABLES)}

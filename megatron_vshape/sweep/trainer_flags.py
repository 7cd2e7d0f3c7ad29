"""From a combination to the trainer's command line."""

from pathlib import Path

from megatron_vshape.core.model.layers import AUTO_SPLIT
from megatron_vshape.core.model.placement import looping
from megatron_vshape.sweep.files import Layout, Loaded, Model, Recompute
from megatron_vshape.sweep.grid import Combination, count_stages, layers_of_stages


def trainer_command(
    loaded: Loaded, combination: Combination, schedule_file: Path | None = None
) -> list[str]:
    """Return the trainer's script with its flags; the sweep's own flags come last, so they win.

    `schedule_file` replaces the schedule's name, for the orders that have none.
    """
    it, run = combination, loaded.sweep.run
    sizes = {
        "seq-length": it.sequence_length,
        "max-position-embeddings": it.sequence_length,
        "micro-batch-size": it.microbatch_size,
        "global-batch-size": it.global_batch_size,
        "tensor-model-parallel-size": it.tensor_parallel,
        "pipeline-model-parallel-size": it.pipeline_parallel,
        "context-parallel-size": it.context_parallel,
        "pipeline-schedule": schedule_file or it.schedule,
        "train-iters": run.warmup_steps + run.measured_steps,
    }
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    flags += model_flags(loaded.model)
    if it.tensor_parallel > 1:
        flags.append("--sequence-parallel")
    if it.recompute is Recompute.FULL:
        flags += "--recompute-granularity full --recompute-method uniform".split()
        flags += ["--recompute-num-layers", "1"]
    if it.layout is Layout.BALANCED:
        stages = count_stages(it.schedule, it.pipeline_parallel)
        placement = looping(it.pipeline_parallel, stages // it.pipeline_parallel)
        layers = layers_of_stages(it, loaded.model, placement)
        flags += ["--pipeline-layer-split", ",".join(map(str, layers))]
    if it.layout is Layout.AUTO:
        flags += ["--pipeline-layer-split", AUTO_SPLIT]
    if it.vocab_parallel:
        flags.append("--pipeline-vocab-parallel")
    link = loaded.cluster.host_link
    if schedule_file is not None and link is not None and link.memory_gib is not None:
        flags += ["--pipeline-host-memory-limit", str(link.memory_gib)]
    if loaded.sweep.post_validation:
        # Megatron's check for reruns would hold all ranks up as the norm does.
        flags += "--optimizer-post-validation --rerun-mode disabled".split()
    flags += _device_flags(loaded)
    return [run.script, *flags, *_TRAINING, *run.arguments, *it.arguments]


_TRAINING = (
    "--mock-data --tokenizer-type NullTokenizer --lr 1e-4 --min-lr 1e-5 --lr-decay-style constant "
    "--eval-iters 0 --eval-interval 1000000 --log-interval 1 --num-workers 0"
).split()


def model_flags(model: Model) -> list[str]:
    """Return the trainer's flags that make its GPT this model, whatever the tokenizer."""
    sizes = {
        "num-layers": model.layers,
        "hidden-size": model.hidden_size,
        "num-attention-heads": model.attention_heads,
        "ffn-hidden-size": model.ffn,
        # The tokenizer that makes up numbers adds one, and Megatron pads to the divisor.
        "vocab-size": model.vocabulary_size - 1,
        "make-vocab-size-divisible-by": 1,
        "position-embedding-type": "rope",
    }
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    if model.groups != model.attention_heads:
        flags += ["--group-query-attention", "--num-query-groups", str(model.groups)]
    if model.gated:
        flags.append("--swiglu")
    if model.mtp_layers:
        flags += ["--mtp-num-layers", str(model.mtp_layers)]
    if not model.tied_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    if not model.dropout:
        flags += "--attention-dropout 0 --hidden-dropout 0".split()
    return flags


def _device_flags(loaded: Loaded) -> list[str]:
    if loaded.cluster.backend == "gloo":
        return (
            "--distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion "
            "--no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion"
        ).split()
    flags = "--distributed-backend nccl --use-distributed-optimizer".split()
    return [*flags, "--bf16"] if loaded.model.parameter_bytes == 2 else flags

"""Minimal trainers of libraries other than Megatron-LM, on megatron.core alone.

Each emulates the special behavior of a library. `bridge` (NVIDIA's Megatron-Bridge) defers the
checks of its config, queries the stage with core.pipeline_parallel.utils and reads losses on the
physical last rank. `verl` initializes the process groups before it has a config, queries
parallel_state, and gives every call another number of microbatches of other lengths; it reads
results from the rank with the highest number. `areal` drops the results of the call and reads the
values that its loss closure collected on the last stage according to parallel_state. `any` reads
losses in all known ways (`READERS`). `rl` (megatron/rl in Megatron-LM) uses a rank's first chunk as
its model and computes log-probabilities with its old weights and with others between two steps, one
microbatch per call and without a loss function; it reads them on the physical last rank and sends
them to all. All of them import Megatron's functions by name before any schedule is registered, and
none needs Megatron-LM's trainer; `parsing_trainer` has one that does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.utils import (
    get_pp_last_rank,
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

import megatron_vshape
from megatron_vshape.mcore.features.vocabulary.model import Shards

HIDDEN, VOCABULARY, LONGEST = 32, 64, 24

SHARED = "embedding.word_embeddings", "output_layer"

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_aux_loss_coeff": 1e-2,
    "expert_model_parallel_size": 2,
    "add_bias_linear": False,
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
}
"""Of a model with experts on two ranks."""


@dataclass
class DeferredConfig(TransformerConfig):
    """A config that runs its checks on request only."""

    def __post_init__(self) -> None:
        pass

    def finalize(self) -> None:
        """Check it as Megatron does."""
        TransformerConfig.__post_init__(self)


@dataclass
class HybridProvider(DeferredConfig):
    """A config that builds hybrid models, and assumes one chunk as Megatron-Bridge's does."""

    pattern: str | None = None

    def provide(self, pre_process=None, post_process=None, vp_stage=None):
        chunks = getattr(self, "virtual_pipeline_model_parallel_size", None)
        assert chunks is None and vp_stage is None, "no chunks in hybrid models"  # noqa: PT018
        ends = {"pre_process": pre_process, "post_process": post_process}
        return build(self, self.pattern, False, ends)


def make_config(shape: str, ranks: int, trainer_options: dict[str, Any]) -> Any:
    """Return the model's config, made as this library does."""
    sizes: dict[str, Any] = {
        # One per stage of a V, or one per letter.
        "num_layers": len(trainer_options.get("pattern", "").replace("|", "")) or 2 * ranks,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "pipeline_dtype": torch.float32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "variable_seq_lengths": shape == "verl",
        "moe_token_dispatcher_type": "alltoall",  # which alone allows other lengths
        "is_hybrid_model": "pattern" in trainer_options,
        "use_cpu_initialization": True,
        "mamba_head_dim": 16,
        "mamba_num_groups": 2,
        "mtp_num_layers": trainer_options.get("predicting"),
    }
    sizes |= trainer_options.get("config", {})
    if "beside" in trainer_options:
        sizes |= EXPERTS | {"overlap_moe_expert_parallel_comm": trainer_options["beside"]}
    if shape != "bridge":
        tensor = trainer_options.get("tensor", 1)
        return TransformerConfig(
            pipeline_model_parallel_size=ranks, tensor_model_parallel_size=tensor, **sizes
        )
    config = trainer_options.get("provider", DeferredConfig)(**sizes)
    if "pattern" in trainer_options:
        config = HybridProvider(**sizes, pattern=trainer_options["pattern"])
    config.pipeline_model_parallel_size = ranks
    config.finalize()
    return config


def make_model(shape: str, config: Any, trainer_options: dict[str, Any]) -> list[nn.Module]:
    """Return this rank's chunks, with embedding and output layer where the library expects them."""
    sharded = trainer_options.get("distributed_optimizer", False)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.bf16,
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=sharded,
        overlap_param_gather=sharded,
    )
    chunks = config.virtual_pipeline_model_parallel_size
    if shape != "bridge":
        chunks = mpu.get_virtual_pipeline_model_parallel_world_size()
    group = mpu.get_pipeline_model_parallel_group()
    model = []
    for chunk in range(chunks or 1):
        where = chunk if chunks else None
        if shape == "bridge":
            first = is_vp_first_stage(where, chunks) and is_pp_first_stage(group)
            last = is_vp_last_stage(where, chunks) and is_pp_last_stage(group)
        else:
            first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=where)
            last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=where)
        ends = {"pre_process": first, "post_process": last, "vp_stage": where}
        if hasattr(config, "provide"):
            module = config.provide(**ends)
        else:
            ties = trainer_options.get("ties", shape == "areal")
            position = trainer_options.get("position", "rope")
            module = build(config, trainer_options.get("pattern"), ties, ends, position)
        if config.params_dtype is torch.float64:
            module.double()  # the norms as well
        for what in trainer_options.get("extends", ()):
            extend(module, what, where, chunks, group)
        fill(module)
        if trainer_options.get("drops_out") == dist.get_rank():
            module.adapter = nn.Dropout(0.1)  # which a library adds when the model has been built
        module = Float16Module(config, module) if config.bf16 else module
        is_one_bucket = bool(chunk) or trainer_options.get("steps_ahead", False)
        model.append(
            DistributedDataParallel(config, ddp_config, module, disable_bucketing=is_one_bucket)
        )
    if shape == "areal":
        tell_tied_embeddings(unwrapped(model[-1 if _is_physically_last() else 0]))
    return model


class Scaled(nn.Module):
    """An embedding that is scaled, as Megatron-Bridge's of Gemma."""

    def forward(self, **options: Any) -> Tensor:
        return super().forward(**options) * 5


class Shifted(nn.Module):
    """An embedding that looks up other tokens than it is given."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return super().forward(input_ids=(input_ids + 1) % VOCABULARY, position_ids=position_ids)


class Doubled(VocabParallelEmbedding):
    """A word embedding with a scale."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 2


class Capped(ColumnParallelLinear):
    """An output layer whose logits are capped, as Megatron-Bridge's of Gemma 2."""

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        logits, bias = super().forward(*args, **options)
        return 0.05 * torch.tanh(logits / 0.05), bias


def extend(model: nn.Module, what: str, chunk: int | None, chunks: int | None, group: Any) -> None:
    """Extend an end of a chunk that has been built, where Megatron-Bridge believes it to be."""
    first = is_vp_first_stage(vp_stage=chunk, vp_size=chunks) and is_pp_first_stage(group)
    last = is_vp_last_stage(vp_stage=chunk, vp_size=chunks) and is_pp_last_stage(group)
    if model.pre_process and not mpu.is_pipeline_first_stage():
        raise ValueError("this rank has the embedding and is said not to be the first stage")
    if what == "replaced":
        replace_embedding(model)
    if what in ("scaled", "shifted") and first:
        _extend_instance(model.embedding, Scaled if what == "scaled" else Shifted)
    if what == "doubled" and first:
        _extend_instance(model.embedding.word_embeddings, Doubled)
    if what == "capped" and last:
        _extend_instance(model.output_layer, Capped)
    if what == "hooked" and last:
        model.output_layer.register_forward_hook(lambda *call: None)
    if what == "critic" and last:
        model.output_layer = nn.Linear(HIDDEN, 1)
        model.output_layer.tp_group = mpu.get_tensor_model_parallel_group()
    if what == "other loss" and last:
        model.compute_language_model_loss = lambda labels, logits: logits.sum(-1).t()


def replace_embedding(model: nn.Module) -> None:
    """Give a chunk that has been built another embedding, as Megatron-Bridge's Gemma 3 does."""
    if hasattr(model, "embedding"):
        sizes = {"vocab_size": VOCABULARY, "max_sequence_length": LONGEST}
        model.embedding = OtherEmbedding(
            model.config, **sizes, position_embedding_type=model.position_embedding_type
        )
    if hasattr(model, "embedding") or hasattr(model, "output_layer"):
        model.setup_embeddings_and_output_layer()


class OtherEmbedding(LanguageModelEmbedding):
    """An embedding that a library puts in the place of Megatron's."""

    def forward(self, **options: Any) -> Tensor:
        return super().forward(**options) * 5


def _extend_instance(module: nn.Module, mixin: type) -> None:
    base = type(module)
    module.__class__ = type(base.__name__, (mixin, base), {})


def tell_tied_embeddings(chunk: nn.Module) -> None:
    """Have the ranks that share an embedding have one, as Megatron-Bridge does on loading one.

    It looks at the last chunk of the last rank, and at the first chunk of others.
    """
    group = mpu.get_embedding_group(check_initialized=False)
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    if dist.get_rank() not in ranks:
        return
    if hasattr(chunk, "embedding"):
        weight = chunk.embedding.word_embeddings.weight.data
    else:
        weight = torch.empty_like(chunk.output_layer.weight.data)
    dist.broadcast(weight, src=ranks[0], group=group)
    if hasattr(chunk, "output_layer"):
        chunk.output_layer.weight.data.copy_(weight)


def build(
    config: Any, pattern: str | None, ties: bool, ends: dict[str, Any], position: str = "rope"
) -> nn.Module:
    """Return a chunk of a GPT, or of a hybrid model with layers of this pattern."""
    sizes = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": LONGEST,
        "position_embedding_type": position,
        "share_embeddings_and_output_weights": ties,
    }
    if pattern is None:
        layer, mtp_spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts), None
        if config.mtp_num_layers is not None:
            mtp_spec = get_gpt_mtp_block_spec(config, layer, False, ends["vp_stage"])
        return GPTModel(config, layer, mtp_block_spec=mtp_spec, **sizes, **ends)
    from hybrid_local import local_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel(config, local_stack_spec, hybrid_layer_pattern=pattern, **sizes, **ends)


def names_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a chunk by their names in the full model.

    The name of a weight with rows on several ranks ends with the number of its first row, and the
    name of an expert contains its rank.
    """
    shards = shards_of(model)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if name.startswith("decoder.layers."):
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number)
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            parts = "embedding.word_embeddings.weight".split(".")
        first = f"@{shards[parameter].rank() * len(parameter):04d}" if parameter in shards else ""
        if "local_experts" in parts:
            parts += ["on", str(mpu.get_expert_model_parallel_rank())]
        yield ".".join(parts) + first, parameter


def shards_of(model: nn.Module) -> dict[nn.Parameter, Any]:
    """Return the parameters whose rows pipeline or tensor ranks share, and how."""
    return {
        module.weight: module.tp_group
        for name, module in model.named_modules()
        if getattr(module, "weight", None) is not None
        and (
            isinstance(getattr(module, "tp_group", None), Shards)
            or (name in SHARED and module.tp_group.size() > 1)
        )
    }


def fill(model: nn.Module) -> None:
    """Give every weight values that follow from its name."""
    fill_parameters(names_of(model))


def fill_parameters(named_parameters: Iterator[tuple[str, nn.Parameter]]) -> None:
    """Give weights values that follow from their names in the full model."""
    for name, parameter in named_parameters:
        if parameter.dim() > 1:
            name, _, first = name.partition("@")
            seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
            generator = torch.Generator().manual_seed(seed)
            shape = (VOCABULARY, HIDDEN) if first else parameter.shape
            rows = slice(int(first), int(first) + len(parameter)) if first else slice(None)
            with torch.no_grad():
                parameter.copy_(torch.randn(shape, generator=generator)[rows] * 0.1)


def batches(
    step: int, count: int, lengths: list[int], sequences: Sequence[int] = (1,)
) -> Iterator[dict[str, Tensor]]:
    """Yield a step's microbatches, whose lengths and numbers of sequences repeat these."""
    for index in range(count):
        generator = torch.Generator().manual_seed(1000 * step + index)
        size = sequences[index % len(sequences)], lengths[index % len(lengths)] + 1
        tokens = torch.randint(0, VOCABULARY, size, generator=generator)
        yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def unwrapped(chunk: Any) -> Any:
    """Return the chunk's model."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def causal_mask(length: int) -> Tensor:
    """Return the mask [1, 1, s, s] of later tokens."""
    return torch.triu(torch.ones(1, 1, length, length), diagonal=1).bool()


def mean_loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of the output as the loss and in a report."""
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def run_step(
    forward_step: Callable[..., Any],
    data: Any,
    model: list[nn.Module],
    count: int,
    length: int = 1,
    size: int = 1,
    forward_only: bool = False,
) -> list[Any]:
    """Run the passes of a step; return the reports of its microbatches on the last rank.

    The length is the config's sequence length, 1 if lengths vary, and the size the microbatch's.
    """
    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=count,
        seq_length=length,
        micro_batch_size=size,
        forward_only=forward_only,
    )
    return reports


def named_parameters(model: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of this rank's chunks by their names in the full model."""
    return [pair for chunk in model for pair in names_of(unwrapped(chunk))]


def gradients_of(model: list[nn.Module]) -> dict[str, Tensor]:
    """Return copies of the gradients by names."""
    return {name: parameter.main_grad.clone() for name, parameter in named_parameters(model)}


def forward(
    shape: str,
    collected: list[float],
    data: Any,
    model: nn.Module,
    return_schedule_plan: bool = False,
    reads_logits: str | None = None,
    seen_lengths: list[int] | None = None,
    smoothing: float = 0.0,
) -> tuple[Any, Any]:
    """Run a microbatch, or return its plan; only the first and last stage get their data."""
    batch = next(data)
    if seen_lengths is not None and unwrapped(model).pre_process:
        seen_lengths.append(batch["tokens"].shape[1])
    if shape == "bridge":
        group = mpu.get_pipeline_model_parallel_group()
        ends = is_pp_first_stage(group), is_pp_last_stage(group)
    else:
        ends = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    tokens = batch.pop("tokens")  # some libraries modify their batch
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    mask = causal_mask(tokens.shape[1])
    labels = batch["labels"] if ends[1] else None
    reads = ends[0] or (ends[1] and getattr(unwrapped(model), "mtp_process", False))
    call = model.build_schedule_plan if return_schedule_plan else model
    if reads_logits is not None:
        return read_logits(reads_logits, collected, model, (tokens, positions, mask), smoothing)
    output = call(tokens if reads else None, positions, mask, labels=labels)

    def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, report = mean_loss(output)
        collected.append(loss.item())
        return loss, report

    return output, loss_of


def of_answers(
    logits: Tensor, tokens: Tensor, model: nn.Module, smoothing: float = 0.0
) -> dict[str, Tensor]:
    """Return log-probabilities of the next tokens and the entropy, [b, s], as RL libraries do.

    The logits are the rows of a tensor-parallel rank. `branched` are log-probabilities by code that
    assumes the full vocabulary if there is one such rank (ms-swift), `tuned` the losses that the
    model itself computes (its GKD).
    """
    group, labels = mpu.get_tensor_model_parallel_group(), tokens.roll(-1, 1)
    logits.div_(0.8)  # a temperature, in place as verl's
    tuned = unwrapped(model).compute_language_model_loss(labels, logits.clone().transpose(0, 1))
    return {
        "log_probs": -vocab_parallel_cross_entropy(logits.clone(), labels, smoothing),
        "entropy": Entropy.apply(logits, group),
        "branched": branched(logits, labels),
        "tuned": tuned,
    }


def branched(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log-probabilities of the labels, of sharded logits if there are several ranks."""
    if mpu.get_tensor_model_parallel_world_size() == 1:
        return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -vocab_parallel_cross_entropy(logits.clone(), labels)


def padded(tokens: Tensor) -> Tensor:
    """Return tokens padded to a multiple of the tensor-parallel ranks, as verl does."""
    ranks = mpu.get_tensor_model_parallel_world_size()
    return nn.functional.pad(tokens, (0, -tokens.shape[1] % ranks))


class Entropy(torch.autograd.Function):
    """The entropy of rows distributed over a group, with the gradient of local rows (verl)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        maximum = logits.amax(-1, keepdim=True)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
        powers = (logits - maximum).exp()
        total = powers.sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        softmax = powers / total
        mean = (softmax * logits).sum(-1, keepdim=True)
        dist.all_reduce(mean, group=group)
        ctx.save_for_backward(softmax, logits - mean)
        return (maximum + total.log() - mean).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        softmax, distance = ctx.saved_tensors
        return -softmax * distance * gradients[0].unsqueeze(-1), None


def policy_loss(tokens: Tensor, collected: list[float], outputs: dict[str, Tensor]) -> Any:
    """Return a loss of log-probabilities and entropy, and the metrics of both."""
    worth = torch.linspace(-1, 2, tokens.shape[1])
    old_log_probs = -4.0 + 0.1 * tokens
    ratio = (0.1 * (outputs["log_probs"] - old_log_probs)).exp()
    loss = -torch.min(ratio * worth, ratio.clamp(0.8, 1.3) * worth).mean()
    loss = loss - 0.1 * outputs["entropy"].mean() - 0.01 * outputs["branched"].mean()
    loss = loss + 0.01 * outputs["tuned"].mean()
    collected.append(loss.item())
    return loss, {
        "loss": loss.detach(),
        **{name: value.detach() for name, value in outputs.items()},
    }


def read_logits(
    where: str,
    collected: list[float],
    model: nn.Module,
    call: tuple[Tensor, ...],
    smoothing: float = 0.0,
) -> tuple[Any, Any]:
    """Call the model without labels, and compute results from its logits.

    `where` is "call", next to the model's call as in verl, or "loss", in the returned function as
    in slime.
    """
    tokens = call[0]
    read = padded(tokens)
    output = model(*call)
    if padded(tokens).shape != read.shape:
        raise ValueError("labels are padded otherwise than the tokens that the model was given")
    has_logits = unwrapped(model).post_process and mpu.is_pipeline_last_stage()
    if where == "call":
        outputs = of_answers(output, tokens, model, smoothing) if has_logits else output
        return outputs, partial(policy_loss, tokens, collected)
    return output, lambda logits: policy_loss(
        tokens, collected, of_answers(logits, tokens, model, smoothing)
    )


def losses_of(shape: str, returned: list[Any], collected: list[float]) -> list[float]:
    """Return a step's losses where the library reads them, as it does; elsewhere none."""
    reader = {"bridge": physically_last, "areal": by_closure}.get(shape, by_rank)
    return reader(returned, collected) or []


def by_rank(returned: list[Any], collected: list[float]) -> list[float] | None:
    """Create output on the reported last stage, and read it from the last rank (verl).

    ROLL reads it there too.
    """
    losses = (
        [loss_dict["loss"].item() for loss_dict in returned]
        if mpu.is_pipeline_last_stage()
        else None
    )
    return losses if _is_physically_last() else None


def by_closure(returned: list[Any], collected: list[float]) -> list[float] | None:
    """Read the collection of the loss functions on the reported last stage (AReaL)."""
    return collected if mpu.is_pipeline_last_stage(ignore_virtual=True) else None


def physically_last(returned: list[Any], collected: list[float]) -> list[float] | None:
    """Read on the last rank according to core's utilities (Megatron-Bridge, Megatron-LM)."""
    is_mine = is_pp_last_stage(mpu.get_pipeline_model_parallel_group())
    return [loss_dict["loss"].item() for loss_dict in returned] if is_mine else None


def where_said(returned: list[Any], collected: list[float]) -> list[float] | None:
    """Read the result of the call on the reported last stage (slime)."""
    is_mine = mpu.is_pipeline_last_stage(ignore_virtual=True)
    return [loss_dict["loss"].item() for loss_dict in returned] if is_mine else None


def logged(returned: list[Any], collected: list[float]) -> list[float] | None:
    """Sum over replicas on the reported last stage, and log on the last rank of all.

    This is the behavior of ms-swift.
    """
    losses = torch.tensor([loss_dict["loss"].item() for loss_dict in returned])
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        dist.all_reduce(losses, group=mpu.get_data_parallel_group(with_context_parallel=True))
    is_mine = dist.get_rank() == dist.get_world_size() - 1
    return losses.tolist() if is_mine else None


def broadcast(returned: list[Any], collected: list[float]) -> list[float] | None:
    """Send from the last rank by its name on the reported last stage (NeMo-RL)."""
    losses: list[Any] = [None]
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        losses = [[loss_dict["loss"].item() for loss_dict in returned]]
    source = mpu.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(losses, src=source, group=mpu.get_pipeline_model_parallel_group())
    return losses[0]


def summed_up(returned: list[Any], collected: list[float]) -> list[float] | None:
    """Sum the values of the ranks of the pipeline that have any (ROLL's mcore_adapter)."""
    total = torch.tensor(sum((loss_dict["loss"].item() for loss_dict in returned), 0.0))
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        dist.all_reduce(total, group=mpu.get_data_parallel_group())
        total /= mpu.get_data_parallel_world_size()
    dist.all_reduce(total, group=mpu.get_pipeline_model_parallel_group())
    return [total.item()]


def _is_physically_last() -> bool:
    ranks = mpu.get_pipeline_model_parallel_world_size()
    return mpu.get_pipeline_model_parallel_rank() == ranks - 1


READERS = by_rank, by_closure, physically_last, where_said, logged, broadcast, summed_up
"""Readers of a step's losses as in the libraries, each on the ranks that it uses."""


def read_all_ways(shape: str, read: dict[str, Any], *results: Any) -> None:
    """Add the values of every reader for a step to `read`, if all are tested."""
    for reader in READERS if shape == "any" else ():
        read[reader.__name__].append(reader(*results))


def iterators(trainer_options: dict[str, Any], model: list[nn.Module], *step: Any) -> Any:
    """Return a step's microbatches, by default a list with an iterator per chunk."""
    if trainer_options.get("reads_other_data") == dist.get_rank():
        step = step[0] + 100, *step[1:]
    step = *step, trainer_options.get("sequences", (1,))
    one, how = batches(*step), trainer_options.get("iterators")
    lists = {"listed": [one], "repeated": [one] * len(model), "bare": one}
    return lists[how] if how else [batches(*step) for _ in model]


def overlap(config: Any, model: list[nn.Module]) -> None:
    """Have the gradients of a chunk reduced while others run, as libraries do."""
    for name, method_name in (("no_sync_func", "no_sync"), ("grad_sync_func", "start_grad_sync")):
        functions = [getattr(chunk, method_name) for chunk in model]
        setattr(config, name, functions if len(functions) > 1 else functions[0])


def set_up(
    shape: str, trainer_options: dict[str, Any], tensor: int = 1, ranks: int = 0
) -> tuple[Any, list[nn.Module]]:
    """Return the config and this rank's chunks, on `ranks` pipeline ranks (0: all)."""
    ranks = ranks or dist.get_world_size() // tensor
    if shape == "bridge":
        config = make_config(shape, ranks, trainer_options)
        chunks = config.virtual_pipeline_model_parallel_size
        experts = {"expert_model_parallel_size": config.expert_model_parallel_size}
        mpu.initialize_model_parallel(1, ranks, chunks, **experts)
    else:
        mpu.initialize_model_parallel(tensor, ranks)
        config = make_config(shape, ranks, trainer_options)
    model_parallel_cuda_manual_seed(1)
    model = make_model(shape, config, trainer_options)
    config.finalize_model_grads_func = finalize_model_grads
    return config, model


def train(trainer_options: dict[str, Any]) -> dict[str, Any]:
    """Return the results of this rank for three steps, of which the second evaluates.

    Results are the losses, the norms of all gradients, the last gradients, and the final
    parameters.
    """
    shape, ranks = trainer_options["shape"], trainer_options.get("pipeline", dist.get_world_size())
    config, model = set_up(shape, trainer_options, trainer_options.get("tensor", 1), ranks)
    settings = OptimizerConfig(
        optimizer="sgd", lr=0.1, bf16=config.bf16, params_dtype=config.params_dtype
    )
    if trainer_options.get("distributed_optimizer"):
        steps_ahead = trainer_options.get("steps_ahead", False)
        settings = OptimizerConfig(
            lr=1e-3,
            clip_grad=0.0,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
            overlap_param_gather_with_optimizer_step=steps_ahead,
        )
        overlap(config, model)
    optimizer = get_megatron_optimizer(settings, model)
    replica = mpu.get_data_parallel_rank()
    losses: list[list[float]] = []
    norms: list[float] = []
    outputs_by_step: list[Any] = []
    lengths_by_step: list[list[int]] = []  # as the first stage is given them
    read: dict[str, list[list[float] | None]] = {reader.__name__: [] for reader in READERS}
    # The scan of Mamba's layers is a loop in Python, and needs half of the time.
    usual = 4 if "pattern" in trainer_options else 8
    counts = (8, 4, 8) if shape == "verl" else (usual,) * 3
    if "counts" in trainer_options:  # of each replica
        counts = trainer_options["counts"][replica]
    for step, count in enumerate(counts):
        lengths = [LONGEST, 7, 16] if shape == "verl" else [LONGEST]
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        collected: list[float] = []
        lengths_by_step.append([])
        forward_step = partial(
            forward,
            shape,
            collected,
            reads_logits=trainer_options.get("reads_logits"),
            seen_lengths=lengths_by_step[-1],
            smoothing=trainer_options.get("smoothing", 0.0),
        )
        data = iterators(trainer_options, model, step + 10 * replica, count, lengths)
        length = 1 if shape == "verl" else LONGEST
        returned = run_step(forward_step, data, model, count, length, forward_only=step == 1)
        losses.append(losses_of(shape, returned, collected))
        outputs_by_step.append([{**report} for report in returned if "log_probs" in report])
        if step == 1 and trainer_options.get("fails") == dist.get_rank():
            raise KeyError("metrics")  # as a library does that finds no results
        read_all_ways(shape, read, returned, collected)
        if step != 1:
            norms.append(float(optimizer.step()[1] or 0.0))
    if trainer_options.get("distributed_optimizer"):
        for chunk in model:
            chunk.disable_forward_pre_hook()  # waits for running all-gathers
    is_sharded = trainer_options.get("distributed_optimizer")  # then a replica has a part
    return {
        "losses": losses,
        "read": read,
        "made": outputs_by_step,
        "seen": lengths_by_step,
        "norms": norms,
        "gradients": {} if is_sharded else gradients_of(model),
        "parameters": {
            name: parameter.detach().clone() for name, parameter in named_parameters(model)
        },
        "chunks": len(model),
        "stepped_ahead": settings.overlap_param_gather_with_optimizer_step,
    }


def logprobs_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return log-probabilities [b, s - 1] of the tokens on the last stage, else the sent tensor."""
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    mask = causal_mask(tokens.shape[1])
    output = model(tokens, positions, mask)
    if not is_pp_last_stage(mpu.get_pipeline_model_parallel_group()):
        return output
    return output[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def computed_logprobs(model: nn.Module, rollouts: list[Tensor]) -> Tensor:
    """Return every rank's copy of the log-probabilities of all rollouts."""

    def forward_step(data: Any, model: nn.Module) -> tuple[Tensor, None]:
        model.eval()
        result = logprobs_of(model, next(data))
        model.train()
        return result, None

    group = mpu.get_pipeline_model_parallel_group()
    data, function, log_probs = iter(rollouts), get_forward_backward_func(), []
    for _ in rollouts:
        output = function(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=1,
            seq_length=LONGEST,
            micro_batch_size=1,
            decoder_seq_length=None,
            forward_only=True,
            adjust_tensor_shapes_fn=None,
            collect_non_loss_data=False,
        )
        if is_pp_last_stage(group):
            log_probs.append(output[0].detach())
    every = torch.cat(log_probs) if log_probs else torch.empty(len(rollouts), LONGEST - 1)
    dist.broadcast(every, src=get_pp_last_rank(group), group=group)
    return every


def reinforce(trainer_options: dict[str, Any]) -> dict[str, Any]:
    """Return the losses of three steps of GRPO's shape, and the last gradients, of this rank."""
    config, model = set_up("rl", trainer_options)
    reference = {
        name: 0.5 * value for name, value in model[0].state_dict().items() if value is not None
    }
    losses: list[list[float]] = []
    for step in range(3):
        rollouts = [batch["tokens"] for batch in batches(step, 8, [LONGEST])]
        with torch.no_grad():
            old = computed_logprobs(model[0], rollouts)
            policy_state = {
                name: value.clone()
                for name, value in model[0].state_dict().items()
                if value is not None
            }
            model[0].load_state_dict(reference, strict=False)
            reference_log_probs = computed_logprobs(model[0], rollouts)
            model[0].load_state_dict(policy_state, strict=False)
        model[0].zero_grad_buffer()
        samples = iter(zip(rollouts, old, reference_log_probs, strict=True))

        def forward_step(data: Any, model: nn.Module) -> tuple[Tensor, Any]:
            tokens, old_log_probs, reference = next(data)
            current = logprobs_of(model, tokens)
            if mpu.is_pipeline_last_stage():
                distance = (reference - current).exp() - (reference - current) - 1
                current = (
                    -(current - old_log_probs).exp() * torch.linspace(-1, 2, len(old_log_probs))
                    + distance
                ).mean()
            return current, lambda loss: (loss, {"loss": loss.detach()})

        returned = run_step(forward_step, samples, model, len(rollouts), LONGEST)
        losses.append(losses_of("bridge", returned, []))  # which are read there, too
        with torch.no_grad():
            for parameter in model[0].parameters():
                parameter -= 0.05 * parameter.main_grad
    gradients = gradients_of(model)
    return {"losses": losses, "norms": [], "gradients": gradients, "chunks": len(model)}


def start(rank: int, trainer_options: dict[str, Any]) -> None:
    """Run one of these trainers in a rank of the farm, and end it."""
    if "M" in trainer_options.get("pattern", ""):
        import mamba_on_cpu

        mamba_on_cpu.start(rank, trainer_options)
    if "lengths" in trainer_options:
        trainer_options["options"]["lengths"] = lambda batch: trainer_options["lengths"]
    starts(reinforce if trainer_options["shape"] == "rl" else train)(rank, trainer_options)


def finish(record: dict[str, Any]) -> NoReturn:
    """Save the results as the farm's record of this rank, and end it once all have theirs."""
    torch.save(record, os.environ["FARM_RECORD"])
    dist.barrier()
    megatron_vshape.unregister()
    os._exit(0)


def starts(train: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[int, Any], NoReturn]:
    """Return a plugin's `start`, which registers the given schedule and saves the results."""

    def start(rank: int, trainer_options: dict[str, Any]) -> NoReturn:
        megatron_vshape.unregister()
        dist.init_process_group("gloo")
        if trainer_options["schedule"] is not None:
            options = trainer_options.get("options", {})
            megatron_vshape.register(schedule=trainer_options["schedule"], **options)
        finish(train(trainer_options))

    return start

"""Ways to share a model out: TP, PP and recompute beside those of a command, and what each costs.

A shape is counted with one layer a stage of a V, on the first rank, which has both of the model's
ends, and on the second, whose stages are layers alone; a stage of more layers costs that much more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.rehearsal.counted import SPLIT, WHOLE, counted_costs
from megatron_vshape.rehearsal.flags import Command, sizes_of
from megatron_vshape.rehearsal.gpus import Gpu

TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
RECOMPUTE = ("granularity", "method", "num_layers", "modules")


@dataclass(frozen=True, slots=True)
class Shape:
    """How many ranks share a layer and the layers, and whether the command's recompute is kept."""

    tensor: int
    pipeline: int
    recompute: str  # as the command has it: full, selective, or none

    def told(self) -> str:
        """Return the words for it."""
        words = f"TP {self.tensor} PP {self.pipeline}"
        return words if self.recompute == "none" else f"{words}, {self.recompute} recompute"

    def command(self, command: Command) -> Command:
        """Return the command in this shape."""
        sizes: dict[str, Any] = {TENSOR: self.tensor, PIPELINE: self.pipeline}
        if self.recompute == "none":
            sizes |= {f"recompute_{name}": None for name in RECOMPUTE}
            sizes["recompute_activations"] = None
        if self.tensor > 1:
            sizes["sequence_parallel"] = True
        return command.having(**sizes)


def shape_of(command: Command) -> Shape:
    """Return the command's own shape."""
    sizes = sizes_of(command, None)
    given = command.value("--recompute-granularity")
    selective = "selective" if command.has("--recompute-activations") else "none"
    return Shape(sizes.tensor, sizes.pipeline, given or selective)


def shapes_beside(
    command: Command, gpus: int, keep: Sequence[str], layers: int
) -> Iterator[tuple[Shape, str]]:
    """Yield the other shapes worth a look, nearest first, and why one cannot be, else nothing.

    Recompute is looked at in the command's own sizes, and dropped in all others where it may be.
    """
    own = shape_of(command)
    recomputes = [own.recompute]
    if "recompute" not in keep and own.recompute != "none":
        recomputes.append("none")
    sizes = [(own.tensor, own.pipeline)]
    for tensor, pipeline in ((0.5, 1), (2, 1), (1, 2), (1, 0.5), (0.5, 2), (2, 0.5)):
        changed = int(own.tensor * tensor), int(own.pipeline * pipeline)
        if "tp" in keep and tensor != 1 or "pp" in keep and pipeline != 1:
            continue
        if changed[0] >= 1 and changed[1] >= 2:
            sizes.append(changed)
    wanted = [Shape(*sizes[0], each) for each in recomputes]
    wanted += [Shape(*each, recomputes[-1]) for each in sizes[1:]]
    for shape in wanted[1:]:
        yield shape, _why_not(shape, command, gpus, layers)


def _why_not(shape: Shape, command: Command, gpus: int, layers: int) -> str:
    heads = command.number("--num-attention-heads", 1)
    groups = command.number("--num-query-groups", heads)
    if heads % shape.tensor or groups % shape.tensor:
        return f"{groups} heads do not divide by {shape.tensor}"
    if layers < 2 * shape.pipeline - 2:
        return f"{layers} layers are too few for {2 * shape.pipeline} stages"
    try:
        sizes_of(shape.command(command), gpus)
    except ScheduleError as error:
        return str(error)
    return ""


def jobs_of(command: Command, shape: Shape) -> Iterator[tuple[str, Command, int]]:
    """Yield what is rehearsed for a shape: a name, the command and the rank of the pipeline."""
    plain = shape.command(command).of_megatron().without_chunks()
    few = plain.having(
        num_layers=2 * shape.pipeline,
        account_for_embedding_in_pipeline_split=None,
        account_for_loss_in_pipeline_split=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        moe_layer_freq=1 if plain.has("--moe-layer-freq") else None,
    )
    for name in (SPLIT, WHOLE):
        for rank in (0, 1):
            yield name, few.having(pipeline_schedule=name), rank


@dataclass(frozen=True, slots=True)
class Counted:
    """What a shape costs: a layer and the ends, what a step has once, and the work that counts."""

    pieces: Pieces
    once_s_per_byte: float  # optimizer and data parallel exchanges, for a byte of a device's state
    layer_flops: float  # of a microbatch's forward pass in a layer, on every rank that shares it
    ends_flops: float
    microbatches: int


def counted(found: Mapping[str, Sequence[Mapping[str, Any]]], gpu: Gpu, many: int) -> Counted:
    """Return a shape's costs from what its ranks found, by the schedule they ran.

    Raises:
        ScheduleError: a rank lacks a pass.
    """
    costs = counted_costs(found[SPLIT], found[WHOLE], gpu)
    first, second = found[WHOLE]
    once = second["time"]["optimizer"] + second["time"]["data parallel"]
    state = sum(second["held_parts"][part] for part in ("weights", "gradients", "optimizer"))
    of_layer = _forward_flops(second, 0)
    ends = _forward_flops(first, 0) + _forward_flops(first, 1) - 2 * of_layer
    pieces = Pieces.of(replace(costs, layers=None), (1,) * costs.num_stages)
    return Counted(pieces, once / state, of_layer, ends, many)


def _forward_flops(rank: Mapping[str, Any], chunk: int) -> float:
    (work,) = (
        each["work"] for each in rank["kinds"] if each["kind"] == "F" and each["chunk"] == chunk
    )
    products = sum(
        2.0 * rows * inner * columns * at * number
        for _, rows, inner, columns, at, number in work["products"]
    )
    return float(products + sum(work["attention_flops"].values()))

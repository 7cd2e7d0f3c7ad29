"""The same model without a pipeline: fully sharded data parallelism (FSDP2).

Every rank runs all layers. Parameters, gradients and optimizer states are sharded over the ranks;
a layer's parameters are gathered for its forward and again for its backward, and its gradients are
reduce-scattered, in every microbatch (ZeRO stage 3).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_vshape.core.model.amounts import DUMMY_BYTES, STATE_BYTES
from megatron_vshape.core.model.stage_costs import Share, StageCosts
from megatron_vshape.core.plan import published_schedule
from megatron_vshape.rehearsal import accuracy
from megatron_vshape.rehearsal.command import SHARDED_STATE, Command
from megatron_vshape.rehearsal.step_time import collective_s, exposed_s, rates_of
from megatron_vshape.tuning.configurations import (
    FULL,
    NONE,
    Configuration,
    Layout,
    SweepError,
    faults,
)
from megatron_vshape.tuning.predictor import FixedCosts, Prediction, Predictor

NAME = "fsdp2"
PARAMETER_BYTES, GRADIENT_BYTES = 2, 4
"""Bytes in a collective: bfloat16, and float32 unless gradients are reduced in bfloat16."""

_SHARDED_BYTES = 18
"""Sharded bytes of a parameter: bfloat16 and float32 copies, a gradient, two Adam moments."""


def sharded_command(command: Command) -> Command:
    """Return a command with sharded parameters, gradients and optimizer states."""
    options: dict[str, Any] = {"use_megatron_fsdp": True, **SHARDED_STATE}
    if command.value("--transformer-impl") == "local":  # the fusion needs Transformer Engine
        options["no_gradient_accumulation_fusion"] = True
    environment = {**command.environment}
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # Megatron rejects 1 with FSDP
    return replace(command.having(**options), environment=environment)


def best(predictor: Predictor, command_config: Configuration) -> Prediction | None:
    """Predict the fastest FSDP2 configuration that fits; None if none can be estimated.

    If none fits, the one with the least memory is returned.
    """
    predictions = []
    for config in _configurations(command_config, predictor):
        try:
            predictions.append(_predict(predictor, config))
        except SweepError:  # cannot be rehearsed
            continue
        if predictions[-1].fits:
            break
    return min(predictions, key=lambda row: (not row.fits, row.peak_bytes), default=None)


def format_comparison(fsdp: Prediction | None, baseline: Prediction | None, case: str) -> str:
    """Format whether FSDP2 is faster than another row by more than the error of the estimate."""
    if fsdp is None or baseline is None or fsdp.step_s is None or baseline.step_s is None:
        return ""
    start = "Without a pipeline (FSDP2): "
    if not fsdp.fits:
        return f"{start}{fsdp.fit}."
    gain, within = 1 - fsdp.step_s / baseline.step_s, accuracy.threshold(case)
    if abs(gain) <= within:
        return f"{start}as fast as the best pipeline within the error ({100 * within:.1f}%)."
    if gain < 0:
        return f"{start}{-100 * gain:.0f}% slower than the best pipeline."
    return (
        f"{start}{100 * gain:.0f}% faster than the best pipeline, more than the error "
        f"({100 * within:.1f}%). Measure it before you choose a pipeline schedule."
    )


def _configurations(command_config: Configuration, predictor: Predictor) -> Iterator[Configuration]:
    """Yield configurations without a pipeline, the fastest first, with the least possible TP.

    At most two, because each has to be rehearsed; none if its states alone do not fit.
    """
    machine, subject = predictor.machine, predictor.subject
    counted = predictor.counts.costs_of(command_config)
    pieces, shards = counted.pieces, command_config.tensor_parallel * command_config.expert_parallel
    layers = Share.total(pieces.shares).state if pieces.shares else subject.layers
    states = layers * counted.parameters.layer * _SHARDED_BYTES
    if states * shards / machine.num_devices > predictor.allocatable_bytes(command_config):
        return
    base = replace(
        command_config,
        schedule="1f1b",
        pipeline_parallel=1,
        layout=Layout.EVEN,
        sequence_parallel=True,
    )
    for tensor in (1, command_config.tensor_parallel):
        config = replace(base, tensor_parallel=tensor).on_devices(machine.num_devices)
        if not any(faults(config, subject, machine.num_devices, machine.gpu.node)):
            yield replace(config, recompute=NONE)
            yield replace(
                config,
                recompute=FULL if command_config.recompute == NONE else command_config.recompute,
            )
            return


def _predict(predictor: Predictor, config: Configuration) -> Prediction:
    """Predict a configuration: all layers on every rank, all state sharded."""
    counted = predictor.counts.costs_of(config)
    pieces, parameter_counts = counted.pieces, counted.parameters
    # Ranks of TP and EP have other parameters. A layer's experts are most of its parameters.
    stride = config.tensor_parallel * config.expert_parallel
    ranks = config.num_devices // stride

    def sharded(piece: StageCosts, number: float) -> StageCosts:
        # Not sharded: inputs that recomputed experts keep, and workspaces of the last stage.
        unsharded_state = max(0.0, piece[STATE_BYTES] - number * counted.state_bytes_per_parameter)
        state = number * _SHARDED_BYTES / ranks + unsharded_state
        return piece.changed({STATE_BYTES: state, DUMMY_BYTES: 0.0})

    layers = [share.state for share in pieces.shares] or [1.0] * predictor.subject.layers
    parameters = [
        *(share * parameter_counts.layer for share in layers),
        parameter_counts.first,
        parameter_counts.last,
    ]
    unsharded = (PARAMETER_BYTES + GRADIENT_BYTES) * max(parameters)
    unsharded += PARAMETER_BYTES * parameters[0]  # of the next layer, gathered meanwhile
    sharded_pieces = replace(
        pieces,
        layer=sharded(pieces.layer, parameter_counts.layer),
        first=sharded(pieces.first, parameter_counts.first),
        last=sharded(pieces.last, parameter_counts.last),
        device_bytes=pieces.device_bytes + unsharded,
    )
    costs, schedule = (
        sharded_pieces.costs((len(layers),)),
        published_schedule("1f1b", 1, config.num_microbatches),
    )
    plain = replace(predictor, counts=FixedCosts(replace(counted, data_s_per_byte=0.0)))
    row = plain.evaluated(config, schedule, costs, always=True)
    computes_s = 1e-6 * costs.busy_us(schedule.placement, 1, 1)
    exposed = exposed_s(
        _exchange_s(predictor, parameters, ranks, stride), computes_s, counted.rates
    )
    step_s = (row.step_s or 0.0) + config.num_microbatches * exposed
    return replace(
        row,
        configuration=replace(config, schedule=NAME),
        step_s=step_s,
        mfu=predictor.mfu(config, step_s),
    )


def _exchange_s(
    predictor: Predictor, parameters: Sequence[float], ranks: int, stride: int
) -> float:
    """Estimate the seconds of a microbatch's gathers and reduce-scatters without overlap.

    `parameters` are those of every layer, gathered together; neighboring ranks of the group are
    `stride` ranks apart.
    """
    gpu, span = predictor.machine.gpu, (ranks - 1) * stride + 1
    rates = rates_of(gpu)
    in_bf16 = predictor.subject.command.has("--grad-reduce-in-bf16")
    gradient = PARAMETER_BYTES if in_bf16 else GRADIENT_BYTES
    total = 0.0
    for number in parameters if ranks > 1 else ():
        for kind, element_bytes, times in (
            ("all_gather", PARAMETER_BYTES, 2),  # for the forward, and again for the backward
            ("reduce_scatter", gradient, 1),
        ):
            key, traffic = (kind, "", ranks, span), (1, element_bytes * number)
            total += times * collective_s(key, traffic, gpu, rates)
    return total

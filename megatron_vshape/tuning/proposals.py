"""Propose parallel sizes for a model from the sizes of its layers, before any dry run."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Widths, even_with_ends
from megatron_vshape.core.model.placement import looping
from megatron_vshape.mcore.layout.sizes import (
    Options,
    costs_of_symbols,
    parameters_of,
    symbols_of,
)
from megatron_vshape.rehearsal.command import Command
from megatron_vshape.rehearsal.megatron_layers import layers_of_command, with_layers
from megatron_vshape.rehearsal.step_time import rates_of, with_host_s
from megatron_vshape.tuning.configurations import (
    FLAGS,
    FULL,
    NONE,
    Configuration,
    Subject,
    configuration_of_command,
    faults,
    layers_of_stages,
)
from megatron_vshape.tuning.machine import Machine
from megatron_vshape.tuning.predictor import key_of_count

_MAX_COUNTS, _MAX_PROPOSALS = 3, 8
"""Maximum sets of sizes that need dry runs, and configurations with these sizes."""

_FULL_SHARE = 0.95
"""Share of the memory that the estimate may fill: of those that filled more, half did not fit."""

_TOKENS_PER_RANK = 8192
"""Sequences are not split further than this by context parallelism."""


def propose(subject: Subject, machine: Machine) -> list[Configuration]:
    """Return pipeline configurations for the command, the best first by a rough estimate.

    Sizes that the command sets stay.

    Raises:
        ScheduleError: no configuration is possible.
    """
    proposals: list[Configuration] = []
    keys: set[object] = set()
    for candidate in candidates(subject, machine):
        key = key_of_count(candidate.config)
        if len(proposals) < _MAX_PROPOSALS and (key in keys or len(keys) < _MAX_COUNTS):
            keys.add(key)
            proposals.append(candidate.config)
    return proposals


class Proposal(NamedTuple):
    """A configuration with rough estimates."""

    excess_bytes: float  # of the largest rank, above the memory that may be filled
    step_s: float  # of 1F1B
    config: Configuration


def candidates(subject: Subject, machine: Machine) -> list[Proposal]:
    """Return all possible configurations, the best first: those that fit, then by step time.

    Raises:
        ScheduleError: none is possible.
    """
    number, node, option = machine.num_devices, machine.gpu.node, cache(subject.command.option)
    limit_bytes = _FULL_SHARE * machine.gpu.allocatable_bytes(0, 0.0)
    possible: list[Proposal] = []
    for config in _configurations(subject, machine):
        if not any(faults(config, subject, number, node)):
            step_s, peak_bytes = _estimate(config, subject, machine, option)
            possible.append(Proposal(max(0.0, peak_bytes - limit_bytes), step_s, config))
    if not possible:
        raise ScheduleError(
            f"no sizes with a pipeline can be proposed for {number} GPUs: change the number in "
            "--gpus, or give --pipeline-model-parallel-size and the other sizes after --"
        )
    return sorted(possible, key=lambda candidate: candidate[:2])


def proposed_command(config: Configuration, subject: Subject) -> Command:
    """Return the command of a proposal, with flags for layers that Megatron would not divide."""
    command, ranks = config.command(subject), config.pipeline_parallel
    if layers_of_command(command, subject.layers, ranks).layers is not None:
        return command
    layers = even_with_ends(subject.layers, ranks)
    return with_layers(
        command, layers or layers_of_stages(config, subject, looping(ranks, 1)), ranks
    )


def _configurations(subject: Subject, machine: Machine) -> Iterator[Configuration]:
    """Yield all configurations with powers of two, and any pipeline size that divides the GPUs."""
    number, base = machine.num_devices, configuration_of_command(subject, machine.num_devices)
    powers = [2**exponent for exponent in range(number.bit_length())]
    contexts = [size for size in powers if size * _TOKENS_PER_RANK <= base.sequence_length]
    sizes = {
        "tensor_parallel": powers,
        "pipeline_parallel": [size for size in range(2, number + 1) if not number % size],
        "context_parallel": contexts or [1],
        "expert_parallel": powers if subject.experts else [1],
        "microbatch_size": [1, 2],
    }
    given_sizes = {
        name: [getattr(base, name)] for name in sizes if subject.command.has(FLAGS[name])
    }
    recomputes = [NONE, FULL] if base.recompute == NONE else [base.recompute]
    for *values, recompute in itertools.product(*(sizes | given_sizes).values(), recomputes):
        settings: dict[str, Any] = dict(zip(sizes, values, strict=True))
        config = replace(base, **settings, recompute=recompute, sequence_parallel=True)
        yield config.on_devices(number)


def _estimate(
    config: Configuration, subject: Subject, machine: Machine, command_option: Any
) -> tuple[float, float]:
    """Estimate the seconds of a step of 1F1B and the bytes of its largest rank."""
    sizes = {flag[2:].replace("-", "_"): getattr(config, name) for name, flag in FLAGS.items()}
    sizes |= {"world_size": machine.num_devices}

    def option(name: str) -> Any:
        return sizes[name] if name in sizes else command_option(name)

    tensor, stages, microbatches = (
        config.tensor_parallel,
        config.pipeline_parallel,
        config.num_microbatches,
    )
    widths, symbols = subject.widths(config.sequence_length), symbols_of(option)
    parameters, table = parameters_of(option, subject.vocabulary), costs_of_symbols(option, widths)
    moved = _MOVED_BYTES * sum(table[symbol].memory for symbol in symbols)
    # From here on, `option` has the recomputation: layers keep only their input.
    sizes |= {"recompute_granularity": FULL} if config.recompute == FULL else {}
    table = costs_of_symbols(option, widths)
    replicas = config.data_parallel * config.context_parallel
    of_rank = (parameters.total - parameters.embeddings) / stages + parameters.embeddings / 2
    of_rank /= tensor
    tokens = config.sequence_length * config.microbatch_size / (tensor * config.context_parallel)
    memory = sum(table[symbol].memory for symbol in symbols)
    peak_bytes = of_rank * (6 + 12 / replicas) + 2 * tokens * memory
    rates = rates_of(machine.gpu)
    flops_s = subject.flops(*config.workload) / machine.gpu.bf16_flops / rates.wide
    moved_s = tokens * moved / machine.gpu.memory_rate / rates.memory
    moved_s += symbols.count("E") * _experts_waiting_s(tokens, widths, option, machine)
    exchanged_s = tokens * _exchanged_s(config, widths, symbols, option, machine)
    exchanges = 5 * len(symbols) * (tensor > 1)
    exchanges += 4 * symbols.count("E") * (config.expert_parallel > 1)
    exchanged_s += exchanges * 1e-6 * rates.exchange_us
    gemms, kernels = (sum(counts) for counts in zip(*map(_launches, symbols), strict=True))
    host_s = 1e-6 * (gemms * rates.module_us + kernels * rates.launch_us)
    recomputed = 4 / 3 if config.recompute == FULL else 1.0
    share = microbatches / stages
    on_gpu_s = recomputed * (flops_s / machine.num_devices + share * moved_s) + share * exchanged_s
    waits = config.expert_parallel > 1 and option("moe_token_dispatcher_type") == "alltoall"
    busy_s = with_host_s(on_gpu_s, recomputed * share * host_s, waits)
    # A rank has half a layer more than the mean, as the output layer is not divided.
    uneven = max(1.0, -(-len(symbols) // stages) * stages / (len(symbols) + 2))
    uneven *= 1 + 0.5 * stages / subject.layers
    step_s = busy_s * uneven * (1 + (stages - 1) / microbatches)
    # Half of the collectives of gradients (fp32) and parameters (bf16) are assumed to be hidden.
    step_s += 0.5 * 6 * of_rank * _seconds_per_byte(replicas, tensor, machine)
    return step_s, peak_bytes


def _experts_waiting_s(tokens: float, widths: Widths, option: Options, machine: Machine) -> float:
    """Return the seconds in which a layer's experts wait for their weights: few tokens for each."""
    experts = (option("num_experts") or 1) / (option("expert_model_parallel_size") or 1)
    width = option("moe_ffn_hidden_size") or option("ffn_hidden_size") or 0
    hidden = option("moe_latent_size") or widths.hidden
    weights = experts * width * hidden * (3 if widths.gated else 2)
    rows = tokens * (option("moe_router_topk") or 2) / experts
    rates = rates_of(machine.gpu)
    # Forward, input gradient and weight gradient: two bytes and two FLOPs per row and weight each.
    read_s = 6 / machine.gpu.memory_rate / rates.memory
    return weights * max(0.0, read_s - 6 * rows / machine.gpu.bf16_flops / rates.wide)


def _exchanged_s(
    config: Configuration, widths: Widths, symbols: str, option: Options, machine: Machine
) -> float:
    """Return the seconds in which all stages exchange bf16 numbers for a token of a rank.

    Five gathers and reduce-scatters of a block, four all-to-alls of experts, keys and values with
    their gradients, and messages to the next stage in both directions.
    """
    tensor, context, hidden = config.tensor_parallel, config.context_parallel, widths.hidden
    experts = symbols.count("E")
    routed = (option("moe_router_topk") or 2) * (option("moe_latent_size") or hidden)
    gathered = 5 * (len(symbols) - experts) * hidden * tensor
    keys = 3 * symbols.count("*") * widths.key_value * context
    seconds = gathered * _seconds_per_byte(tensor, 1, machine)
    seconds += 4 * experts * routed * _seconds_per_byte(config.expert_parallel, 1, machine)
    seconds += keys * _seconds_per_byte(context, tensor, machine)
    messages = 2 * hidden * config.pipeline_parallel
    return 2 * (seconds + messages / machine.gpu.far_rate)


_MOVED_BYTES = 32
"""Bytes that kernels between matrix products move per stored number of an activation."""


def _launches(symbol: str) -> tuple[int, int]:
    """Return the GEMMs and the other kernels of a layer's forward and backward."""
    return {"E": (9, 76), "-": (6, 16)}.get(symbol, (6, 30))


def _seconds_per_byte(ranks: int, stride: int, machine: Machine) -> float:
    """Return the seconds that a rank needs per byte for a group of ranks this far apart."""
    gpu, rates = machine.gpu, rates_of(machine.gpu)
    inside = min(ranks, max(1, gpu.node // stride))
    near_s = (inside - 1) / ranks / gpu.near_rate / rates.wire
    return near_s + (ranks - inside) / ranks / gpu.far_rate / rates.network

"""A costs file from rehearsals: what every stage's passes take by counted work, and hold.

A V with two stages a rank is rehearsed twice, with its backward split and whole, so that every
stage's F, B, W and BW have run. Ranks that were left out stand for their neighbour towards the
first, which is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.costs_file import COUNTED
from megatron_vshape.core.model.kinds import PARTS, Kind, ScheduleError
from megatron_vshape.rehearsal.gpus import Gpu
from megatron_vshape.rehearsal.step_time import send_us

SPLIT, WHOLE = "v-zb", "1f1b-v"
"""The schedules under which the stages are counted."""

MICROBATCHES = 3
"""Of a counted step: the middle one of each pass is taken."""

Pass = Mapping[str, Any]


def counted_costs(
    split: Sequence[Mapping[str, Any]], whole: Sequence[Mapping[str, Any]], gpu: Gpu
) -> Costs:
    """Return the costs of the stages, from rehearsed ranks under `SPLIT` and under `WHOLE`.

    Raises:
        ScheduleError: a stage lacks a pass.
    """
    devices = int(split[0]["sizes"]["pp"])
    stages = [_where(stage, devices) for stage in range(2 * devices)]
    found = _every_rank(split, devices)
    whole_found = _every_rank(whole, devices)
    passes = {
        kind: [_pass(found[rank], kind, chunk) for rank, chunk in stages]
        for kind in (Kind.F, Kind.B, Kind.W)
    }
    passes[Kind.BW] = [_pass(whole_found[rank], Kind.BW, chunk) for rank, chunk in stages]
    beside, first = min(map(_beside, whole_found)), whole_found[0]
    held, left = zip(*map(_held, *(passes[kind] for kind in PARTS)), strict=True)
    least = max(held) * 1e-6
    amounts: dict[str, Any] = {
        "held_after_forward_bytes": tuple(max(each, least) for each in held),
        "held_after_backward_bytes": left,
        "state_bytes": tuple(_state(whole_found[rank], chunk) for rank, chunk in stages[:-1]),
    }
    # Beside states the rank of the last stage has Transformer Engine's dummy gradient of the output
    # layer, which a whole backward leaves there.
    amounts["state_bytes"] += (_state(first, 1) + _beside(first) - beside,)
    for kind, ran in passes.items():
        amounts[kind.time] = tuple(_computes_us(each) for each in ran)
        takes = held if kind is Kind.F else (0.0,) * len(ran)
        amounts[kind.works] = tuple(map(_works, ran, takes))
        if kind.exchange and any(each["waited_seconds"] for each in ran):
            amounts[kind.exchange] = tuple(1e6 * each["waited_seconds"] for each in ran)
    sizes = split[0]["sizes"]
    apart = int(sizes["world"]) // devices
    made = Costs(
        **amounts,
        send_us=send_us(float(split[0]["message_bytes"]), gpu, apart),
        layers=tuple(int(found[rank]["chunk_layers"][chunk]) for rank, chunk in stages),
        device_bytes=beside,
    )
    text = f"{COUNTED} by a rehearsal, priced by what such kernels reach on {gpu.name.upper()}"
    missing = devices - len(split)
    if missing:
        text += f"; {missing} of {devices} ranks like their neighbours"
    return made.with_source(text)


def _where(stage: int, devices: int) -> tuple[int, int]:
    """Return the rank and the chunk of a V's stage."""
    return (stage, 0) if stage < devices else (2 * devices - 1 - stage, 1)


def _every_rank(found: Sequence[Mapping[str, Any]], devices: int) -> list[Mapping[str, Any]]:
    by_rank = {int(each["stage"]): each for each in found}
    return [
        by_rank[max((known for known in by_rank if known <= rank), default=min(by_rank))]
        for rank in range(devices)
    ]


_NOTHING = {"adds_bytes": 0.0, "meanwhile_bytes": 0.0, "seconds": 0.0, "waited_seconds": 0.0}


def _pass(rank: Mapping[str, Any], kind: Kind, chunk: int) -> Pass:
    """Return what a pass was found to do; a backward that recomputes all runs whole, as its B."""
    ran = {each["kind"]: each for each in rank["kinds"] if each["chunk"] == chunk}
    if kind in ran:
        return dict(ran[kind])
    if kind in (Kind.B, Kind.W) and Kind.BW in ran:
        return dict(ran[Kind.BW]) if kind is Kind.B else _NOTHING
    raise ScheduleError(
        f"rank {rank['stage']} ran no {kind} of its chunk {chunk}: the schedule that was rehearsed "
        f"is not {SPLIT} or {WHOLE} on two stages a rank"
    )


def _computes_us(ran: Pass) -> float:
    return max(1.0, 1e6 * float(ran["seconds"] - ran["waited_seconds"]))


def _held(forward: Pass, backward: Pass, weight: Pass) -> tuple[float, float]:
    """Return what a stage holds after F, and after B.

    What F has made and no backward frees has been let go of between passes: what it sent.
    """
    adds, freed, last = (float(each["adds_bytes"]) for each in (forward, backward, weight))
    held = max(0.0, min(adds, -freed - last)) if freed + last < 0 else adds
    return held, min(held, max(0.0, -last if last else adds + freed))


def _works(ran: Pass, takes: float) -> float:
    """Return what is there only meanwhile, beside what the pass takes at its start."""
    return max(0.0, float(ran["meanwhile_bytes"]) - max(0.0, takes))


def _state(rank: Mapping[str, Any], chunk: int) -> float:
    """Return the stage's part of what its rank holds between steps, by its parameters."""
    own = rank["chunk_parameters"]
    return _states(rank) * float(own[chunk] / sum(own))


def _beside(rank: Mapping[str, Any]) -> float:
    return float(rank["held_bytes"]) - _states(rank)


def _states(rank: Mapping[str, Any]) -> float:
    return float(sum(rank["held_parts"][part] for part in ("weights", "gradients", "optimizer")))

"""Handlers run passes of kinds that stages do not implement."""

import threading
from dataclasses import replace
from typing import Any, cast

import torch
from runtime.plain_pipeline import PlainStage, gradients_of, one_process
from runtime.test_offload import NoMail

from megatron_vshape.core.model.kinds import Kind, Read, define, remove
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime.program_runner import Handler, run_program

MICROBATCHES = 3


def test_handler_methods_run_in_program_order() -> None:
    met = define(Kind("M", label="meeting", method="none", reads=(Read("F"),), is_collective=True))
    copy = define(
        Kind("K", label="copy", method="none", reads=(Read("F"),), before=("B",), resource="l")
    )
    try:
        plain = make("v-half", 1, MICROBATCHES)
        row = [
            handled
            for work in plain.order[0]
            for handled in (
                (work, work._replace(kind=met), work._replace(kind=copy))
                if work.kind is Kind.F
                else (work,)
            )
        ]
        events: list[tuple[str, Pass, bool]] = []

        def note(what: str) -> Any:
            main = threading.main_thread()
            return lambda work: events.append((what, work, threading.current_thread() is main))

        handlers = {
            met: Handler(note("run"), join=note("join")),
            copy: Handler(note("run"), prepare=note("prepare")),
        }
        program = lower(replace(plain, order=(tuple(row),)))
        stages = {
            stage_index: PlainStage(stage_index, 2, 0, torch.float32) for stage_index in range(2)
        }
        run_program(program, 0, stages, cast(Any, NoMail()), handlers=handlers)
        for kind, first in ((met, "join"), (copy, "prepare")):
            events_of_kind = [
                (what, work.stage, work.microbatch) for what, work, _ in events if work.kind is kind
            ]
            turns = [work[1:] for work in row if work.kind is kind]
            assert [event for event in events_of_kind if event[0] == first] == [
                (first, *position) for position in turns
            ]
            assert [event for event in events_of_kind if event[0] == "run"] == [
                ("run", *position) for position in turns
            ]
        assert all(
            on_main == (work.kind is met or what == "prepare") for what, work, on_main in events
        )
        expected, _ = one_process(2, MICROBATCHES, 0, torch.float32)
        for stage_index, stage in stages.items():
            assert all(map(torch.equal, gradients_of(stage.module), expected[stage_index]))
    finally:
        remove(copy)
        remove(met)

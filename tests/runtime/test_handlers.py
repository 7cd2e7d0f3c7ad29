"""Passes of kinds that stages know nothing of are run by the handlers of these kinds."""

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


def test_a_handler_is_joined_prepared_and_run_in_the_program_s_order() -> None:
    met = define("M", label="meeting", method="none", reads=[Read("F")], is_collective=True)
    copy = define("K", label="copy", method="none", reads=[Read("F")], before=["B"], resource="l")
    try:
        plain = make("v-half", 1, MICROBATCHES)
        row = [
            each
            for work in plain.order[0]
            for each in (
                (work, work._replace(kind=met), work._replace(kind=copy))
                if work.kind is Kind.F
                else (work,)
            )
        ]
        told: list[tuple[str, Pass, bool]] = []

        def note(what: str) -> Any:
            main = threading.main_thread()
            return lambda work: told.append((what, work, threading.current_thread() is main))

        handlers = {
            met: Handler(note("run"), join=note("join")),
            copy: Handler(note("run"), prepare=note("prepare")),
        }
        program = lower(replace(plain, order=(tuple(row),)))
        stages = {at: PlainStage(at, 2, 0, torch.float32) for at in range(2)}
        run_program(program, 0, stages, cast(Any, NoMail()), handlers=handlers)
        for kind, first in ((met, "join"), (copy, "prepare")):
            own = [
                (what, work.stage, work.microbatch) for what, work, _ in told if work.kind is kind
            ]
            turns = [work[1:] for work in row if work.kind is kind]
            assert [each for each in own if each[0] == first] == [(first, *at) for at in turns]
            assert [each for each in own if each[0] == "run"] == [("run", *at) for at in turns]
        assert all(
            on_main == (work.kind is met or what == "prepare") for what, work, on_main in told
        )
        expected, _ = one_process(2, MICROBATCHES, 0, torch.float32)
        for at, stage in stages.items():
            assert all(map(torch.equal, gradients_of(stage.module), expected[at]))
    finally:
        remove(copy)
        remove(met)

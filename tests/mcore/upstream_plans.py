"""Runs Megatron's own tests of its layer plans on a rank without a GPU, by this package's driver.

They compare what a plan computes, F alone, beside a B, and B alone, with the model's own forward
and backward, bit by bit. Here their plans are driven as a stage drives them, with W in place or
left for later; layers are Megatron's own instead of Transformer Engine's, and sequences short.
Imported once the CPU mode is on, with the checkout's Megatron first on the path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mcore import latent_attention
from mcore.split_state import split_state
from mcore.without_te import let_predict
from megatron.core import utils
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore.features.overlap import layer_plans
from megatron_vshape.mcore.step.stage import MegatronStage, Step, zero_tokens
from megatron_vshape.mcore.step_state import StepState

FOLDER = "tests/unit_tests/a2a_overlap"
FILES = ("test_schedule_layer_1f1b.py", "test_schedule_chunk_1f1b.py")
TOKENS, HEADS = 32, 8  # of 1024 and 128


class ChunkPlans:
    """In place of Megatron's class of chunk plans: runs them by the stage of their model."""

    def __init__(self, state: StepState, backward: Kind) -> None:
        self._state = state
        self._backward = backward
        self._stages: dict[int, MegatronStage] = {}

    def run(self, forward: Any, backward: Any, b_grad: Tensor | None = None) -> Tensor | None:
        """Run F of a plan, B of another, or both; return the F's output."""
        if forward is None:
            other, work = self._of_backward(backward, b_grad)
            getattr(other, work.kind.method)(0, None)
            self._weights(other)
            return None
        made: list[Tensor] = []
        stage = self._begun(forward, made)
        if backward is None:
            stage.forward(0, None)
        else:
            other, work = self._of_backward(backward, b_grad)
            stage.forward_overlapped(0, None, other, work, None)
            self._weights(other)
        (output,) = made
        return output

    def _begun(self, plan: Any, made: list[Tensor]) -> MegatronStage:
        def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            made.append(output.detach().clone())
            return output.float().sum(), {}

        model = plan.state.model
        number = len(self._stages)
        stage = self._stages[id(model)] = MegatronStage(
            self._state,
            _step(model.config, lambda data, model, return_schedule_plan: (plan, loss_of)),
            model,
            iter(()),
            number,
            number,
            is_last=True,
            has_chunks=False,
        )
        return stage

    def _of_backward(self, plan: Any, gradient: Tensor | None) -> tuple[MegatronStage, Pass]:
        assert gradient is not None
        assert torch.equal(gradient, torch.ones_like(gradient))  # that of the sum
        stage = self._stages[id(plan.state.model)]
        return stage, Pass(self._backward, stage.stage, 0)

    def _weights(self, stage: MegatronStage) -> None:
        if self._backward is Kind.B:
            stage.backward_weights(0)


class LayerPlans:
    """In place of Megatron's class of layer plans: where their weight gradients run is told."""

    def __init__(self, state: StepState, backward: Kind) -> None:
        self._jobs = state.jobs
        self._backward = backward

    def __call__(self, *args: Any, **options: Any) -> TransformerLayerSchedulePlan:
        return TransformerLayerSchedulePlan(*args, **options)

    def run(self, forward: Any, backward: Any, **options: Any) -> Any:
        """Run F of a layer, B of another, or both."""
        whole = backward is None or self._backward is Kind.BW
        if backward is not None and whole:
            for node in layer_plans._nodes_with_weights(backward):
                layer_plans._run_weights_in_place(node, self._jobs)
        with nullcontext() if whole else self._jobs.collect("layer"):
            made = TransformerLayerSchedulePlan.run(forward, backward, **options)
        if not whole:
            self._jobs.run("layer")
        return made


def _step(config: Any, forward_step: Callable[..., Any]) -> Step:
    sync: Any = SimpleNamespace(
        splits=lambda chunk: False,
        weights_begin=lambda chunk: None,
        weights_done=lambda chunk: None,
    )
    return Step(
        config,
        forward_step,
        1,
        1,
        forward_only=False,
        collect_non_loss_data=False,
        first_val_step=None,
        gradient_sync=sync,
        num_tokens=zero_tokens(torch.device("cpu")),
        parts=[layer_plans.LayerPlans()],
    )


def _local_specs() -> dict[str, Callable[..., Any]]:
    """Return Megatron's own layers by the names by which Transformer Engine's are asked for."""
    return {
        "get_gpt_decoder_block_spec": lambda config, use_transformer_engine: (
            gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        ),
        "get_gpt_mtp_block_spec": lambda config, spec, use_transformer_engine: (
            gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, False)
        ),
        "get_gpt_layer_with_transformer_engine_spec": gpt_layer_specs.get_gpt_layer_local_spec,
    }


def _short(build: Callable[[int], Tensor], length: int = TOKENS) -> Tensor:
    return build(length)


def _smaller(make: Callable[..., Any], **options: Any) -> Any:
    return make(**options | {"num_attention_heads": HEADS})


class Ported:
    """A pytest plugin: makes upstream's tests run here, and notes what came of each."""

    def __init__(self, backward: Kind, left_out: dict[str, str]) -> None:
        self._backward = backward
        self._left_out = left_out
        self.outcomes: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """Have the tests that ask for a release of Transformer Engine run, without FP8's."""
        is_old = lambda version, **unused: version.startswith("1.")  # noqa: E731
        with patch.object(utils, "is_te_min_version", is_old):
            return (yield)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Give the modules of the tests what stands in, and leave out what cannot run."""
        state = split_state()
        changes = _local_specs() | {
            # Norms of torch's would be of 32 bits.
            "GPTModel": lambda **options: GPTModel(**options).bfloat16(),
            "TransformerLayerSchedulePlan": LayerPlans(state, self._backward),
            "TransformerModelChunkSchedulePlan": ChunkPlans(state, self._backward),
        }
        config = sys.modules[f"{FOLDER.replace('/', '.')}.utils"]
        config.MLATransformerConfig = partial(_smaller, config.MLATransformerConfig)
        for module in {item.module for item in items}:  # type: ignore[attr-defined]
            if hasattr(module, "build_data"):
                changes["build_data"] = partial(_short, module.build_data)
            for name in changes.keys() & vars(module).keys():
                setattr(module, name, changes[name])
        for item in items:
            for part, why in self._left_out.items():
                if part in item.name:
                    item.add_marker(pytest.mark.skip(reason=why))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what came of a test."""
        if report.when == "call" or report.outcome != "passed":
            passed = report.outcome == "passed"
            name = report.nodeid.rpartition("::")[2]
            self.outcomes[name] = "passed" if passed else str(report.longrepr)


def ran(checkout: str, kind: str, left_out: dict[str, str]) -> dict[str, str]:
    """Return what came of every test: passed, or the reason why it did not.

    W run in place where `kind` is BW, and after their B where it is B. What is left out, and why,
    is told by a part of a test's name.
    """
    latent_attention.start(0, None)
    let_predict()
    plugin = Ported(Pass.parse(f"{kind}0.0").kind, left_out)
    options = ["--noconftest", "--rootdir", checkout, "-c", os.devnull, "-x", "-q"]
    files = [f"{checkout}/{FOLDER}/{name}" for name in FILES]
    pytest.main(
        [*options, *(f"-pno:{each}" for each in ("cacheprovider", "warnings")), *files],
        plugins=[plugin],
    )
    return plugin.outcomes

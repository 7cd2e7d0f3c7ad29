"""Models with several layer stacks are rejected in their first step, or run under Megatron.

pretrain_vlm.py and examples/multimodal build a LLaVAModel, pretrain_t5.py a T5Model, examples/mimo
a MimoModel; if the parts of such a model have separate pipelines, Megatron's trainer passes
a MultiModuleProcessGroupCollection and a MultiModulePipelineCommunicator.
"""

import importlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import megatron.training
import pytest
import torch
from mcore.farm import Farm
from mcore.test_bad_input import rejection_text
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection
from megatron.core.transformer import TransformerConfig

import megatron_vshape
from megatron_vshape.mcore.hooks import core_hooks, registry, training
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.refusals import (
    RefusedError,
    UnsupportedError,
    check_one_module,
    check_stacks,
)

SAID = "schedule zb-h1 does not work with {}: it needs one stack of layers"


def uninitialized(kind: type) -> Any:
    """Return an uninitialized object of a class whose constructor needs process groups."""
    return object.__new__(kind)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register a library's schedule."""
    registry.uninstall()
    megatron_vshape.register(schedule="zb-h1")
    yield
    registry.uninstall()


def build_config() -> None:
    """Build a config, which selects the pipeline of the library."""
    TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )


STACKS = (
    "megatron.core.models.multimodal.llava_model.LLaVAModel",
    "megatron.core.models.T5.t5_model.T5Model",
    "megatron.core.models.mimo.model.base.MimoModel",
)


def test_models_with_several_stacks_are_rejected() -> None:
    for path in STACKS:
        module, _, name = path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        derived = type(f"My{name}", (kind,), {})
        for model in (kind, derived):
            with pytest.raises(UnsupportedError) as rejected:
                check_stacks("zb-h1", [uninitialized(GPTModel), uninitialized(model)])
            assert str(rejected.value).startswith(SAID.format(model.__name__))
    check_stacks("zb-h1", [uninitialized(GPTModel)])


@pytest.mark.parametrize("schedule", ["zb-h1", "v-half"])
def test_first_step_rejects_a_model_with_several_stacks(farm: Farm, schedule: str) -> None:
    options = {"ranks": 2, "plugin": "plugins:two_stacks", "timeout_s": 60}
    text = rejection_text(farm, "--pipeline-schedule", schedule, **options)
    assert f"schedule {schedule} does not work with T5Model: it needs one stack of layers" in text


def test_multi_module_pipelines_use_megatron_or_are_rejected() -> None:
    modules = uninitialized(MultiModuleProcessGroupCollection)
    if (
        "schedule_pg_collection"
        in inspect.signature(schedules.get_forward_backward_func).parameters
    ):
        # from 0.19 on
        function = schedules.get_forward_backward_func(schedule_pg_collection=modules)
        assert function is schedules.forward_backward_pipelining_without_interleaving
        build_config()
        with pytest.raises(RefusedError) as refused:
            schedules.get_forward_backward_func(schedule_pg_collection=modules)
        assert SAID.format(type(modules).__name__) in str(refused.value)
    for collection in (modules, uninitialized(MultiModulePipelineCommunicator)):
        with pytest.raises(
            UnsupportedError, match=f"v-half does not work with {type(collection).__name__}"
        ):
            check_one_module("v-half", None, collection)
    check_one_module("v-half", None, SimpleNamespace())


@pytest.mark.skipif(
    "pg_collection" not in inspect.signature(megatron.training.pretrain).parameters,
    reason="from 0.19 on pretrain takes process groups",
)
def test_pretrain_rejects_multi_module_pipelines_at_start() -> None:
    build_config()
    config: Any = None
    steps = (lambda *_: None, None, lambda *_: None)
    with pytest.raises(RefusedError, match="does not work with MultiModulePipelineCommunicator"):
        megatron.training.pretrain(
            config, *steps, p2p_communicator=uninitialized(MultiModulePipelineCommunicator)
        )


def first_chunk_of(provider: Any, num_chunks: int, **options: Any) -> Any:
    """Return the model that a script's provider builds for the first chunk of rank 0."""
    session: Any = Session()
    if num_chunks:
        session.pipeline = SimpleNamespace(
            choice=SimpleNamespace(name="v-half"),
            stage_map=SimpleNamespace(num_chunks=99),
            ends=lambda rank, chunk: (True, False),
        )
    return training._model_provider(session, provider)(True, True, **options)


def test_model_provider_without_vp_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """pretrain_vlm.py has no vp_stage, which works without a schedule or with one chunk."""

    def provider(pre_process: bool, post_process: bool, config: Any = None) -> Any:
        return pre_process, post_process

    monkeypatch.setattr(core_hooks.parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    assert first_chunk_of(provider, 0) == (True, True)
    assert first_chunk_of(provider, 1, config=None) == (True, False)
    with pytest.raises(RefusedError, match="model_provider takes no vp_stage: choose a schedule"):
        first_chunk_of(provider, 2, vp_stage=0)
    chunks = first_chunk_of(lambda first, last, **options: options, 2, vp_stage=1)
    assert chunks == {"vp_stage": 1}

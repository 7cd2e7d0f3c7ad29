"""Router replay: what follows layer numbers works, and what sorts by Megatron's order is rejected.

verl appends the expert choices of every forward pass of a chunk, in the order of execution, and
sorts them by Megatron's get_schedule_table, which it has imported by name.
"""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from mcore.farm import Farm

pytest.importorskip("megatron.core")

from megatron.core.pipeline_parallel import schedules

import megatron_vshape
from megatron_vshape.mcore.hooks import replacements
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.refusals import UnsupportedError

V_HALF: Any = SimpleNamespace(choice=SimpleNamespace(name="v-half"))
SIZES = (4, 2, 2)  # microbatches, chunks, and the microbatches of a group


@pytest.fixture
def client() -> Iterator[ModuleType]:
    """Return a module that imported the function before the schedules were registered."""
    megatron_vshape.unregister()
    module: Any = ModuleType("a_client")
    module.get_schedule_table = schedules.get_schedule_table
    sys.modules["a_client"] = module
    megatron_vshape.register()
    yield module
    megatron_vshape.unregister()
    del sys.modules["a_client"]


def test_a_client_is_reached_by_name_and_gets_megatrons_order_while_none_is_chosen(
    client: ModuleType,
) -> None:
    assert client.get_schedule_table is schedules.get_schedule_table
    assert client.get_schedule_table.__wrapped__ is not client.get_schedule_table
    assert client.get_schedule_table(*SIZES)[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_sorting_by_megatrons_order_is_rejected_under_another() -> None:
    session = Session(pipeline=V_HALF)
    table = replacements.get_schedule_table(session, lambda *sizes: list(sizes))
    with pytest.raises(UnsupportedError, match="^schedule v-half does not work with recorded rout"):
        table(*SIZES)
    named = {"num_microbatches": 4, "num_model_chunks": 2, "microbatch_group_size_per_vp_stage": 2}
    with pytest.raises(UnsupportedError, match="R3 or disabled"):
        table(**named)
    assert table(4, 1, 2) == [4, 1, 2]  # one chunk runs in the order of the microbatches
    session.captures = True
    assert table(*SIZES) == list(SIZES)


def test_replay_by_layer_numbers_trains(farm: Farm) -> None:
    flags = "--pipeline-schedule v-half --num-experts 4 --moe-enable-routing-replay"
    untied = "--untie-embeddings-and-output-weights --disable-bias-linear"
    farm.run(2, *flags.split(), *untied.split()).check()

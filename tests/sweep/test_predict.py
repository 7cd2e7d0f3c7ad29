"""The predictor against published measurements, none of which it reads."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from sweep.samples import CLUSTER, ROOT, SWEEP, load_sample

from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs, Piece
from megatron_vshape.core.model.kinds import COPY_BACK, COPY_OUT
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.core.model.placement import looping, v_shape
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.planner.vocabulary import is_shared, shared_pieces
from megatron_vshape.sweep import predict
from megatron_vshape.sweep.files import Layout, Loaded, Model, Recompute, SweepError, load_sweep
from megatron_vshape.sweep.grid import Combination, expand
from megatron_vshape.sweep.layer import Layers, Part, model_flops
from megatron_vshape.sweep.machine import Machine
from megatron_vshape.sweep.measured_costs import key_of_shapes, load_measured
from megatron_vshape.sweep.predict import Prediction, Predictor, Verdict, plan_adaptive
from megatron_vshape.sweep.report import load_published
from megatron_vshape.sweep.trainer_flags import trainer_command
from megatron_vshape.view.numbers import GIB

SWEEPS = ROOT / "configs" / "sweeps"
ADAPTIVE_GRID = {**SWEEP["grid"], "schedule": ["adaptive"], "microbatch_size": [2]}
PUBLISHED = load_published(SWEEPS / "grid_98b_a100_published.csv")


@pytest.fixture(scope="module")
def grid_search() -> Loaded:
    return load_sweep(SWEEPS / "grid_98b_a100.yaml")


def predictor_of(loaded: Loaded) -> Predictor:
    return Predictor(loaded.model, Machine.of(loaded.cluster), loaded.sweep.post_validation)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "microbatch", "measured_ms"),
    [(3, 2304, 24, 6, (18.5, 18.1, 9.3)), (2, 6144, 48, 1, (10.4, 10.2, 7.7))],
    ids=["1.5B", "28.3B"],
)
def test_zero_bubble_pass_times(
    grid_search: Loaded,
    layers: int,
    hidden: int,
    heads: int,
    microbatch: int,
    measured_ms: tuple[float, float, float],
) -> None:
    """One device of the Zero Bubble paper's runs, without flash attention, at 1024 tokens."""
    model = Model(
        name="zero bubble",
        layers=layers,
        hidden_size=hidden,
        attention_heads=heads,
        vocabulary_size=50304,
        dropout=True,
        flash_attention=False,
        gradient_bytes=2,
    )
    it = Combination("zb-h1", 1024, 1, 1, 1, 8, 1, microbatch, Recompute.NONE, Layout.BALANCED)
    one = Layers(model, it, Machine.of(grid_search.cluster), split=True)
    part = one.layer(one.layer_kernels()).times(layers)
    found = (part.forward_us, part.backward_us, part.weight_us)
    assert [each / 1e3 for each in found] == pytest.approx(measured_ms, rel=0.1)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.schedule}-{row.sequence_length}")
def test_published_best_configurations(grid_search: Loaded, row: object) -> None:
    """Within 5 points at the very configuration the paper found best, or out of memory."""
    published = next(each for each in PUBLISHED if each == row)
    data, tensor, pipeline, microbatch = 1, 8, 5, 1
    if published.mfu_percent is not None:
        data, tensor, pipeline, microbatch = map(int, published.parallel.split())
    batch = {each.sequence_length: each.global_batch_size for each in grid_search.sweep.workloads}
    it = Combination(
        published.schedule,
        published.sequence_length,
        batch[published.sequence_length],
        data,
        tensor,
        pipeline,
        1,
        microbatch,
        Recompute.NONE,
        Layout.BALANCED,
    )
    found = predictor_of(grid_search)(it)
    if published.mfu_percent is None:
        assert found.verdict is Verdict.OUT_OF_MEMORY
    else:
        assert found.mfu is not None
        assert 100 * found.mfu == pytest.approx(published.mfu_percent, abs=5)


@pytest.mark.parametrize("schedule", ["1f1b", "v-zb"])
def test_out_of_memory_at_16384_whatever_the_sizes(grid_search: Loaded, schedule: str) -> None:
    predictor = predictor_of(grid_search)
    combinations = [
        each
        for each in expand(grid_search).possible
        if (each.schedule, each.sequence_length, each.microbatch_size) == (schedule, 16384, 1)
    ]
    assert combinations
    assert not any(predictor(each).fits for each in combinations)


def test_flops_are_megatrons(grid_search: Loaded) -> None:
    """72 L s h^2 (1 + s / 6h + V / 12 L h), Narayanan et al. 2021 without recompute."""
    model, sequence = grid_search.model, 3072
    hidden, layers, vocabulary = model.hidden_size, model.layers, model.vocabulary_size
    expected = 72 * layers * sequence * hidden**2
    expected *= 1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden)
    assert model_flops(model, sequence, 1) == pytest.approx(expected)


def test_more_of_what_should_slow_a_step_slows_it(tmp_path: Path) -> None:
    loaded = load_sample(tmp_path)
    predict = predictor_of(loaded)
    one, two = expand(loaded).possible[:2]
    again = replace(one, recompute=Recompute.FULL)
    assert predict(one).bubble < predict(two).bubble  # type: ignore[operator]
    assert predict(again).step_s > predict(one).step_s  # type: ignore[operator]
    assert predict(again).peak_bytes < predict(one).peak_bytes


def test_collectives_cost_more_between_nodes(grid_search: Loaded) -> None:
    machine = Machine.of(grid_search.cluster)
    assert machine.collective_us(1e8, 1) == 0
    assert machine.collective_us(1e8, 8) < machine.collective_us(1e8, 2, stride=8)
    assert machine.message_us(1e7, 1, 8) < machine.message_us(1e7, 1, 40)


def test_shared_processors_make_bubbles_free(tmp_path: Path) -> None:
    alone = load_sample(tmp_path)
    shared = load_sample(tmp_path, cluster={"shared_processors": 1})
    it = expand(alone).possible[0]
    found, slower = predictor_of(alone)(it).step_s, predictor_of(shared)(it).step_s
    assert found is not None
    assert slower is not None
    assert 1.5 * found < slower < 2 * found


def test_measured_costs_replace_the_analytic_ones(tmp_path: Path) -> None:
    four = (1000.0, 2000.0, 2000.0, 3000.0)
    (tmp_path / "costs.json").write_text(
        Costs(four, four, four, 10.0, (8.0,) * 4, (8.0,) * 4).to_json()
    )
    entry = {"costs": "costs.json", "layers_per_stage": 2, "sequence_length": 64}
    loaded = load_sample(tmp_path, sweep={"measured_costs": [entry]})
    measured = load_measured(loaded)
    predictor = replace(predictor_of(loaded), measured=measured)
    one, two = expand(loaded).possible[:2]  # the second has another microbatch size
    assert key_of_shapes(two) not in measured
    passes_s = predictor(one).step_s
    # 1F1B: two stages of 4 layers, the last also has the head's 1000 us: 8 x 5 + 4 ms each for 3.
    assert passes_s == pytest.approx(1.09 * 3 * (8 * 5.0 + 4.0) * 1e-3, rel=0.02)


def test_a_costs_file_of_uneven_stages_comes_apart_by_its_layers(tmp_path: Path) -> None:
    """As `profile` measures where the ends have a layer less: they still cost what they cost."""
    layer, embedding = Piece(10.0, 20.0, 30.0, 8.0, 4.0), Piece(4.0, 5.0, 6.0, 1.0, 0.0)
    layers = (1, 2, 2, 1)
    costs = Pieces(layer, embedding, embedding.times(2.0), 3.0).costs(layers)
    (tmp_path / "costs.json").write_text(costs.to_json())
    entry = {"costs": "costs.json", "layers_per_stage": 2, "sequence_length": 64}
    loaded = load_sample(tmp_path, sweep={"measured_costs": [entry]})
    found = load_measured(loaded).get(key_of_shapes(expand(loaded).possible[0]))
    assert found is not None
    pieces = (found.first, found.layer, found.last)
    for piece, theirs in zip(pieces, (embedding, layer, embedding.times(2.0)), strict=True):
        mine = Part(0.0, 0.0, 0.0, 0.0, 0.0, parameters=7.0).measured(piece)
        assert list(asdict(mine).values())[:5] == pytest.approx(list(asdict(theirs).values())[:5])
        assert mine.parameters == 7.0


def predicted(folder: Path, it: Combination, **over: Any) -> Prediction:
    """Return the prediction by costs that were measured with the sizes of `it`."""
    held = (2.0**20,) * 4
    costs = Costs(*((1000.0,) * 4,) * 3, 10.0, held, held)
    (folder / "costs.json").write_text(costs.to_json())
    entry = {
        "costs": "costs.json",
        "layers_per_stage": 2,
        "sequence_length": it.sequence_length,
        "tensor_parallel": it.tensor_parallel,
        "context_parallel": it.context_parallel,
    }
    loaded = load_sample(folder, sweep={"measured_costs": [entry]}, **over)
    measured = load_measured(loaded)
    assert key_of_shapes(it) in measured
    return replace(predictor_of(loaded), measured=measured)(it)


ONE = Combination("1f1b", 64, 8, 1, 1, 2, 1, 1, Recompute.NONE, Layout.EVEN)


def test_measured_costs_are_recomputed_too(tmp_path: Path) -> None:
    once, again = (predicted(tmp_path, replace(ONE, recompute=each)) for each in Recompute)
    assert once.step_s is not None
    assert again.step_s == pytest.approx(once.step_s * 4 / 3, rel=0.02)
    # Two microbatches of a stage hold 4 MiB, the inputs of its layers less than half of that.
    assert once.peak_bytes - again.peak_bytes > 2 * 2**20


@pytest.mark.parametrize("parallel", ["tensor_parallel", "context_parallel"])
def test_measured_costs_wait_for_communication(tmp_path: Path, parallel: str) -> None:
    """They are measured on one device."""
    it = replace(ONE, **{parallel: 2})
    fast, slow = (
        predicted(tmp_path, it, cluster={"devices_per_node": 4, "inside_node_gb_per_s": rate})
        for rate in (1e6, 0.1)
    )
    assert fast.step_s is not None
    assert slow.step_s is not None
    assert slow.step_s > 1.1 * fast.step_s


def test_keys_and_values_travel_behind_attention(tmp_path: Path) -> None:
    """What of their way around the ring is longer than attention is waited for."""

    def layer_us(rate: float, **assumptions: float) -> tuple[float, float]:
        cluster = {"inside_node_gb_per_s": rate, "assumptions": assumptions}
        loaded = load_sample(tmp_path, cluster=cluster, model={"query_groups": 2})
        layers = Layers(loaded.model, it, Machine.of(loaded.cluster), split=False)
        kernels = layers.layer_kernels()
        part = layers.layer(kernels)
        return part.forward_us - kernels.forward_us, part.backward_us - kernels.backward_us

    it = replace(ONE, context_parallel=2)
    plain = {"collective_half_bytes": 1e-9, "collective_fraction": 1.0}
    assert layer_us(1e6) == (0.0, 0.0)
    # The other half of 64 tokens' keys and values, each 128 wide, of two bytes, at 10 kB a us.
    ring_us = 2 * 32 * 128 * 2 / 10.0
    assert layer_us(0.01, **plain, context_hidden=1e-9) == pytest.approx((ring_us, 2 * ring_us))
    forward, backward = layer_us(0.01, **plain)
    assert 0 < forward < ring_us
    assert 0 < backward < 2 * ring_us


def test_an_adaptive_plan_is_on_its_placement(tmp_path: Path) -> None:
    (it,) = expand(load_sample(tmp_path, sweep={"grid": ADAPTIVE_GRID})).possible
    costs = Costs.uniform(2, 4, 1.0, 1.0, 1.0, 0.0)
    for placement in (v_shape(2), looping(2, 2)):
        found = plan_adaptive(it, placement, costs, [3.0, 3.0], Objective.MAKESPAN).schedule
        assert found.placement == placement


def test_a_limit_that_nothing_fits_is_told_in_gib(tmp_path: Path) -> None:
    (it,) = expand(load_sample(tmp_path, sweep={"grid": ADAPTIVE_GRID})).possible
    costs = Costs(*((1.0,) * 4,) * 3, 0.0, (GIB,) * 4, (GIB,) * 4)
    with pytest.raises(SweepError, match="device 0 may hold 1.5 GiB, but one .* devices is 2 GiB"):
        plan_adaptive(it, v_shape(2), costs, [1.5 * GIB] * 2, Objective.MAKESPAN)


def test_the_adaptive_method_takes_the_better_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_sample(tmp_path, sweep={"grid": ADAPTIVE_GRID})
    (it,) = expand(loaded).possible
    best, times_s = predictor_of(loaded)(it), {}
    for placement in (v_shape(2), looping(2, 2)):
        monkeypatch.setattr(predict, "default_placements", lambda *_, it=placement: [it])
        times_s[placement] = predictor_of(loaded)(it).step_s
    assert len(set(times_s.values())) == 2
    assert best.step_s == min(times_s.values())
    monkeypatch.undo()
    assert best.planned is not None
    assert times_s[best.planned.placement] == best.step_s


HEAVY = {"vocabulary_size": 65536}


def test_a_shared_vocabulary_is_predicted(tmp_path: Path) -> None:
    """Its passes are in the step, and nobody has all of the ends' parameters."""
    grid = {**SWEEP["grid"], "schedule": ["v-half"], "vocab_parallel": [False, True]}
    loaded = load_sample(tmp_path, sweep={"grid": grid}, model=HEAVY)
    whole, shared = expand(loaded).possible[:2]
    assert (whole.vocab_parallel, shared.vocab_parallel) == (False, True)
    predictor = predictor_of(loaded)
    one, two = predictor(whole), predictor(shared)
    assert one.step_s is not None
    assert two.step_s is not None
    assert two.step_s < 0.8 * one.step_s
    each = loaded.model.parameter_bytes + loaded.model.gradient_bytes + 12
    moved = 2 * 65536 * 256 * each / 2  # half of what one of two devices had
    logits = (4 - 2) * 64 * 65536  # V-Half's fp32 ones of few microbatches, at least
    assert one.peak_bytes - two.peak_bytes > moved + logits
    assert str(shared).endswith("vocab-parallel")


def test_an_adaptive_plan_shares_it_too(tmp_path: Path) -> None:
    grid = {**ADAPTIVE_GRID, "vocab_parallel": [True]}
    loaded = load_sample(tmp_path, sweep={"grid": grid}, model=HEAVY)
    (it,) = expand(loaded).possible
    found = predictor_of(loaded)(it)
    assert found.fits
    assert found.planned is not None
    assert is_shared(found.planned)
    verify(found.planned)


def test_multi_token_prediction_is_predicted(tmp_path: Path) -> None:
    """In time, in memory and in FLOPs; dealt out by what it takes, it costs less."""
    found = []
    for further in (0, 1):
        loaded = load_sample(tmp_path, model={**HEAVY, "mtp_layers": further})
        even = replace(expand(loaded).possible[0], schedule="v-half")
        predictor = predictor_of(loaded)
        times = [predictor(replace(even, layout=each)) for each in (Layout.EVEN, Layout.AUTO)]
        times.append(predictor(replace(even, layout=Layout.AUTO, vocab_parallel=True)))
        found.append((*times, model_flops(loaded.model, 64, 1)))
    (plain, _, alone, flops), (even, auto, shared, more) = found
    assert plain.step_s is not None
    assert even.step_s is not None
    assert auto.step_s is not None
    assert even.step_s > 1.5 * plain.step_s  # the head is most of it, and there are two
    assert auto.step_s <= even.step_s
    assert even.peak_bytes > plain.peak_bytes
    assert alone.step_s is not None
    assert shared.step_s is not None
    assert alone.step_s < shared.step_s < auto.step_s  # both heads are shared
    assert alone.peak_bytes < shared.peak_bytes < auto.peak_bytes
    assert 1.7 < more / flops < 2


def test_costs_of_a_shared_vocabulary_are_none_of_a_sweeps(tmp_path: Path) -> None:
    pieces = Pieces.estimated(2.0, 2.0)
    costs = shared_pieces(pieces, 2, 0.1).costs((2,) * 4)
    (tmp_path / "costs.json").write_text(costs.to_json())
    entry = {"costs": "costs.json", "layers_per_stage": 2, "sequence_length": 64}
    with pytest.raises(SweepError, match="of a vocabulary that all devices share"):
        load_measured(load_sample(tmp_path, sweep={"measured_costs": [entry]}))


def test_devices_share_the_link_to_their_host(tmp_path: Path) -> None:
    """At 10 GB/s a MB takes 100 us, and twice as long where two devices copy."""
    costs = replace(Costs.uniform(2, 4), held_after_forward_bytes=(1e6, 2e6, 2e6, 1e6))
    for more, times_us in (({}, (100, 200)), ({"shared_by": 2, "half_duplex": True}, (200, 400))):
        cluster = load_sample(tmp_path, cluster={"host_link": {"gb_per_s": 10} | more}).cluster
        made = Machine.of(cluster).copied(costs)
        assert made.half_duplex == bool(more)
        for kind in (COPY_OUT, COPY_BACK):
            assert [made.time_us(kind, stage) for stage in (0, 1)] == pytest.approx(times_us)
    without = Machine.of(load_sample(tmp_path).cluster)
    assert (without.copied(costs), without.in_host_bytes) == (costs, math.inf)


def test_adaptive_has_activations_wait_where_the_cluster_file_has_a_link(tmp_path: Path) -> None:
    workloads = [{"sequence_length": 64, "global_batch_size": 32}]
    # Little more than what is there besides activations, so that the order alone waits for memory.
    device = CLUSTER["device"] | {"memory_gib": 2.065}

    def found(**link: float) -> tuple[float, int]:
        """Return the step's time and how many copies there are to the host."""
        over = {"device": device} | ({"host_link": link} if link else {})
        sweep = {"grid": ADAPTIVE_GRID, "workloads": workloads}
        loaded = load_sample(tmp_path, sweep=sweep, cluster=over)
        (it,) = expand(loaded).possible
        made = predictor_of(loaded)(it)
        assert made.planned is not None
        assert made.step_s is not None
        command = trainer_command(loaded, it, tmp_path / "plan.json")
        assert ("--pipeline-host-memory-limit" in command) == ("memory_gib" in link)
        return made.step_s, sum(work.kind is COPY_OUT for row in made.planned.order for work in row)

    alone, without = found()
    own, copies = found(gb_per_s=10.0)
    assert without == 0 < copies
    assert own < 0.99 * alone
    shared, _ = found(gb_per_s=10.0, shared_by=32)
    assert own < shared <= alone * (1 + 1e-9)
    assert found(gb_per_s=10.0, memory_gib=0.001) == (pytest.approx(alone, rel=0.005), 0)

"""The arrays that the page draws are the timeline's own passes, times and memory."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from playground.answers import read_payload

from megatron_vshape.core.check.simulate import held_curve, peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.playground.picture import KINDS, Picture, encode
from megatron_vshape.playground.steps import step_pictures
from megatron_vshape.view.numbers import held_steps

TIMES = st.floats(0.125, 8)


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9), TIMES, TIMES, TIMES)
def test_the_arrays_are_the_timeline(name, devices, microbatches, forward, backward, weight):
    schedule = make(name, devices, microbatches)
    costs = Costs.uniform(devices, schedule.num_stages, forward, backward, weight, 0.1)
    timeline = simulate(schedule, costs)
    _, (found,) = read_payload(encode([Picture(timeline, costs)]))
    order = [
        Pass(KINDS[kind], int(stage), int(microbatch))
        for kind, stage, microbatch in zip(
            found["kind"], found["stage"], found["microbatch"], strict=True
        )
    ]
    assert order == list(itertools.chain(*schedule.order))
    assert found["start"].tolist() == list(itertools.chain(*timeline.starts))
    assert found["end"].tolist() == list(itertools.chain(*timeline.ends))
    held = [value for device in range(devices) for value in held_curve(schedule, costs, device)]
    assert found["held"].tolist() == np.float32(held).tolist()
    assert found["numbers"]["peaks"] == list(peak_held(schedule, costs))
    assert found["numbers"]["bubble"] == timeline.bubble


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 6))
def test_the_memory_between_passes_follows_from_the_header(name, devices, microbatches):
    """As the page has it: what the next pass holds, less its own new activations."""
    timeline = simulate(make(name, devices, microbatches))
    costs = Costs.uniform(devices, timeline.schedule.num_stages)
    _, (found,) = read_payload(encode([Picture(timeline, costs)]))
    at = 0
    for device in range(devices):
        size = found["counts"][device]
        for each in range(at, at + size - 1):
            fresh = 0.0
            if KINDS[found["kind"][each + 1]] is Kind.F:
                fresh = found["held_after_forward"][found["stage"][each + 1]]
            after = found["held"][each + 1] - fresh
            time = (found["end"][each] + found["start"][each + 1]) / 2
            if found["start"][each + 1] > found["end"][each]:
                steps = held_steps(timeline, costs, device)
                assert after == [held for begin, held in steps if begin <= time][-1]
        at += size


def test_the_steps_end_in_the_catalogue_s_schedule():
    from megatron_vshape.core.paper.catalogue import make_block

    pictures = list(step_pictures(make_block("v-half", 4, 12), make("v-half", 4, 12)))
    assert [picture.facts.title[0] for picture in pictures] == list("1234")
    assert sum(map(len, pictures[0].timeline.schedule.order)) == 3 * 8
    assert pictures[-1].timeline == simulate(make("v-half", 4, 12))
    makespans = [picture.timeline.makespan for picture in pictures[1:]]
    assert makespans == sorted(makespans, reverse=True)

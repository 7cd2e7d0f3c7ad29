"""The encoded arrays are the passes, times and memory of the timeline."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from playground.answers import read_payload

from megatron_vshape.core.check.simulate import held_curve, peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.playground.picture import KINDS, Picture, encode, step_pictures

TIMES = st.floats(0.125, 8)


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9), TIMES, TIMES, TIMES)
def test_encoded_arrays_equal_the_timeline(name, devices, microbatches, forward, backward, weight):
    schedule = make(name, devices, microbatches)
    costs = Costs.uniform(devices, schedule.num_stages, forward, backward, weight, 0.1)
    timeline = simulate(schedule, costs)
    _, (header,) = read_payload(encode([Picture(timeline, costs)]))
    order = [
        Pass(KINDS[kind], int(stage), int(microbatch))
        for kind, stage, microbatch in zip(
            header["kind"], header["stage"], header["microbatch"], strict=True
        )
    ]
    assert order == list(itertools.chain(*schedule.order))
    assert header["start"].tolist() == list(itertools.chain(*timeline.starts))
    assert header["end"].tolist() == list(itertools.chain(*timeline.ends))
    memory = [value for device in range(devices) for value in held_curve(schedule, costs, device)]
    assert header["held"].tolist() == np.float32(memory).tolist()
    assert header["numbers"]["peaks"] == list(peak_held(schedule, costs))
    assert header["numbers"]["bubble"] == timeline.bubble


def test_last_step_equals_the_catalogue_schedule():
    from megatron_vshape.core.paper.catalogue import make_block

    pictures = list(step_pictures(make_block("v-half", 4, 12), make("v-half", 4, 12)))
    assert [picture.facts.title[0] for picture in pictures] == list("1234")
    assert sum(map(len, pictures[0].timeline.schedule.order)) == 3 * 8
    assert pictures[-1].timeline == simulate(make("v-half", 4, 12))
    makespans = [picture.timeline.makespan for picture in pictures[1:]]
    assert makespans == sorted(makespans, reverse=True)

"""The adapter on Transformer Engine's Python code; torch replaces its extension (te_on_cpu)."""

import json

from mcore.farm import Ended, Farm


def results_of(run: Ended, rank: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in run.output[rank].splitlines() if line.startswith("{")]


def test_split_gradients_equal_full_backward(te_farm: Farm) -> None:
    results = results_of(te_farm.run(1, plugin="te_on_cpu", given=False).check(), 0)
    assert [result for result in results if result.get("wrong")] == []
    # 4 layers, and from 2.16 on fused experts, x 3 kinds of bias x fused x first, and not split;
    # a layer of two parts, which is never fused; and the version
    assert len(results) in (4 * 13 + 6 + 1, 5 * 13 + 6 + 1)


def test_b_does_not_gather_inputs_of_w(te_farm: Farm) -> None:
    """With sequence parallelism, B gathers only output gradients; W gathers inputs as well.

    The second gather of a W overlaps with its first product.
    """
    run = te_farm.run(2, plugin="te_on_cpu", given=True).check()
    gathers = {"F": 1, "BW": 2, "B": 1, "W": 2}
    expected = [
        {"case": case, "gathers": gathers, "wrong": [], "W": ["gather"] * 2 + ["product"] * 2}
        for case in ("LayerNormLinear", "Linear")
    ]
    for rank in range(2):
        assert results_of(run, rank) == expected, run.output[rank][-4000:]

"""A rank hangs in a pass: its peers report their pending receive and the run ends."""

import re

from mcore.farm import Farm

TIMEOUT_S, STALL_S = 4, 10
WAITS = re.compile(
    r"TransportError: rank (\d) \(device \1\): [FB]\d\.\d (?:waits for|waits for a receive of) "
    r".*(?:nothing has moved for 4 s|whose connection failed)"
)


def test_a_stalled_forward_is_reported_by_every_rank(farm: Farm) -> None:
    flags = ("--pipeline-schedule", "v-half", "--pipeline-timeout", str(TIMEOUT_S))
    run = farm.run(4, *flags, stall=f"F2.1 {STALL_S}")
    assert run.codes == [1] * 4, run.output
    for rank, text in enumerate(run.output):
        match = WAITS.search(text)
        assert match is not None, text[-2000:]
        assert int(match[1]) == rank
    message = "F3.1 waits for F2.1 from rank 2 (device 2), and nothing has moved for 4 s"
    assert message in run.output[3]

"""Explanation of a deadlock of messages."""

import itertools
from collections.abc import Mapping

from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.instructions import Await, Instruction, Run, Send

LISTED_DEVICES = 8
"""Maximum devices in an error about a deadlock of messages."""


class Meetings:
    """Devices that have reached each collective, in a simulation of all devices."""

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self._come: dict[tuple[str, int], set[int]] = {}

    def comes(self, device: int, work: Pass, awake: list[int]) -> bool:
        """Register the device at this pass; if it may go on, return True and wake the others."""
        if not work.kind.is_collective:
            return True
        come = self._come.setdefault((work.kind, work.microbatch), set())
        come.add(device)
        if len(come) < self._num_devices:
            return False
        awake.extend(come - {device})
        return True


def explain_stuck_messages(stuck: Mapping[int, Instruction]) -> str:
    """Format the error for messages that wait for each other, one line per device."""
    lines = [
        f"    device {device} {_tell_instruction(instruction)}"
        for device, instruction in itertools.islice(stuck.items(), LISTED_DEVICES)
    ]
    if len(stuck) > LISTED_DEVICES:
        lines.append(f"    ... and {len(stuck) - LISTED_DEVICES} more devices")
    return "the messages deadlock, however far ahead receives are posted:\n" + "\n".join(lines)


def _tell_instruction(instruction: Instruction) -> str:
    if isinstance(instruction, Run) and instruction.work.kind.is_collective:
        return f"waits in {instruction.work} for the other devices"
    if isinstance(instruction, Run):
        return f"waits for all of its messages in {instruction.work}"
    message = instruction.message
    if isinstance(instruction, Send):
        return f"sends {message.work} to device {message.target}, which has not posted its receive"
    if isinstance(instruction, Await):
        return f"waits for {message.work} from device {message.source}"
    return f"stands at {instruction}"

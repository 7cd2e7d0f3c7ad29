"""Why messages that are stuck cannot go on, in words."""

import itertools
from collections.abc import Mapping

from megatron_vshape.core.program.instructions import Await, Instruction, Run, Send

LISTED_DEVICES = 8
"""A deadlock of messages names at most so many devices."""


def explain_stuck_messages(stuck: Mapping[int, Instruction]) -> str:
    """Return the message about messages that wait for each other, one line a device."""
    lines = [
        f"    device {device} {_tell_instruction(instruction)}"
        for device, instruction in itertools.islice(stuck.items(), LISTED_DEVICES)
    ]
    if len(stuck) > LISTED_DEVICES:
        lines.append(f"    ... and {len(stuck) - LISTED_DEVICES} more devices")
    return "the messages deadlock, however far ahead receives are posted:\n" + "\n".join(lines)


def _tell_instruction(instruction: Instruction) -> str:
    if isinstance(instruction, Run):
        return f"waits for all of its messages in {instruction.work}"
    message = instruction.message
    if isinstance(instruction, Send):
        return f"sends {message.work} to device {message.target}, which has not posted its receive"
    if isinstance(instruction, Await):
        return f"waits for {message.work} from device {message.source}"
    return f"stands at {instruction}"

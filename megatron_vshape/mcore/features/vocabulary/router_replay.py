"""Router replay in calls of the trainer's function that run no layers, or only the loss.

Before it calls the model on a microbatch, a library sets the choices that the routers of a chunk
replay. After the call it reads the choices that they have recorded, or switches them to the
backward pass. With vocabulary parallelism some calls run no layers: the call that looks up the
tokens of the first stage, and the calls that compute the loss of logits. These calls do not change
the routers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step.microbatches import ForwardingIterator
from megatron_vshape.mcore.step_state import unwrapped

_RouterStates = list[dict[str, Any]]
"""The attributes of every RouterReplay object of a chunk."""


def routers_of(chunk: nn.Module) -> list[Any]:
    """Find the RouterReplay objects of a chunk; none if its config has no experts."""
    model = unwrapped(chunk)
    if not getattr(getattr(model, "config", None), "num_moe_experts", None):
        return []
    replays = (getattr(module, "router_replay", None) for module in model.modules())
    return [replay for replay in replays if hasattr(replay, "router_replay_action")]


def are_active(routers: Sequence[Any]) -> bool:
    """Check whether any router records or replays."""
    return any(router.router_replay_action is not None for router in routers)


def states_of(routers: Sequence[Any]) -> _RouterStates:
    """Copy the state of the routers."""
    return [_copy_state(vars(router)) for router in routers]


def restore(routers: Sequence[Any], states: _RouterStates) -> None:
    """Restore the states of the routers."""
    for router, state in zip(routers, states, strict=True):
        vars(router).update(_copy_state(state))


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state with its lists, whose tensors are shared."""
    return {
        name: list(attribute) if isinstance(attribute, list) else attribute
        for name, attribute in state.items()
    }


@contextmanager
def inactive(routers: Sequence[Any]) -> Iterator[None]:
    """Deactivate the routers in this context, and restore their states afterwards."""
    states = states_of(routers)
    for router in routers:
        router.router_replay_action = None
    try:
        yield
    finally:
        restore(routers, states)


@dataclass(slots=True)
class LastCalls:
    """The last chunk's routers on the loss rank, where the library's calls end at the logits.

    The rest of such a call runs later, when the loss is computed. By then, the routers may have the
    states of another microbatch.
    """

    routers: list[Any]
    _states: dict[int, _RouterStates] = field(default_factory=dict)
    _actions: list[Any] | None = None  # set by the library after a call

    def end_at_logits(self, microbatch: int) -> None:
        """Store the router states of a call that has ended at the logits."""
        if are_active(self.routers):
            self._states[microbatch] = states_of(self.routers)
            self._set_actions()

    @contextmanager
    def rest_of_call(self, microbatch: int) -> Iterator[None]:
        """Restore the router states of a microbatch while the rest of its call runs."""
        states = self._states.pop(microbatch, None)
        if states is None:
            with inactive(self.routers):
                yield
            return
        outer_states = states_of(self.routers)
        restore(self.routers, states)
        try:
            yield
            # From the first loss on, which comes before the first backward pass.
            self._actions = [router.router_replay_action for router in self.routers]
        finally:
            restore(self.routers, outer_states)
        self._set_actions()

    def _set_actions(self) -> None:
        if self._actions is not None:
            for router, action in zip(self.routers, self._actions, strict=True):
                router.router_replay_action = action


class ModelCalled(Exception):
    """Ends a call of the trainer's function at its call of the model."""


class RecordedIterator(ForwardingIterator):
    """An iterator that records its items, so that they can be read again."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._items: list[Any] = []

    def __next__(self) -> Any:
        item = next(self.source)
        self._items.append(copy.copy(item))  # the trainer may modify its copy
        return item

    def replay(self) -> Iterator[Any]:
        """Return the same items.

        Raises:
            UnsupportedError: The trainer does not read its data by `next`.
        """
        if not self._items:
            raise UnsupportedError(
                "--pipeline-vocab-parallel supports router replay only with a data iterator that "
                "is read by next(). Remove --pipeline-vocab-parallel"
            )
        return iter(self._items)

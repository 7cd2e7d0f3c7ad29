"""Temporary replacement of attributes of other objects, such as modules and classes."""

from __future__ import annotations

from typing import Any

ABSENT = object()
"""Marks an attribute that the object itself did not have."""


class Replaced:
    """Replaces attributes and restores them in reverse order; also a context manager."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        """Return whether anything is replaced now."""
        return bool(self._originals)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value`; for an instance, only on this object."""
        self._originals.append((owner, name, vars(owner).get(name, ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> list[tuple[Any, Any]]:
        """Restore all attributes; return pairs of the replaced and the restored value."""
        undone = []
        while self._originals:
            owner, name, original = self._originals.pop()
            undone.append((vars(owner).get(name), original))
            if original is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        return undone

    def __enter__(self) -> Replaced:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

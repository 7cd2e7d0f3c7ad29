"""Replacement of Megatron's attributes: for good (`Hook`), or within a context (`Replaced`).

A function marked with `replaces` gets the session, the original function and the arguments of a
call. Until a schedule is requested, only the original runs. A function marked with
`replaces_always` runs even then, because it detects the request or runs before it. Both decorators
make factories (session, original) -> replacement, the form that `Hook.replacement` requires; for a
class, the factory is written out.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

ABSENT = object()
"""Marks an attribute that the object itself did not have."""


class Replaced:
    """Replaces attributes and restores them in reverse order; also a context manager."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        """Return whether anything is replaced now."""
        return bool(self._originals)

    def has(self, owner: Any, name: str) -> bool:
        """Return whether `owner.name` is replaced now."""
        return any(original[0] is owner and original[1] == name for original in self._originals)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


class Switched(Replaced):
    """Replacements that are all in place or none: `values` lists owner, name and value of each."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[Any, str, Any]] = []

    def switch(self, is_on: bool) -> None:
        """Put all replacements in place, or restore the originals."""
        self.undo()
        for replacement in self.values if is_on else ():
            self.put(*replacement)


Function = Callable[..., Any]

Session = Any
"""The state of the hooks, `hooks.session.Session`, which imports the features."""

Release = tuple[int, int]
"""Major and minor version of megatron-core."""


def release() -> Release:
    """Return the installed release."""
    major, minor, *_ = importlib.import_module("megatron.core").__version__.split(".")
    return int(major), int(minor)


@dataclass(frozen=True, slots=True)
class Target:
    """An attribute of Megatron that this package uses: `attribute` of `module`.

    `expects` lists required parameters of the attribute or, for a class, of its `forward`.
    """

    module: str
    attribute: str  # dotted for attributes of classes
    expects: tuple[str, ...]
    reason: str

    @property
    def target(self) -> str:
        """Return the full name of the attribute."""
        return f"{self.module}.{self.attribute}"

    @property
    def name(self) -> str:
        """Return the name of the attribute within its owner."""
        return self.attribute.rpartition(".")[2]

    def owner(self) -> Any:
        """Return the module or class that has the attribute, or None if it does not exist."""
        try:
            owner: Any = importlib.import_module(self.module)
        except ImportError:
            return None
        for part in self.attribute.split(".")[:-1]:
            owner = getattr(owner, part, None)
        return owner

    def original(self) -> Any:
        """Return the attribute, or `ABSENT` if it does not exist."""
        owner = self.owner()
        return ABSENT if owner is None else vars(owner).get(self.name, ABSENT)


@dataclass(frozen=True, slots=True)
class Dependency(Target):
    """A function of Megatron that this package calls but does not replace.

    `sets` lists attributes that the function, a constructor, has to set on its object.
    """

    sets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hook(Target):
    """A replaced attribute; `replacement` gets the session and the original."""

    replacement: Callable[[Session, Any], Any]
    # The first release that must have it. In earlier ones it may be absent.
    since: Release = (0, 0)
    former_module: str = ""  # the module that has it in earlier releases
    everywhere: bool = False  # replaced also in modules that have imported it by name
    only_with_pipeline: bool = False  # replaced only while a schedule of this package is chosen

    def owner(self) -> Any:
        """Return the module or class that has the attribute, or None if it does not exist."""
        if self.former_module and release() < self.since:
            return Target.owner(replace(self, module=self.former_module))
        return Target.owner(self)


def replaces_always(stand_in: Function) -> Function:
    """Turn `stand_in` into a factory: (session, original) -> replacement, active in every call."""

    @functools.wraps(stand_in)
    def make(session: Session, original: Function) -> Function:
        @functools.wraps(original)
        def replacement(*args: Any, **options: Any) -> Any:
            try:
                return stand_in(session, original, *args, **options)
            except (ValueError, SystemExit) as error:
                session.name_options(error)
                raise

        return replacement

    return make


def replaces(stand_in: Function) -> Function:
    """Turn `stand_in` into a factory whose replacement is active once a schedule is requested."""

    @functools.wraps(stand_in)
    def unless_idle(session: Session, original: Function, *args: Any, **options: Any) -> Any:
        # Checked in every call: at installation, the flags have not been parsed yet.
        if session.is_idle:
            return original(*args, **options)
        return stand_in(session, original, *args, **options)

    return replaces_always(unless_idle)

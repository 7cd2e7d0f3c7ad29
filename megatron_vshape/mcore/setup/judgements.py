"""The judgement of every argument of Megatron: the lists by topic, and the rejected ones.

Loaded by `megatron-vshape doctor` and by the warning about arguments without a judgement.
"""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron_vshape.environment import is_first_rank
from megatron_vshape.mcore.refusals import REFUSALS, By, Refusal
from megatron_vshape.mcore.setup.features import features
from megatron_vshape.mcore.setup.judged_arguments import TOPICS, Judgement
from megatron_vshape.mcore.setup.translate import TRANSLATIONS, Treatment

logger = logging.getLogger(__name__)

Release = tuple[int, int]

_WORD = re.compile(r"(?P<name>.+?)(?:>=0\.(?P<since>\d+))?(?:<0\.(?P<until>\d+))?")
_OUTCOMES = {
    Treatment.TRANSLATED: Judgement.TRANSLATED,
    Treatment.SET_ASIDE: Judgement.IGNORED,
}


class Word(NamedTuple):
    """A name in a list, with the range of Megatron releases that have it."""

    name: str
    since: Release = (0, 0)
    until: Release | None = None  # the first release without it

    def is_in(self, release: Release) -> bool:
        """Return whether a release of Megatron has the name, according to the list."""
        return self.since <= release and (self.until is None or release < self.until)


def words(text: str) -> Iterator[Word]:
    """Parse names separated by white space, as in `name other>=0.20 third<0.18`."""
    for part in text.split():
        match = _WORD.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no name of an argument with releases")
        since, until = match["since"], match["until"]
        yield Word(match["name"], (0, int(since or 0)), None if until is None else (0, int(until)))


class Judged(NamedTuple):
    """The judgement of an argument."""

    judgement: Judgement
    reason: str
    rejected_with: tuple[str, ...] = ()  # features that reject it, or some of its values


def judgements() -> dict[str, Judged]:
    """Return the judgement of every argument, by its attribute of Megatron's arguments.

    The result also has attributes of configs that are no arguments, if a schedule rejects or
    translates them.
    """
    table = {
        word.name: Judged(topic.judgement, topic.reason)
        for topic in TOPICS
        for word in words(topic.names)
    }
    for refusal in (*REFUSALS[By.SCHEDULE], *REFUSALS[By.CHUNKS]):
        for name in arguments_of(refusal):
            table[name] = Judged(Judgement.REJECTED, refusal.why)
    for rule in TRANSLATIONS:
        for name in rule.names:
            table[name] = Judged(_OUTCOMES[rule.outcome], rule.becomes)
    conditional_refusals = [
        *((feature.support.flag, feature.refusals) for feature in features() if feature.refusals),
        *((by.value, REFUSALS[by]) for by in (By.RECORDING, By.SPLIT_GRAPHS)),
    ]
    for flag, refusals in conditional_refusals:
        for name in {name for refusal in refusals for name in arguments_of(refusal)}:
            if name in table:
                judged = table[name]
                table[name] = judged._replace(rejected_with=(*judged.rejected_with, flag))
    return table


def arguments_of(refusal: Refusal) -> set[str]:
    """Return the attributes of the arguments that a refusal is about.

    They are the attribute that it reads, and that of the first flag in its text. The two differ if
    Megatron computes the attribute from the flag.
    """
    flag = re.match(r"--([\w-]+)", refusal.option)
    return {refusal.name, refusal.name if flag is None else flag[1].replace("-", "_")}


def unjudged_settings(args: Namespace, defaults: Mapping[str, Any]) -> list[str]:
    """Return the arguments without a judgement whose values differ from Megatron's defaults.

    A default may be a text that the parser has not converted, so texts are compared.
    """
    table = judgements()
    return [
        name
        for name, default in defaults.items()
        if name not in table and str(getattr(args, name, default)) != str(default)
    ]


def warn_of_unjudged(args: Namespace, defaults: Mapping[str, Any]) -> None:
    """Log the arguments that are set and have no judgement, on rank 0."""
    if not is_first_rank():
        return
    names = unjudged_settings(args, defaults)
    if names:
        logger.warning(
            "this release of megatron-vshape has not been reviewed with these options of Megatron: "
            "%s. Compare the first losses with --pipeline-schedule 1f1b",
            ", ".join(names),
        )

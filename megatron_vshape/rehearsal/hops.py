"""Bytes of a collective over each kind of link: NVLink within a node, the network between nodes.

Both kinds of links transfer at the same time, so the slower one determines the time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

DISPATCH = "token dispatch, top "
"""Kind of a DeepEP or HybridEP dispatch, followed by the experts per token. Its bytes count each
token once; the number of copies depends on the GPUs of a node."""


class Hops(NamedTuple):
    """Bytes that a rank receives over each kind of link."""

    near: float
    far: float


def ranks_per_node(ranks: int, span: int, node: int) -> int:
    """Count the ranks of a group that share a node; its ranks are evenly spaced over `span`."""
    stride = (span - 1) / (ranks - 1) if ranks > 1 else 1.0
    return max(1, min(ranks, int(node // max(stride, 1.0))))


def hops_of(kind: str, ranks: int, span: int, size: float, node: int) -> Hops:
    """Split the bytes of one collective by kind of link.

    * A plain all-to-all sends each rank its part directly.
    * DeepEP and HybridEP send a token once to each node, and from there over NVLink once to each
      rank that has one of its experts.
    * Gather, scatter and reduction run in rings. The number of rings is the number of the group's
      ranks in a node, so each rank sends its share of the bytes to the next node.

    Args:
        kind: name of the collective, or `DISPATCH` and a number.
        ranks: ranks of the group.
        span: distance from the first to the last rank, plus one.
        size: bytes of the larger side.
        node: GPUs that NVLink connects.
    """
    within = ranks_per_node(ranks, span, node)
    nodes = math.ceil(ranks / within)
    if kind.startswith(DISPATCH):
        copies = int(kind.removeprefix(DISPATCH))
        near = size * (ranks - 1) * _reached(ranks, copies)
        return Hops(near if within > 1 else 0.0, size * (nodes - 1) * _reached(nodes, copies))
    if kind.startswith("all_to_all"):
        return Hops(size * (within - 1) / ranks, size * (ranks - within) / ranks)
    around = size * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
    return Hops(around if within > 1 else 0.0, around / within if nodes > 1 else 0.0)


def _reached(places: int, copies: int) -> float:
    """Estimate the probability that a token has an expert in a given place (uniform routing)."""
    return 1 - (1 - 1 / places) ** copies

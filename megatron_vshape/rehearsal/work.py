"""GPU-independent counts of kernel work; `step_time` converts them to time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

ExchangeKey = tuple[str, str, int, int]
"""Kind, group, number of ranks and their span."""


SUMS = "bytes_moved", "optimizer_bytes", "once_bytes", "kernels", "captured", "captured_gemms"
"""Fields that are numbers."""


@dataclass(slots=True)
class Work:
    """Counts of the kernel work of one step."""

    products: dict[tuple[str, int, int, int, int], int] = field(default_factory=dict)
    """(number format, rows, inner, columns, GEMMs per kernel) -> number of kernels."""
    attention_flops: dict[str, float] = field(default_factory=dict)  # by number format
    bytes_moved: float = 0.0
    optimizer_bytes: float = 0.0
    once_bytes: float = 0.0  # other traffic once per step: weights cast, gradients scaled
    kernels: int = 0
    captured: int = 0  # of these, kernels that CUDA graphs of layers replay
    captured_gemms: int = 0  # and GEMMs
    exchanges: dict[ExchangeKey, list[float]] = field(default_factory=dict)
    """(kind, group, ranks, span) -> number, and bytes of the larger side."""

    def copy(self) -> Work:
        """Return a copy of the current counts."""
        exchanges = {key: list(counts) for key, counts in self.exchanges.items()}
        products, attention = dict(self.products), dict(self.attention_flops)
        return replace(self, products=products, attention_flops=attention, exchanges=exchanges)

    def minus(self, earlier: Work) -> Work:
        """Return the difference to an earlier copy."""
        products = {key: n - earlier.products.get(key, 0) for key, n in self.products.items()}
        attention = {
            name: flops - earlier.attention_flops.get(name, 0.0)
            for name, flops in self.attention_flops.items()
        }
        exchanges = {}
        for key, (number, size) in self.exchanges.items():
            earlier_counts = earlier.exchanges.get(key, (0, 0))
            exchanges[key] = [number - earlier_counts[0], size - earlier_counts[1]]
        return Work(
            {key: number for key, number in products.items() if number},
            {name: flops for name, flops in attention.items() if flops},
            exchanges={key: counts for key, counts in exchanges.items() if counts[0]},
            **{name: getattr(self, name) - getattr(earlier, name) for name in SUMS},
        )

    def plus(self, addend: Work, times: int) -> Work:
        """Return the sum of this work and `times` the addend."""
        total = self.copy()
        for key, number in addend.products.items():
            total.products[key] = total.products.get(key, 0) + times * number
        for name, flops in addend.attention_flops.items():
            total.attention_flops[name] = total.attention_flops.get(name, 0.0) + times * flops
        for exchange, added in addend.exchanges.items():
            counts = total.exchanges.get(exchange, [0, 0])
            total.exchanges[exchange] = [a + times * b for a, b in zip(counts, added, strict=True)]
        for name in SUMS:
            setattr(total, name, getattr(total, name) + times * getattr(addend, name))
        return total

    def is_close(self, reference: Work) -> bool:
        """Return whether the counts are equal up to the rounding of floating-point sums."""
        counts = [
            (
                work.products,
                work.exchanges,
                (work.kernels, work.captured, work.captured_gemms),
                work.attention_flops.keys(),
            )
            for work in (self, reference)
        ]
        sums = [
            (
                work.bytes_moved,
                work.optimizer_bytes,
                work.once_bytes,
                *map(work.attention_flops.get, counts[0][-1]),
            )
            for work in (self, reference)
        ]
        return counts[0] == counts[1] and all(map(math.isclose, *sums))

    def repeating(
        self, keys: Collection[ExchangeKey], passes: Collection[Work], microbatches: int = 1
    ) -> Work:
        """Return this work with the collectives of `keys` marked as part of every microbatch.

        Each microbatch has the collectives of `passes`, the passes of one microbatch. For the first
        microbatch FSDP gathers before its passes, so `passes` should be those of the last one.
        """
        exchanges = {key: list(counts) for key, counts in self.exchanges.items()}
        for work in passes:
            for key in work.exchanges.keys() & keys & self.exchanges.keys():
                kind, group, ranks, span = key
                marked = exchanges.setdefault((kind, group + EACH, ranks, span), [0, 0])
                for index, count in enumerate(work.exchanges[key]):
                    marked[index] += microbatches * count
                    exchanges[key][index] = max(exchanges[key][index] - microbatches * count, 0)
        return replace(
            self, exchanges={key: counts for key, counts in exchanges.items() if counts[0]}
        )

    def plain(self) -> dict[str, Any]:
        """Return the counts as plain values for JSON."""
        values = asdict(self)
        values["products"] = [[*key, number] for key, number in self.products.items()]
        values["exchanges"] = [
            {"kind": kind, "group": group, "ranks": ranks, "span": span, "number": n, "bytes": size}
            for (kind, group, ranks, span), (n, size) in self.exchanges.items()
        ]
        return values

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Work:
        """Return the counts from the result of `plain`."""
        products: dict[Any, int] = {}
        for *key, number in plain["products"]:
            products[tuple(key)] = products.get(tuple(key), 0) + number
        exchanges: dict[Any, list[float]] = {}
        for collective in plain["exchanges"]:
            key = collective["kind"], collective["group"], collective["ranks"], collective["span"]
            exchanges[key] = [collective["number"], collective["bytes"]]
        sums = {name: plain.get(name, 0) for name in SUMS}
        attention = dict(plain["attention_flops"])
        return cls(products, attention, exchanges=exchanges, **sums)

    def spread(self, ratio: float, is_sharded: bool) -> Work:
        """Scale the work that a step has once to `ratio` times the data-parallel replicas.

        Only work that occurs once per step depends on the replicas: its collectives and, if
        `is_sharded`, the optimizer's bytes.
        """
        exchanges = {}
        for (kind, group, ranks, span), counts in self.exchanges.items():
            key = kind, group, ranks, span
            if of_replicas(group):
                new_ranks = max(1, round(ranks * ratio))
                apart = (span - 1) / max(ranks - 1, 1)
                key = kind, group, new_ranks, round((new_ranks - 1) * apart) + 1
            exchanges[key] = counts
        optimizer_bytes = self.optimizer_bytes / (ratio if is_sharded else 1.0)
        return replace(self, exchanges=exchanges, optimizer_bytes=optimizer_bytes)


EACH = " in each microbatch"
"""Suffix of a data-parallel group's name for collectives in every microbatch, as in FSDP."""

_SHARDS = ("all_gather", "_all_gather", "reduce_scatter", "_reduce_scatter")


def repeated(passes: Iterable[tuple[int, Work]]) -> set[ExchangeKey]:
    """Find gathers and scatters of replicas that occur in several microbatches.

    Data parallelism reduces gradients in the last microbatch and gathers parameters in the first.
    FSDP does both in each. `passes` are pairs of a microbatch and the work of one of its passes.
    """
    microbatches_of: dict[ExchangeKey, set[int]] = {}
    for microbatch, work in passes:
        for key in work.exchanges:
            if key[0].startswith(_SHARDS) and is_once(key[1]):
                microbatches_of.setdefault(key, set()).add(microbatch)
    return {key for key, microbatches in microbatches_of.items() if len(microbatches) > 1}


def of_replicas(group: str) -> bool:
    """Return whether the group's ranks are replicas, or shards of them."""
    return "DATA" in group or "INTRA_DIST" in group or group == "world"


def is_once(group: str) -> bool:
    """Return whether the group's collectives occur once per step instead of per microbatch."""
    return of_replicas(group) and not group.endswith(EACH)

"""What kernels do, in counts that no GPU's rates are in; `step_time` prices it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

ExchangeKey = tuple[str, str, int, int]
"""Kind, group, ranks and their reach."""


@dataclass(slots=True)
class Work:
    """What kernels do, to be priced: counts of one step."""

    products: dict[tuple[str, int, int, int, int], int] = field(default_factory=dict)
    """By number format, rows, inner and columns, and how many run as one kernel: how often."""
    attention_flops: dict[str, float] = field(default_factory=dict)  # by number format
    bytes_moved: float = 0.0
    optimizer_bytes: float = 0.0
    kernels: int = 0
    exchanges: dict[ExchangeKey, list[float]] = field(default_factory=dict)
    """By kind, group, ranks and their reach: number, and bytes of the larger side."""

    def copy(self) -> Work:
        """Return the counts as they are now."""
        exchanges = {key: list(each) for key, each in self.exchanges.items()}
        products, attention = dict(self.products), dict(self.attention_flops)
        return replace(self, products=products, attention_flops=attention, exchanges=exchanges)

    def less(self, other: Work) -> Work:
        """Return what was counted beyond an earlier copy."""
        products = {key: n - other.products.get(key, 0) for key, n in self.products.items()}
        attention = {
            name: flops - other.attention_flops.get(name, 0.0)
            for name, flops in self.attention_flops.items()
        }
        exchanges = {}
        for key, (number, size) in self.exchanges.items():
            before = other.exchanges.get(key, (0, 0))
            exchanges[key] = [number - before[0], size - before[1]]
        return Work(
            {key: number for key, number in products.items() if number},
            {name: flops for name, flops in attention.items() if flops},
            self.bytes_moved - other.bytes_moved,
            self.optimizer_bytes - other.optimizer_bytes,
            self.kernels - other.kernels,
            {key: each for key, each in exchanges.items() if each[0]},
        )

    def repeating(
        self, keys: Collection[ExchangeKey], passes: Collection[Work], microbatches: int = 1
    ) -> Work:
        """Return this work with the exchanges of `keys` marked as those of every microbatch.

        Each has those of `passes`, which are of one microbatch. FSDP gathers for the first one
        before its passes, so the last one tells.
        """
        exchanges = {key: list(each) for key, each in self.exchanges.items()}
        for work in passes:
            for key in work.exchanges.keys() & keys & self.exchanges.keys():
                kind, group, ranks, span = key
                marked = exchanges.setdefault((kind, group + EACH, ranks, span), [0, 0])
                for at, count in enumerate(work.exchanges[key]):
                    marked[at] += microbatches * count
                    exchanges[key][at] = max(exchanges[key][at] - microbatches * count, 0)
        return replace(self, exchanges={key: each for key, each in exchanges.items() if each[0]})

    def plain(self) -> dict[str, Any]:
        """Return the counts as plain values for JSON."""
        found = asdict(self)
        found["products"] = [[*key, number] for key, number in self.products.items()]
        found["exchanges"] = [
            {"kind": kind, "group": group, "ranks": ranks, "span": span, "number": n, "bytes": size}
            for (kind, group, ranks, span), (n, size) in self.exchanges.items()
        ]
        return found

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Work:
        """Return the counts that `plain` has written."""
        products: dict[Any, int] = {}
        for *key, number in plain["products"]:
            products[tuple(key)] = products.get(tuple(key), 0) + number
        exchanges: dict[Any, list[float]] = {}
        for each in plain["exchanges"]:
            key = each["kind"], each["group"], each["ranks"], each["span"]
            exchanges[key] = [each["number"], each["bytes"]]
        sums = {name: plain[name] for name in ("bytes_moved", "optimizer_bytes", "kernels")}
        attention = dict(plain["attention_flops"])
        return cls(products, attention, exchanges=exchanges, **sums)

    def spread(self, ratio: float, is_sharded: bool) -> Work:
        """Return the work of a step that so many times as many replicas share.

        What a step has once alone depends on them: its exchanges, and the optimizer's bytes where
        `is_sharded`.
        """
        exchanges = {}
        for (kind, group, ranks, span), sent in self.exchanges.items():
            key = kind, group, ranks, span
            if of_replicas(group):
                more = max(1, round(ranks * ratio))
                apart = (span - 1) / max(ranks - 1, 1)
                key = kind, group, more, round((more - 1) * apart) + 1
            exchanges[key] = sent
        less = self.optimizer_bytes / (ratio if is_sharded else 1.0)
        return replace(self, exchanges=exchanges, optimizer_bytes=less)


EACH = " in each microbatch"
"""Behind the name of a data-parallel group: exchanges that every microbatch has, as FSDP's."""

_SHARDS = ("all_gather", "_all_gather", "reduce_scatter", "_reduce_scatter")


def repeated(passes: Iterable[tuple[str, Work]]) -> set[ExchangeKey]:
    """Find gathers and scatters of replicas that passes of several microbatches have.

    Data parallelism sums gradients in the last microbatch and gathers parameters in the first; FSDP
    does both in each. A pass has a name as `F 0 7`, whose last word is its microbatch.
    """
    seen: dict[ExchangeKey, set[str]] = {}
    for name, work in passes:
        for key in work.exchanges:
            if key[0].startswith(_SHARDS) and is_once(key[1]):
                seen.setdefault(key, set()).add(name.split()[-1])
    return {key for key, microbatches in seen.items() if len(microbatches) > 1}


def of_replicas(group: str) -> bool:
    """Return whether the group's ranks are replicas, or shards of them."""
    return "DATA" in group or "INTRA_DIST" in group or group == "world"


def is_once(group: str) -> bool:
    """Return whether a step has the group's exchanges once, not every microbatch."""
    return of_replicas(group) and not group.endswith(EACH)

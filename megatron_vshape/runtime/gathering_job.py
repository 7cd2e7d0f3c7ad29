"""Weight-gradient jobs that save a sequence-parallel shard and all-gather the rest at run time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors of tensors, quantized tensors and nested lists of both.

    For a quantized tensor this includes its scales, which most `get_data_tensors` omit.
    """
    if isinstance(value, list | tuple):
        for each in value:
            yield from plain_tensors(each)
    elif hasattr(value, "get_data_tensors"):
        data = value.get_data_tensors()
        parts = [*(data if isinstance(data, list | tuple) else [data]), *vars(value).values()]
        yield from plain_tensors(list({id(each): each for each in parts}.values()))
    elif isinstance(value, Tensor):
        yield value


@dataclass(eq=False)
class GatheringJob:
    """All-gather some tensors over their groups, then compute with all of them.

    The all-gather may start while the previous job computes (see `WeightJobs.run`). So two gathered
    tensors are alive at a time, each in separate memory: in one shared buffer, as Megatron uses,
    the second would overwrite the first while its GEMM still reads.
    """

    compute: Callable[..., None]
    tensors: list[Any]  # arguments; a tensor to gather is this rank's shard along dimension 0
    groups: Sequence[dist.ProcessGroup | None]  # of each tensor; None: not gathered
    _has_begun: bool = False
    _under_way: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        """Start the all-gathers once, without waiting; collective over the groups."""
        if self._has_begun:
            return
        self._has_begun = True
        for at, group in enumerate(self.groups):
            if group is not None:
                part = self.tensors[at]
                whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
                work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
                if work is None:
                    raise RuntimeError("a weight job gathers over a group that this rank is not in")
                self._under_way.append((work, part))  # alive until the all-gather ends
                self.tensors[at] = whole

    def __call__(self) -> None:
        """Wait for the all-gathers and compute."""
        self.begin()
        for work, _ in self._under_way:
            work.wait()
        self._under_way = []
        self.compute(*self.tensors)

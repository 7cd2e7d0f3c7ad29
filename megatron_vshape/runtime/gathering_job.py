"""Weight jobs that keep a rank's part of the sequence, and gather the rest when they run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a product reads of tensors, quantized ones, and lists of both.

    Of a quantized one its scales, too, which `get_data_tensors` of most leaves out.
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
    """Gathers some of its tensors over their groups, then computes with all of them.

    The gather may begin while the job before it computes (see `WeightJobs.run`). So two gathered
    tensors live at a time, and each has memory of its own: in one shared buffer, such as Megatron
    keeps, the later would overwrite what the GEMM of the earlier still reads.
    """

    compute: Callable[..., None]
    tensors: list[Any]  # its arguments; of one to gather this rank's part, along dimension 0
    groups: Sequence[dist.ProcessGroup | None]  # for each the group to gather it over, if any
    _has_begun: bool = False
    _under_way: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        """Start to gather, unless it has been; does not wait. All ranks of the groups do so."""
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
                self._under_way.append((work, part))  # the part is read until the work has ended
                self.tensors[at] = whole

    def __call__(self) -> None:
        """Wait for what is gathered, and compute."""
        self.begin()
        for work, _ in self._under_way:
            work.wait()
        self._under_way = []
        self.compute(*self.tensors)

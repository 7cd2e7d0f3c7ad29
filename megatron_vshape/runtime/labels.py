"""Names for what runs, in the traces of torch's profiler and of Nsight Systems.

A label is torch's `record_function`. Under `torch.autograd.profiler.emit_nvtx`, which Megatron's
`--profile` turns on, torch makes an NVTX range of it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

_NOTHING = nullcontext()
_NAME = "vshape_name"


def label(text_of: Callable[..., str], *args: object) -> AbstractContextManager[object]:
    """Return a context that is recorded under the name `text_of(*args)`.

    The name is made only when something records: a record_function takes microseconds even when
    nothing does, and this well under one.
    """
    if _profiler_enabled():
        return record_function(text_of(*args))
    return _NOTHING


def name_weights(model: nn.Module) -> None:
    """Have `job_text` know every weight by the name that it has in `model`."""
    for name, parameter in model.named_parameters():
        setattr(parameter, _NAME, name.removesuffix(".weight"))


def job_text(weights: Sequence[Tensor]) -> str:
    """Return the label of a job that adds to the gradients of `weights`: the first one's layer.

    It is the weight's shape where nobody has named it.
    """
    names = (getattr(each, _NAME, "x".join(map(str, each.shape))) for each in weights)
    return f"job {next(names, '')}".rstrip()

"""Labels of passes and jobs in traces of torch's profiler and Nsight Systems.

A label is a `record_function`. Under `torch.autograd.profiler.emit_nvtx`, which Megatron's
`--profile` enables, torch emits it as an NVTX range.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

_NOTHING = nullcontext()
_NAME = "vshape_name"


def label(text_of: Callable[..., str], *args: object) -> AbstractContextManager[object]:
    """Return a context that the profiler records under the name `text_of(*args)`.

    The name is formatted only while a profiler records: `record_function` costs microseconds even
    without a profiler, this check well under one.
    """
    if _profiler_enabled():
        return record_function(text_of(*args))
    return _NOTHING


def name_weights(model: nn.Module) -> None:
    """Store the names of a model's weights for `job_text`."""
    for name, parameter in model.named_parameters():
        setattr(parameter, _NAME, name.removesuffix(".weight"))


def job_text(weights: Sequence[Tensor]) -> str:
    """Return the label of a weight-gradient job: the name of its first weight, or the shape."""
    names = (getattr(each, _NAME, "x".join(map(str, each.shape))) for each in weights)
    return f"job {next(names, '')}".rstrip()

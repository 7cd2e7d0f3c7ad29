#!/usr/bin/env python3
"""Check FP8 weight gradients of sequence slices and split backwards, with Transformer Engine.

    python benchmarks/check_fp8_slices.py [--hidden 4096] [--tokens 4096]

Needs one GPU with FP8 (Hopper or later); needs under a minute. For each layer and recipe the script

1. runs passes in the order of sequence slices, with Transformer Engine alone and with the adapter,
   and compares main_grad with the sum of the gradients of the single backwards;
2. measures the memory that is retained between B and W with and without the row-wise data of
   quantized tensors, and compares the gradients bit by bit.

Exits with 1 if the adapter's gradients differ, or if nothing was freed.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from megatron_vshape.mcore.split import te_layers
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.view.numbers import table

DEVICE = "cuda"
WHOLE = "F0 F1 F2 BW2 BW1 BW0"
ORDERS = (WHOLE, "F0 F1 F2 B2 B1 B0 W2 W1 W0", "F0 F1 F2 B2 BW1 W2 BW0")
EXPERTS = 4
LIMIT = 1e-5
"""Relative difference by which fp32 sums may differ: TE's GEMM adds, the reference adds later."""


def recipes(te: Any) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Make the FP8 contexts of the recipes that this GPU supports, by name."""
    from transformer_engine.common import recipe

    autocast = partial(te.autocast, enabled=True)
    recipes = {"delayed": recipe.DelayedScaling(), "current": recipe.Float8CurrentScaling()}
    if torch.cuda.get_device_capability() < (10, 0):
        recipes["blockwise"] = recipe.Float8BlockScaling()
    return {name: partial(autocast, recipe=fp8_recipe) for name, fp8_recipe in recipes.items()}


def builders(te: Any, hidden: int) -> dict[str, Callable[[], nn.Module]]:
    """Return a function per kind of layer that builds it with equal weights."""
    options = {"bias": False, "fuse_wgrad_accumulation": True, "device": DEVICE}
    options |= {"params_dtype": torch.bfloat16}
    return {
        "Linear": partial(te.Linear, hidden, hidden, **options),
        "LayerNormLinear": partial(te.LayerNormLinear, hidden, hidden, **options),
        "LayerNormMLP": partial(te.LayerNormMLP, hidden, 2 * hidden, **options),
        "GroupedLinear": partial(te.GroupedLinear, EXPERTS, hidden, hidden, **options),
    }


class Case(NamedTuple):
    """A kind of layer with a recipe."""

    name: str
    build: Callable[[], nn.Module]
    autocast: Callable[[], AbstractContextManager[Any]]
    hidden: int
    tokens: int


class Passes:
    """Runs passes of a layer by their names; F0 is marked as the first microbatch."""

    def __init__(self, case: Case, adapted: bool) -> None:
        torch.manual_seed(0)
        self.case, self.state = case, StepState(has_own_schedule=True)
        self.layer = case.build()
        for parameter in self.layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        self._outputs: dict[str, Tensor] = {}
        if adapted and te_layers.use_job_stores(self.state, [self.layer]) != 1:
            raise RuntimeError(f"{case.name} is not split: {te_layers.why_unsplit(self.layer)}")

    @property
    def gradients(self) -> list[Tensor]:
        """Return main_grad of the weight matrices, to which Transformer Engine itself adds."""
        return [parameter.main_grad for parameter in self.layer.parameters() if parameter.dim() > 1]

    def run(self, name: str) -> None:
        """Run one pass."""
        kind, number = name[:-1], name[-1]
        if kind == "F":
            self._forward(number)
        elif kind == "W":
            self.state.jobs.run(number)
        else:
            with self.state.jobs.collect(number) if kind == "B" else nullcontext():
                output = self._outputs.pop(number)
                generator = torch.Generator(DEVICE).manual_seed(10 + int(number))
                output.backward(_random(output.shape, generator))

    def _forward(self, number: str) -> None:
        generator = torch.Generator(DEVICE).manual_seed(int(number))
        layer_input = _random((self.case.tokens, self.case.hidden), generator).requires_grad_()
        grouped = hasattr(self.layer, "num_gemms")
        split_sizes = [[self.case.tokens // EXPERTS] * EXPERTS] if grouped else []
        with self.case.autocast():
            self._outputs[number] = self.layer(
                layer_input, *split_sizes, is_first_microbatch=number == "0"
            )


def _random(shape: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)


def sums_of_single_backwards(case: Case) -> list[Tensor]:
    """Run each backward of the order of slices on a main_grad of zeros, and add them up."""
    passes = Passes(case, adapted=False)
    sums = [torch.zeros_like(gradient) for gradient in passes.gradients]
    for name in WHOLE.split():
        for gradient in passes.gradients:
            gradient.zero_()
        passes.run(name)
        for total, gradient in zip(sums, passes.gradients, strict=True):
            total.add_(gradient)
    return sums


def after(case: Case, order: str, adapted: bool) -> list[Tensor]:
    """Return the gradients after passes in this order."""
    passes = Passes(case, adapted)
    for name in order.split():
        passes.run(name)
    return passes.gradients


def apart(gradients: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of an element, relative to the largest element."""
    pairs = zip(gradients, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@contextmanager
def keeping_rowwise() -> Iterator[None]:
    """Keep the row-wise data in the jobs meanwhile."""
    drop = te_layers._drop_rowwise
    te_layers._drop_rowwise = lambda value: None
    try:
        yield
    finally:
        te_layers._drop_rowwise = drop


def retained(case: Case) -> tuple[int, list[Tensor]]:
    """Return the bytes that a B leaves for its W, after a first microbatch, and the gradients."""
    passes = Passes(case, adapted=True)
    for name in ("F0", "BW0"):  # memory that is allocated once
        passes.run(name)
    gc.collect()  # garbage of earlier cases
    bytes_before = torch.cuda.memory_allocated()
    for name in ("F1", "B1"):
        passes.run(name)
    retained_bytes = torch.cuda.memory_allocated() - bytes_before
    passes.run("W1")
    return retained_bytes, passes.gradients


def check(case: Case, alone: list[Tensor]) -> tuple[list[str], bool]:
    """Return the row of a case, and whether all in it is as it should be."""
    expected = sums_of_single_backwards(case)
    worst = [apart(after(case, order, adapted=True), expected) for order in ORDERS]
    with keeping_rowwise():
        bytes_of_both, separate_gradients = retained(case)
    one, mine = retained(case)
    equal = all(map(torch.equal, mine, separate_gradients))
    fine = max(worst) < LIMIT and equal and one < bytes_of_both
    figures = [f"{error:.1e}" for error in (apart(alone, expected), *worst)]
    figures += [f"{num_bytes / 2**20:.1f}" for num_bytes in (bytes_of_both, one)]
    return [case.name, *figures, "equal" if equal else "DIFFER", "" if fine else "<-- WRONG"], fine


def main() -> None:
    """Print a row for each layer and recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096, help="Default: %(default)s")
    parser.add_argument("--tokens", type=int, default=4096, help="Default: %(default)s")
    options = parser.parse_args()
    import transformer_engine
    import transformer_engine.pytorch as te

    cases = [
        Case(f"{layer}, {recipe}", build, autocast, options.hidden, options.tokens)
        for layer, build in builders(te, options.hidden).items()
        for recipe, autocast in recipes(te).items()
    ]
    # First of all, since the adapter wraps the forward of TE's classes, for good.
    alone = [after(case, WHOLE, adapted=False) for case in cases]
    rows = [["layer, recipe", "TE alone", "slices", "split", "mixed", "retained, MiB"]]
    rows[0] += ["column-wise only", "gradients", ""]
    checked = [check(case, gradients) for case, gradients in zip(cases, alone, strict=True)]
    rows += [row for row, _ in checked]
    print(f"torch {torch.__version__}, Transformer Engine {transformer_engine.__version__},")
    print(f"{torch.cuda.get_device_name()}: {options.tokens} tokens, hidden {options.hidden}")
    print("Relative differences of main_grad; memory between B and W of one microbatch.")
    print(table(rows))
    sys.exit(not all(fine for _, fine in checked))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Capture the passes of a chunk in CUDA graphs, and check the assumptions of runs on a GPU.

    python benchmarks/check_graphs.py [--hidden 2048] [--layers 4]

The results of a replay are in memory that the allocator reports as memory of graphs. The next
replay overwrites them, and copies made before it are unchanged. The gradients equal those of the
same passes run one by one. Exits with 1 if one of these conditions is false.
"""

import argparse
import copy
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import megatron_vshape.mcore  # the allocator's settings, before CUDA starts  # noqa: F401
from megatron_vshape.runtime.graph_memory import GraphMemory

ROWS = 512


def passes(chunk: nn.Module, chunk_input: Tensor) -> tuple[Tensor, Tensor]:
    """Run F and B; return the output, and the gradient of the input as the chunk returns it.

    Weight gradients are accumulated in another buffer, as Megatron's hooks do: torch would use
    memory of the graph for a missing `.grad`, and the next replay would write to it.
    """
    gradients: list[Tensor] = []
    entry = chunk_input.detach().requires_grad_().view_as(chunk_input)
    entry.register_hook(gradients.append)
    output = chunk(entry)
    output.float().square().mean().backward()
    for parameter in chunk.parameters():
        parameter.main_grad = getattr(parameter, "main_grad", 0) + parameter.grad.float()
        parameter.grad = None
    return output.detach(), gradients[0]


def main() -> None:
    """Run the checks and print their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048, help="Default: %(default)s")
    parser.add_argument("--layers", type=int, default=4, help="Default: %(default)s")
    options = parser.parse_args()
    size, settings = options.hidden, {"device": "cuda", "dtype": torch.bfloat16}
    layers = [nn.Sequential(nn.Linear(size, size), nn.GELU()) for _ in range(options.layers)]
    eager = nn.Sequential(*layers).to(**settings)
    graphed, memory = copy.deepcopy(eager), GraphMemory()
    sample = torch.randn(ROWS, size, **settings, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(graphed, (sample,))
    memory.look()
    first, second = (torch.randn(ROWS, size, **settings) for _ in range(2))
    output, gradient = passes(graphed, first)
    _, expected = passes(eager, first)
    kept_gradient, then = memory.kept(gradient), gradient.clone()
    passes(graphed, second)
    passes(eager, second)
    torch.cuda.synchronize()
    pairs = zip(graphed.parameters(), eager.parameters(), strict=True)
    checks = {
        "an output lies in graphs' memory": memory.holds(output),
        "an input's gradient lies in graphs' memory": memory.holds(gradient),
        "what is allocated besides does not": not memory.holds(first),
        "the next replay overwrites it": not torch.equal(gradient, then),
        "what was kept is as it was": torch.equal(kept_gradient, then),
        "the gradient is that of the passes run one by one": torch.equal(kept_gradient, expected),
        "so are the weights' gradients": all(
            torch.equal(a.main_grad, b.main_grad) for a, b in pairs
        ),
    }
    for what, holds in checks.items():
        print(f"{'yes' if holds else 'NO '}  {what}")
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()

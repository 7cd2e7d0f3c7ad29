"""Layers with the parameters and the store of Transformer Engine's, which compute nothing.

`te_on_cpu` runs TE's own layers; these are for the rules of the adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SIZE, NUM_EXPERTS = 6, 3


class WeightGradStore:
    """TE's store, whose methods the adapter knows."""

    context = None

    def delay_wgrad_compute(self) -> bool:
        return False

    def put(self, tensor_list: list[Any], func: Any) -> None: ...

    def pop(self) -> None: ...


class TeLayer(nn.Module):
    """A layer with these parameters, of SIZE numbers in each dimension."""

    def __init__(self, weights: list[str], biases: list[str], **attributes: Any) -> None:
        super().__init__()
        self.wgrad_store: Any = WeightGradStore()
        self.use_bias, self.fuse_wgrad_accumulation = bool(biases), False
        self.parallel_mode, self.sequence_parallel, self.tp_size = None, False, 1
        for name in weights:
            self.register_parameter(name, nn.Parameter(torch.ones(SIZE, SIZE)))
        for name in biases:
            self.register_parameter(name, nn.Parameter(torch.ones(SIZE)))
        self.__dict__ |= attributes


class Linear(TeLayer):
    def __init__(self, bias: bool = False, **attributes: Any) -> None:
        names = {"weight_names": ["weight_0"], "bias_names": ["bias_0"]}
        super().__init__(["weight_0"], ["bias_0"] * bias, **names, **attributes)


class LayerNormMLP(TeLayer):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(["fc1_weight", "fc2_weight"], [], **attributes)


class GroupedLinear(TeLayer):
    def __init__(self, bias: bool = False, **attributes: Any) -> None:
        weights, biases = (
            [f"{kind}{number}" for number in range(NUM_EXPERTS)] for kind in ("weight", "bias")
        )
        super().__init__(weights, biases * bias, num_gemms=NUM_EXPERTS, **attributes)

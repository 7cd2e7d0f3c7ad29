"""A plugin of the farm: the Adam of Apex and Transformer Engine, in plain torch.

Megatron's distributed optimizer saves and loads the state of their Adam, which counts steps in the
parameter group, but not the state of torch's. Only the fused kernel is replaced, by torch code.
"""

from typing import Any

import torch
from megatron.core import optimizer as optimizers
from megatron.core.optimizer import distrib_optimizer
from te_on_cpu import multi_tensor_adam


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, as apex.optimizers.FusedAdam with adam_w_mode."""

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        **options: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Run one step."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            lists: list[list[torch.Tensor]] = [[], [], [], []]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for key in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(key, torch.zeros_like(parameter))
                moments = state["exp_avg"], state["exp_avg_sq"]
                for tensors, tensor in zip(
                    lists, (parameter.grad, parameter, *moments), strict=True
                ):
                    tensors.append(tensor)
            multi_tensor_adam(
                *(0, None, lists, group["lr"], *group["betas"], group["eps"], group["step"]),
                *(1, 1, group["weight_decay"]),
            )


def start(rank: int, argument: object) -> None:
    """Have Megatron find it where it looks for Apex's."""
    optimizers.Adam = distrib_optimizer.Adam = FusedAdam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True

"""What the passes of every stage cost: time and memory."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_vshape.core.passes import Kind, ScheduleError


@dataclass(frozen=True, slots=True)
class Costs:
    """Times and held memory of every stage, in model order.

    Times are in microseconds or any other unit used throughout, memory likewise in bytes or in
    chunks. A stage holds `held_after_forward_bytes` per microbatch from the start of F, then
    `held_after_backward_bytes` from the end of B, and nothing from the end of W on.
    """

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    weight_us: tuple[float, ...]
    send_us: float
    held_after_forward_bytes: tuple[float, ...]
    held_after_backward_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        self._check()

    @classmethod
    def uniform(
        cls,
        num_devices: int,
        num_stages: int,
        forward: float = 1.0,
        backward: float = 1.0,
        weight: float = 1.0,
        send: float = 0.0,
    ) -> "Costs":
        """Return equal costs, given for one of 2 * num_devices stages and scaled to `num_stages`.

        So every placement does the same work and holds memory in the same unit, the chunk: the
        activations of one microbatch in 1 / (2 * num_devices) of the model.
        """
        scale = 2 * num_devices / num_stages

        def alike(value: float) -> tuple[float, ...]:
            return (value * scale,) * num_stages

        return cls(alike(forward), alike(backward), alike(weight), send, alike(1.0), alike(1.0))

    @property
    def num_stages(self) -> int:
        """Return how many stages the costs are for."""
        return len(self.forward_us)

    def time_us(self, kind: Kind, stage: int) -> float:
        """Return how long a pass of `kind` takes on `stage`; BW takes B + W."""
        if kind is Kind.F:
            return self.forward_us[stage]
        if kind is Kind.B:
            return self.backward_us[stage]
        if kind is Kind.W:
            return self.weight_us[stage]
        return self.backward_us[stage] + self.weight_us[stage]

    def busy_us(self, placement: Sequence[int], num_devices: int, num_microbatches: int) -> float:
        """Return the work of the busiest device."""
        work = [0.0] * num_devices
        for stage, device in enumerate(placement):
            work[device] += self.time_us(Kind.F, stage) + self.time_us(Kind.BW, stage)
        return max(work) * num_microbatches

    def to_json(self) -> str:
        """Return the costs file's text."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Costs":
        """Return the costs that a costs file holds.

        Raises:
            ScheduleError: not JSON, a key is missing or unknown, or a value is not a cost.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScheduleError(f"the costs are not JSON: {error}") from None
        if not isinstance(data, dict) or set(data) != set(_FIELDS):
            found = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise ScheduleError(
                f"a costs file holds the keys {', '.join(_FIELDS)}; this one holds {found}"
            )
        for name in _FIELDS:
            values = [data[name]] if name == "send_us" else data[name]
            if not isinstance(values, list) or not all(_is_number(value) for value in values):
                raise ScheduleError(f"{name} in the costs must be numbers, not {data[name]!r:.80}")
        lists = {name: tuple(map(float, data[name])) for name in _FIELDS if name != "send_us"}
        return cls(send_us=float(data["send_us"]), **lists)

    @classmethod
    def load(cls, path: str | Path) -> "Costs":
        """Return the costs in the file at `path`; raises ScheduleError naming the file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ScheduleError(f"the costs file {path} cannot be read: {error}") from None
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from None

    def _check(self) -> None:
        for name in _FIELDS:
            if name == "send_us":
                continue
            values = getattr(self, name)
            if len(values) != len(self.forward_us) or not values:
                raise ScheduleError(
                    f"the costs have {len(values)} values of {name} and {len(self.forward_us)} of "
                    "forward_us; there must be one of each per stage"
                )
            least_excluded = name.endswith("_us")
            for stage, value in enumerate(values):
                if not math.isfinite(value) or value < 0 or (least_excluded and value == 0):
                    wanted = "a finite number above 0" if least_excluded else "finite and >= 0"
                    raise ScheduleError(f"{name} of stage {stage} is {value}; it must be {wanted}")
        if not math.isfinite(self.send_us) or self.send_us < 0:
            raise ScheduleError(f"send_us is {self.send_us}; it must be finite and >= 0")


_FIELDS = (
    "forward_us",
    "backward_us",
    "weight_us",
    "send_us",
    "held_after_forward_bytes",
    "held_after_backward_bytes",
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

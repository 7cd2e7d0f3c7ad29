"""Rates and errors that benchmarks/fit_rates.py fitted to published runs. Do not edit."""

from typing import NamedTuple


class Errors(NamedTuple):
    """Errors of predicted step times, of runs left out of the fit."""

    runs: int
    median_percent: float
    ninth_percent: float  # 90% of the runs are within
    worst_factor: float


class Pairs(NamedTuple):
    """Errors of the ratio of two configurations of a model on one system in one release."""

    pairs: int
    median_percent: float
    right_percent: float  # pairs whose order is predicted right


BY_GENERATION: dict[tuple[int, int], dict[str, float]] = {
    (9, 0): {
        "wide": 0.657,
        "eight": 0.565,
        "four": 0.5,
        "attention": 0.513,
        "attention_in_8_bits": 0.4,
        "memory": 0.525,
    },
    (10, 0): {
        "wide": 0.47,
        "eight": 0.525,
        "four": 0.528,
        "attention": 0.42,
        "attention_in_8_bits": 0.384,
        "memory": 0.458,
    },
    (10, 3): {
        "wide": 0.559,
        "eight": 0.679,
        "four": 0.443,
        "attention": 0.509,
        "attention_in_8_bits": 0.42,
        "memory": 0.48,
    },
}
"""By compute capability."""

SHARED: dict[str, float] = {
    "wire": 0.751,
    "dispatch": 0.535,
    "network": 0.875,
    "kernel_us": 2.14,
    "launch_us": 25.3,
    "module_us": 393.0,
    "exchange_us": 16.6,
    "shards_exposed": 1.0,
    "shards_left": 0.442,
    "experts_left": 0.303,
    "context_exposed": 0.5,
    "replicas_exposed": 0.563,
}
LEFT_OUT: dict[str, Errors] = {
    "65 to 256 GPUs": Errors(68, 5.7, 14.3, 1.4),
    "B200": Errors(15, 5.8, 18.3, 1.53),
    "B300": Errors(9, 4.9, 28.3, 1.4),
    "GB200": Errors(47, 6.2, 12.2, 1.48),
    "GB300": Errors(56, 4.4, 14.3, 1.31),
    "H100": Errors(20, 9.4, 19.0, 1.91),
    "H200": Errors(1, 1.1, 1.1, 1.01),
    "H800": Errors(4, 8.4, 15.2, 1.18),
    "all": Errors(152, 5.8, 15.4, 1.91),
    "dense": Errors(59, 3.4, 9.3, 1.31),
    "experts, between nodes": Errors(7, 9.8, 15.2, 1.15),
    "experts, within a node": Errors(86, 7.2, 19.0, 1.91),
    "more than 256 GPUs": Errors(16, 4.9, 12.2, 1.31),
    "no pipeline": Errors(48, 5.8, 15.7, 1.53),
    "up to 64 GPUs": Errors(68, 5.8, 18.3, 1.91),
    "with a pipeline": Errors(104, 5.7, 15.2, 1.91),
}
"""By case, and by system."""

PAIRS = Pairs(16, 4.4, 94)

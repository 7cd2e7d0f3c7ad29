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
        "eight": 0.563,
        "four": 0.5,
        "attention": 0.505,
        "attention_in_8_bits": 0.4,
        "memory": 0.526,
    },
    (10, 0): {
        "wide": 0.472,
        "eight": 0.525,
        "four": 0.532,
        "attention": 0.399,
        "attention_in_8_bits": 0.382,
        "memory": 0.456,
    },
    (10, 3): {
        "wide": 0.597,
        "eight": 0.678,
        "four": 0.432,
        "attention": 0.472,
        "attention_in_8_bits": 0.416,
        "memory": 0.472,
    },
}
"""By compute capability."""

SHARED: dict[str, float] = {
    "wire": 0.752,
    "dispatch": 0.424,
    "network": 0.873,
    "kernel_us": 2.16,
    "launch_us": 24.7,
    "module_us": 388.0,
    "exchange_us": 16.6,
    "shards_exposed": 1.0,
    "shards_left": 0.441,
    "experts_left": 0.317,
    "context_exposed": 0.5,
    "replicas_exposed": 0.57,
}
LEFT_OUT: dict[str, Errors] = {
    "65 to 256 GPUs": Errors(68, 5.7, 13.0, 1.39),
    "B200": Errors(15, 5.8, 19.4, 1.53),
    "B300": Errors(9, 6.0, 28.1, 1.39),
    "GB200": Errors(47, 6.2, 11.9, 1.48),
    "GB300": Errors(56, 5.3, 9.4, 1.31),
    "H100": Errors(20, 8.0, 20.0, 1.89),
    "H200": Errors(1, 1.4, 1.4, 1.01),
    "H800": Errors(4, 8.9, 15.9, 1.19),
    "all": Errors(152, 6.0, 15.9, 1.89),
    "dense": Errors(59, 3.4, 9.2, 1.31),
    "experts, between nodes": Errors(7, 7.4, 13.0, 1.13),
    "experts, within a node": Errors(86, 7.6, 20.0, 1.89),
    "more than 256 GPUs": Errors(16, 5.5, 11.9, 1.31),
    "no pipeline": Errors(48, 6.2, 15.2, 1.53),
    "up to 64 GPUs": Errors(68, 6.2, 19.4, 1.89),
    "with a pipeline": Errors(104, 5.8, 16.5, 1.89),
}
"""By case, and by system."""

PAIRS = Pairs(16, 5.5, 94)

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
        "wide": 0.675,
        "eight": 0.564,
        "four": 0.5,
        "attention": 0.522,
        "attention_in_8_bits": 0.4,
        "memory": 0.526,
    },
    (10, 0): {
        "wide": 0.475,
        "eight": 0.524,
        "four": 0.525,
        "attention": 0.418,
        "attention_in_8_bits": 0.388,
        "memory": 0.462,
    },
    (10, 3): {
        "wide": 0.596,
        "eight": 0.677,
        "four": 0.432,
        "attention": 0.492,
        "attention_in_8_bits": 0.425,
        "memory": 0.477,
    },
}
"""By compute capability."""

SHARED: dict[str, float] = {
    "wire": 0.747,
    "dispatch": 0.428,
    "network": 0.872,
    "kernel_us": 2.13,
    "launch_us": 24.8,
    "module_us": 382.0,
    "exchange_us": 16.8,
    "shards_exposed": 1.0,
    "shards_left": 0.445,
    "experts_left": 0.311,
    "context_exposed": 0.5,
    "replicas_exposed": 0.544,
}
LEFT_OUT: dict[str, Errors] = {
    "65 to 256 GPUs": Errors(68, 4.7, 11.5, 1.4),
    "B200": Errors(15, 5.1, 14.4, 1.43),
    "B300": Errors(9, 6.2, 28.8, 1.4),
    "GB200": Errors(47, 4.9, 10.4, 1.47),
    "GB300": Errors(56, 4.4, 8.9, 1.3),
    "H100": Errors(20, 6.5, 17.0, 1.91),
    "H200": Errors(1, 1.3, 1.3, 1.01),
    "H800": Errors(4, 8.8, 14.3, 1.17),
    "all": Errors(152, 5.1, 14.3, 1.91),
    "dense": Errors(59, 3.8, 9.1, 1.3),
    "experts, between nodes": Errors(7, 5.9, 9.8, 1.1),
    "experts, within a node": Errors(86, 5.6, 17.4, 1.91),
    "more than 256 GPUs": Errors(16, 5.4, 10.4, 1.29),
    "no pipeline": Errors(48, 5.4, 14.4, 1.47),
    "up to 64 GPUs": Errors(68, 5.6, 17.0, 1.91),
    "with a pipeline": Errors(104, 5.0, 14.3, 1.91),
}
"""By case, and by system."""

PAIRS = Pairs(16, 5.6, 94)

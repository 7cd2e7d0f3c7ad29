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
        "wide": 0.6,
        "eight": 0.632,
        "four": 0.5,
        "attention": 0.505,
        "attention_in_8_bits": 0.4,
        "memory": 0.522,
    },
    (10, 0): {
        "wide": 0.493,
        "eight": 0.555,
        "four": 0.471,
        "attention": 0.406,
        "attention_in_8_bits": 0.4,
        "memory": 0.481,
    },
    (10, 3): {
        "wide": 0.591,
        "eight": 0.676,
        "four": 0.443,
        "attention": 0.538,
        "attention_in_8_bits": 0.396,
        "memory": 0.463,
    },
}
"""By compute capability."""

SHARED: dict[str, float] = {
    "wire": 0.762,
    "dispatch": 0.426,
    "network": 0.86,
    "kernel_us": 2.11,
    "launch_us": 70.4,
    "launch_on_grace_us": 39.0,
    "exchange_us": 15.5,
    "pass_us": 16000.0,
    "shards_exposed": 0.924,
    "experts_left": 0.289,
    "context_exposed": 0.499,
    "replicas_exposed": 0.598,
}
RELEASES: dict[str, float] = {
    "25": 0.99,
    "26.02": 1.03,
    "26.06": 0.948,
    "26.08": 0.917,
}
"""Step time relative to NeMo 26.04, by release of the image."""

LEFT_OUT: dict[str, Errors] = {
    "B200": Errors(15, 11.3, 22.9, 1.72),
    "B300": Errors(9, 3.9, 20.6, 1.26),
    "GB200": Errors(43, 5.9, 19.7, 1.3),
    "GB300": Errors(51, 4.4, 12.4, 1.33),
    "H100": Errors(16, 11.3, 23.4, 1.24),
    "H200": Errors(1, 2.1, 2.1, 1.02),
    "H800": Errors(4, 6.6, 13.6, 1.16),
    "all": Errors(139, 6.0, 19.1, 1.72),
    "dense": Errors(56, 5.1, 11.6, 1.33),
    "experts, between nodes": Errors(5, 12.7, 18.3, 1.22),
    "experts, within a node": Errors(78, 7.7, 20.6, 1.72),
    "no pipeline": Errors(43, 5.9, 21.6, 1.72),
    "with a pipeline": Errors(96, 6.0, 15.8, 1.33),
}
"""By case, and by system."""

PAIRS = Pairs(11, 6.4, 91)

"""Everything the analytic predictor assumes, each with its source; nothing else is a constant.

A cluster file may replace any of them under `assumptions:`. None is computed from the paper's
grid-search table, but the table was known when they were chosen: docs/sweep.md says which were
added or changed after a comparison. A source marked "recalled" or "estimate" was not looked up.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

from megatron_vshape.sweep.files import Cluster, SweepError

ZERO_BUBBLE = "pass times measured in training by the Zero Bubble paper (arXiv 2401.10241)"
GEMM_GUIDE = "NVIDIA, Matrix Multiplication Background User's Guide"
NCCL = "nccl-tests on one node of eight A100, as printed in ml-engineering, network/README.md"
RECOMPUTATION = "Korthikanti et al., arXiv 2205.05198, section 4"


def _assume(value: float, source: str) -> float:
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The predictor's numbers; the unit is in the name, a fraction is of the data sheet's."""

    gemm_fraction: float = _assume(
        0.83,
        f"fitted to W of the {ZERO_BUBBLE} for 1.5B and 28.3B, with the two below; the largest "
        "rate of any single bf16 product on A100-SXM is 0.869 (ml-engineering)",
    )
    tile_rows: float = _assume(128, f"{GEMM_GUIDE}: tiles of 256 x 128 are the most efficient")
    tile_columns: float = _assume(128, f"{GEMM_GUIDE}: as above; two per processor at once")
    depth_half: float = _assume(
        64,
        f"form: {GEMM_GUIDE}, a product of inner size K loses a constant number of steps, "
        "K/(K+64); size: W runs at 252 TFLOP/s at 6144 tokens, 241 at 1024 (Zero Bubble)",
    )
    attention_fraction: float = _assume(
        0.62,
        "FlashAttention-2 (arXiv 2307.08691), A100, head size 128, causal, 16k; recalled from its "
        "figures 4-6",
    )
    attention_half_tokens: float = _assume(
        900, "recalled from the same figures: about half of that rate at sequences of 1k"
    )
    attention_backward: float = _assume(2.5, "FlashAttention-2: 5 products instead of 2")
    attention_dropout: float = _assume(
        1.2,
        "attention's time with dropout against without, where the model has any; measured are 1.0 "
        "to 1.15 (Dao-AILab/flash-attention #2439) and 1.2 to 1.4 (#2597): the weakest number here",
    )
    memory_fraction: float = _assume(
        0.85, "Calculon, systems/a100_80g.json: 0.75 of the memory's rate at 10 MB, 0.9 at 100 MB"
    )
    elementwise_fraction: float = _assume(
        0.6,
        f"fitted to F - W and B - W of the {ZERO_BUBBLE} for 1.5B and 28.3B: Megatron's kernels "
        "outside the products reach less than a stream does",
    )
    forward_bytes: float = _assume(
        54,
        "counted per layer, token and hidden unit, in Megatron's kernels outside the products: "
        "norms 8, dropout-add 14, GeLU 16, layouts of Q, K, V 16",
    )
    backward_bytes: float = _assume(
        76, "counted likewise: norms 20, residuals 6, dropout 10, GeLU 24, layouts 16"
    )
    unfused_score_bytes: float = _assume(
        13, "counted per score without flash attention, each way: products 4, softmax 4, dropout 5"
    )
    kernel_us: float = _assume(5, "estimate: launch, ramp and tail of a kernel")
    forward_kernels: float = _assume(20, "counted in Megatron's layer")
    backward_kernels: float = _assume(26, "counted likewise; W adds 4")
    collective_fraction: float = _assume(0.78, f"{NCCL}: 235 of 300 GB/s")
    collective_half_bytes: float = _assume(
        25e6, f"{NCCL}: half of that rate at 25 MB, from the rows of 8 to 134 MB"
    )
    collective_processors: float = _assume(
        0.15, "of the GPU, taken by NCCL while it hides behind products (Calculon, A100)"
    )
    context_hidden: float = _assume(
        1.0,
        "of attention's time, but for the round on a device's own keys and values, that those of "
        "the others travel behind: Megatron's ring (cp_comm_type p2p, in Transformer Engine) "
        "receives the next while it works on these; not measured",
    )
    network_fraction: float = _assume(0.9, "Calculon, systems/a100_80g.json, between nodes")
    message_us: float = _assume(30, "estimate: start of a send and its receive; Calculon has 20")
    pace: float = _assume(
        1.09,
        "a step against its simulated passes: what timers around passes do not see (waiting for "
        "the slowest GPU, refilling a drained queue, messages in line). Zero Bubble, 1.5B, 24 "
        "microbatches (their number recalled), samples/s of 1F1B, ZB-1p and ZB-2p against their "
        "own passes: 1.06, 1.08, 1.12",
    )
    parameter_state_bytes: float = _assume(
        12, "Adam: fp32 copy, momentum, variance; shared by the DP group (distributed optimizer)"
    )
    kept_after_forward: float = _assume(
        32, f"{RECOMPUTATION}: 34 bytes per token and hidden unit less the two dropout masks"
    )
    kept_after_backward: float = _assume(
        32, "7 inputs and 9 gradients of products, two bytes each: what W reads"
    )
    context_gib: float = _assume(
        2.0,
        "estimate: CUDA context 0.5, NCCL's buffers 1, cuBLAS workspaces 0.5; what it adds where "
        "all modules are loaded at the start (environment.py) is not measured",
    )
    fragmentation: float = _assume(
        0.02,
        "estimate: of activations, with expandable segments, which a schedule's ranks have unless "
        "their environment says otherwise (environment.py); more without",
    )
    receive_window: float = _assume(2, "receives posted ahead per stream; at most so on GPUs")

    def sources(self) -> Iterator[tuple[str, float, str]]:
        """Yield every assumption with its value and its source."""
        for each in fields(self):
            yield each.name, getattr(self, each.name), each.metadata["source"]


def assumptions_for(cluster: Cluster) -> Assumptions:
    """Return the assumptions with what the cluster file replaces.

    Raises:
        SweepError: the cluster file names an assumption that does not exist.
    """
    known = [each.name for each in fields(Assumptions)]
    for name in cluster.assumptions:
        if name not in known:
            raise SweepError(
                f"the cluster {cluster.name:.60}: there is no assumption {name!r:.60}; there are "
                + ", ".join(known)
            )
    return replace(Assumptions(), **cluster.assumptions)

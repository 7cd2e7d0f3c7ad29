#!/usr/bin/env python3
"""Check on one GPU that CUDA graphs of F, B and W give the gradients of the eager passes.

    python benchmarks/check_graph_weights.py [--output FILE.json] [--only PART ...]

Parts, each a process with its own time limit; if one fails, the others still run:

layers           Four Transformer Engine layers of a 70B model at TP 8, as rank 0 of 4 ranks runs
                 them under v-half: eagerly, by graphs that compute W in B, by graphs of F, B and
                 W, and by those without the copies that a late W needs, which must differ.
fp8-delayed      The same layers in FP8: graphs of F, B and W against graphs that compute W in B,
fp8-current      in the same pass order, so that scales are updated equally.
fp8-block
trainer-eager    Megatron's trainer, one rank of a job whose other ranks are not there: without
trainer-graphs   graphs, with --cuda-graph-impl transformer_engine and W in B, and with W apart.
trainer-split    Received tensors depend on pass and microbatch alone.

Sums of main_grad are compared bit by bit. Exits with 1 if a part fails or a comparison is wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

MIB = 2**20
LIMITS_S = {
    "layers": 130,
    "trainer-eager": 100,
    "trainer-graphs": 100,
    "trainer-split": 100,
    "fp8-delayed": 80,
    "fp8-current": 80,
    "fp8-block": 80,
}
TRAINER_STEPS = 4  # eager; eager and then captured; two that replay
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The layers of a rank."""

    hidden: int = 8192
    heads: int = 8
    groups: int = 1
    head_size: int = 128
    ffn: int = 3584
    tokens: int = 4096
    layers: int = 2  # a chunk
    ranks: int = 4
    microbatches: int = 8
    steps: int = 3
    device: str = "cuda"


# --- the layers, and their passes ---------------------------------------------------------------


def build_chunks(sizes: Sizes) -> list[list[Any]]:
    """Return the layers of the rank's two chunks, with main_grad as Megatron's DDP has it."""
    import torch
    import transformer_engine.pytorch as te
    from torch import nn

    common: dict[str, Any] = {
        "bias": False,
        "params_dtype": torch.bfloat16,
        "device": sizes.device,
        "fuse_wgrad_accumulation": True,
    }
    normed = common | {"normalization": "RMSNorm"}
    h, d = sizes.hidden, sizes.head_size

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = te.LayerNormLinear(h, (sizes.heads + 2 * sizes.groups) * d, **normed)
            self.attention = te.DotProductAttention(
                sizes.heads,
                d,
                num_gqa_groups=sizes.groups,
                attention_dropout=0.0,
                qkv_format="sbhd",
                attn_mask_type="causal",
            )
            self.proj = te.Linear(sizes.heads * d, h, **common)
            self.fc1 = te.LayerNormLinear(h, 2 * sizes.ffn, **normed)
            self.fc2 = te.Linear(sizes.ffn, h, **common)
            self.cuda_graphs: list[Any] = []

        def forward(self, x: Any) -> Any:
            parts = self.qkv(x).split([n * d for n in (sizes.heads, sizes.groups, sizes.groups)], 2)
            query, key, value = (part.unflatten(2, (-1, d)).contiguous() for part in parts)
            x = x + self.proj(self.attention(query, key, value))
            gate, up = self.fc1(x).chunk(2, -1)
            return x + self.fc2(nn.functional.silu(gate) * up)

    torch.manual_seed(1)
    return [[_with_main_grad(Layer()) for _ in range(sizes.layers)] for _ in range(2)]


def _with_main_grad(layer: Any) -> Any:
    """Add a returned gradient to main_grad at once and drop it, as Megatron's DDP does."""
    import torch
    from transformer_engine.pytorch.graph import is_graph_capturing

    def add(parameter: Any) -> None:
        if is_graph_capturing():
            return
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(add)
    return layer


class Rank:
    """Runs the passes of a rank."""

    def __init__(self, sizes: Sizes, context: Callable[[], AbstractContextManager[Any]]) -> None:
        from megatron_vshape.mcore.step_state import StepState

        self.sizes, self.context = sizes, context
        self.state = StepState(has_own_schedule=True)
        self.chunks = build_chunks(sizes)
        self.stores = {
            module: module.wgrad_store
            for layer in self.layers
            for module in layer.modules()
            if hasattr(module, "wgrad_store")
        }

    @property
    def layers(self) -> list[Any]:
        """Return the layers of all chunks."""
        return [layer for chunk in self.chunks for layer in chunk]

    def split(self, splits: bool) -> None:
        """Have the layers leave weight gradients to W, or not."""
        from megatron_vshape.mcore.split import te_layers

        for module, store in self.stores.items():
            module.wgrad_store = store
        if splits:
            te_layers.use_job_stores(self.state, self.layers)

    def steps(self, passes: Sequence[Any], replays: bool) -> list[Any]:
        """Run steps with different data; return their gradients."""
        import torch

        sums = []
        for step in range(self.sizes.steps):
            for layer in self.layers:
                for parameter in layer.parameters():
                    parameter.main_grad.zero_()
            inputs = self._step(passes, step, replays)
            torch.cuda.synchronize()
            sums.append(
                [parameter.main_grad.clone() for la in self.layers for parameter in la.parameters()]
            )
            sums[-1] += inputs
        return sums

    def _step(self, passes: Sequence[Any], step: int, replays: bool) -> list[Any]:
        import torch

        data = {
            (chunk, microbatch): [
                self._random(step, chunk, microbatch, tensor_index) for tensor_index in range(2)
            ]
            for _, chunk, microbatch in passes
        }
        inputs: dict[Any, Any] = {}
        outputs: dict[Any, Any] = {}
        gradients: dict[Any, Any] = {}
        torch.cuda.synchronize()
        for work in passes:
            key = work.chunk, work.microbatch
            if str(work.kind) == "F":
                inputs[key] = data[key][0].requires_grad_()
                outputs[key] = self._forward(*key, inputs[key], replays)
            elif str(work.kind) == "W":
                self.state.jobs.run(key)
            else:
                is_full = str(work.kind) == "BW"
                with nullcontext() if is_full else self.state.jobs.collect(key):
                    torch.autograd.backward(outputs.pop(key), data[key][1])
            if str(work.kind) in ("B", "BW"):  # memory of a graph
                gradients[key] = inputs.pop(key).grad.clone()
        return [gradients[key] for key in sorted(gradients)]

    def _forward(self, chunk: int, microbatch: int, x: Any, replays: bool) -> Any:
        with self.context():
            for layer in self.chunks[chunk]:
                x = layer.cuda_graphs[microbatch](x) if replays else layer(x)
        return x

    def _random(self, *seeds: int) -> Any:
        import torch

        number = 0
        for seed in seeds:
            number = 1009 * number + seed + 1
        size = (self.sizes.tokens, 1, self.sizes.hidden)
        generator = torch.Generator(self.sizes.device).manual_seed(number)
        values = torch.randn(size, generator=generator, device=self.sizes.device)
        return values.to(torch.bfloat16)

    def capture(
        self, passes: Sequence[Any], kind: type | None, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Capture as in training, with graphs of W by a `kind` of Capture or without."""
        import torch
        from megatron.core.transformer import cuda_graphs

        from megatron_vshape.mcore.split import graphs

        many = self.sizes.microbatches
        helper = SimpleNamespace(
            config=SimpleNamespace(gradient_accumulation_fusion=True),
            model=[SimpleNamespace(ddp_config=None)],
            flattened_callables=self.layers,
        )
        covered = {module for layer in self.layers for module in layer.modules()}
        capture = None if kind is None else kind(self.chunks, covered, passes, False)
        order = [(c + 1) * (1 if str(k) == "F" else -1) for k, c, _ in passes if str(k) != "W"]
        shape = self.sizes.tokens, 1, self.sizes.hidden
        samples = [
            (torch.ones(shape, dtype=torch.bfloat16, device=self.sizes.device).requires_grad_(),)
            for _ in range(many * len(self.layers))
        ]
        with graphs.capturing(helper, capture, self.state):
            graphs = cuda_graphs.make_graphed_callables(
                tuple(self.layers),
                samples,
                num_warmup_iters=2,
                allow_unused_input=True,
                _order=order,
                _num_layers_per_chunk=[len(chunk) for chunk in self.chunks],
                _reuse_graph_input_output_buffers=True,
                **options,
            )
            graphs = iter(graphs)
            for chunk in self.chunks:
                for layer in chunk:
                    layer.cuda_graphs = []
                for _ in range(many):
                    for layer in chunk:
                        layer.cuda_graphs.append(next(graphs))
        if capture is None:
            return {}
        return {
            "most_kept_mib": capture.peak_retained_bytes / MIB,
            "copies": capture.copies,
            "outside": capture.outside,
        }

    def release(self) -> None:
        """Drop the graphs."""
        import torch

        for layer in self.layers:
            for graph in layer.cuda_graphs:
                graph.reset()
            layer.cuda_graphs = []
        gc.collect()
        torch.cuda.empty_cache()


def _memory() -> dict[str, int]:
    import torch

    segments = torch.cuda.memory_snapshot()
    graph_pools = (
        segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)
    )
    return {
        "free": torch.cuda.mem_get_info()[0],
        "reserved": torch.cuda.memory_reserved(),
        "pool": sum(graph_pools),
    }


def _passes(sizes: Sizes, is_full: bool) -> list[Any]:
    """Return the passes of rank 0 under v-half."""
    from megatron_vshape.core.model.placement import stages_of
    from megatron_vshape.mcore.setup.plans import Planner
    from megatron_vshape.mcore.setup.run_config import ScheduleChoice
    from megatron_vshape.mcore.split.graphs import passes_of

    choice = ScheduleChoice(sizes.ranks, "v-half")
    if is_full:
        stages = frozenset(range(2 * sizes.ranks))
        choice = ScheduleChoice(sizes.ranks, "v-half", whole_stages=stages)
    program = Planner(choice).plan_step(sizes.microbatches).program
    return passes_of(program, 0, stages_of(choice.placement, sizes.ranks)[0])


def _wrong(sums: Sequence[Any], expected: Sequence[Any]) -> list[int]:
    """Return of every step how many of its tensors differ in any bit."""
    import torch

    return [
        sum(not torch.equal(a, b) for a, b in zip(mine, expected_sums, strict=True))
        for mine, expected_sums in zip(sums, expected, strict=True)
    ]


def _kinds() -> tuple[type, type]:
    """Return a Capture that records the errors of its check, and one that makes no copies."""
    from megatron_vshape.mcore.split.graphs import Capture
    from megatron_vshape.mcore.split.te_layers import StoreError

    class Noting(Capture):
        outside = ""

        def check(self, memory: Any) -> None:
            try:
                super().check(memory)
            except StoreError as error:
                self.outside = str(error)

    class Careless(Noting):
        def _own(self, value: Any) -> Any:
            return value

    return Noting, Careless


@contextmanager
def guarded(results: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Keep the figures that are made inside, and the traceback if that fails."""
    figures: dict[str, Any] = {}
    results[name] = figures
    try:
        yield figures
    except Exception:
        from transformer_engine.pytorch import graph

        figures["error"] = traceback.format_exc()
        graph.set_capture_end()  # a capture that failed does not


def check_layers(sizes: Sizes) -> dict[str, Any]:
    """Compare the passes of layers in bf16."""
    rank, results = Rank(sizes, nullcontext), {"sizes": asdict(sizes)}
    noting, careless = _kinds()
    split, full = _passes(sizes, is_full=False), _passes(sizes, is_full=True)
    expected: list[Any] = []
    with guarded(results, "eager") as figures:
        rank.split(True)
        expected = rank.steps(split, replays=False)
    for name, kind, passes in (
        ("graphs of F, B and W", noting, split),
        ("without copies", careless, split),
        ("graphs, W in B", None, full),
    ):
        with guarded(results, name) as figures:
            rank.split(kind is not None)
            figures |= rank.capture(passes, kind, {})
            sums = rank.steps(passes, replays=True)
            figures["wrong"] = _wrong(sums, expected)
            figures["of"] = len(expected[0])
            del sums
            rank.release()
    return results


def check_fp8(sizes: Sizes, name: str) -> dict[str, Any]:
    """Compare graphs of F, B and W with graphs that compute W in B, in FP8 and the same order."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    kinds = {
        "fp8-delayed": lambda: recipe.DelayedScaling(
            fp8_format=recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max"
        ),
        "fp8-current": lambda: recipe.Float8CurrentScaling(fp8_format=recipe.Format.HYBRID),
        "fp8-block": lambda: recipe.Float8BlockScaling(),
    }
    fp8_recipe = kinds[name]()
    context = getattr(te, "autocast", None)
    if context is None:
        entered = lambda: te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe)  # noqa: E731
    else:
        entered = lambda: context(enabled=True, recipe=fp8_recipe)  # noqa: E731
    results: dict[str, Any] = {"sizes": asdict(sizes)}
    noting, careless = _kinds()
    passes = _passes(sizes, is_full=False)
    full_backwards = [work for work in passes if str(work.kind) != "W"]
    expected: list[Any] = []
    options = {"fp8_enabled": True, "fp8_recipe": fp8_recipe, "fp8_weight_caching": False}
    for label, kind, ran in (
        ("graphs, W in B", None, full_backwards),
        ("graphs of F, B and W", noting, passes),
        ("without copies", careless, passes),
    ):
        rank = Rank(sizes, entered)  # whose scales are as at first
        with guarded(results, label) as figures:
            rank.split(kind is not None)
            figures |= rank.capture(ran, kind, options)
            sums = rank.steps(_as_whole(ran) if kind is None else ran, replays=True)
            if kind is None:
                expected = sums
            figures["wrong"] = _wrong(sums, expected)
            figures["of"] = len(expected[0])
            rank.release()
        del rank
        gc.collect()
    return results


def _as_whole(passes: Sequence[Any]) -> list[Any]:
    from megatron_vshape.core.model.kinds import Kind

    return [work._replace(kind=Kind.BW) if str(work.kind) == "B" else work for work in passes]


# --- Megatron's trainer -------------------------------------------------------------------------

TRAINER = (
    "--sequence-parallel --seq-length 4096 --max-position-embeddings 4096 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--group-query-attention --pipeline-model-parallel-size 4 --num-layers 16 --hidden-size 8192 "
    "--ffn-hidden-size 28672 --num-attention-heads 64 --num-query-groups 8 --vocab-size 128256 "
    "--tensor-model-parallel-size 8 --global-batch-size 8 --pipeline-schedule v-half --clip-grad 0"
)
TRAINER_WORLD = 32
TRAINER_FLAGS = {
    "trainer-eager": "",
    "trainer-graphs": f"{GRAPHS} --pipeline-split-graphs off",
    "trainer-split": GRAPHS,
}


def check_trainer(name: str) -> dict[str, Any]:
    """Train for some steps; return checksums of main_grad after each, times and memory."""
    from measure_ranks import COMMON, SCRIPT

    from megatron_vshape.rehearsal import measurement_worker
    from megatron_vshape.rehearsal.gpus import GPUS
    from megatron_vshape.rehearsal.rank_job import RankJob

    ranks: Any = measurement_worker
    ranks._receive = lambda *unused, **options: None  # filled by the stage, by its microbatch
    ranks.SMALL_STEPS = []

    class Summed(ranks.Watched):  # type: ignore[misc]
        def __init__(self, steps: int) -> None:
            super().__init__(steps)
            self.sums: list[list[int]] = []
            self.losses: list[Any] = []
            self.host: dict[str, list[float]] = defaultdict(list)
            self.memory: list[dict[str, int]] = []

        def setup(self, call: Any, *args: Any, **kwargs: Any) -> Any:
            setup_result = super().setup(call, *args, **kwargs)
            self.model = setup_result[0]
            return setup_result

        def train_step(self, call: Any, *args: Any, **kwargs: Any) -> Any:
            if len(self.step_s) < TRAINER_STEPS:
                self.host.clear()
            self.memory.append(_memory())
            step_result = super().train_step(call, *args, **kwargs)
            self.losses.append(str(step_result[0]))
            self.sums.append(
                [checksum(p.main_grad) for chunk in self.model for p in chunk.parameters()]
            )
            return step_result

        @contextmanager
        def watch(self, phase: Any) -> Iterator[None]:
            start = time.perf_counter()
            with super().watch(phase):
                yield
            self.host[f"{phase.kind}{phase.chunk}"].append(1e6 * (time.perf_counter() - start))

    watched = Summed(TRAINER_STEPS)
    ranks.import_all(watched)
    _fill_messages()
    common = COMMON.replace("--lr 1e-9 --min-lr 1e-9", "--lr 1e-4 --min-lr 1e-4")
    flags = f"{common} {TRAINER} {TRAINER_FLAGS[name]}".split()
    gpu = GPUS["h200"]  # ignored by measurements
    job = RankJob(str(SCRIPT), flags, gpu, TRAINER_WORLD, rank=0, has_schedule=True)
    report = ranks.run_rank(job, watched)
    for kind in report["kinds"]:
        kind["host_us"] = statistics.median(watched.host[f"{kind['kind']}{kind['chunk']}"])
    memory = [{name: size / MIB for name, size in sizes.items()} for sizes in watched.memory]
    return report | {"sums": watched.sums, "losses": watched.losses, "memory_mib": memory}


def checksum(tensor: Any) -> int:
    """Return a sum over the bits of a tensor, weighted by place."""
    import torch

    bits = tensor.detach().reshape(-1).view(torch.int32).to(torch.int64)
    places = torch.arange(len(bits), device=bits.device) % 65521 + 1
    return int((bits * places).sum().item())


def _fill_messages() -> None:
    """Make the input of a stage depend on its pass and microbatch alone."""
    import torch

    from megatron_vshape.core.model.kinds import PARTS, Kind
    from megatron_vshape.mcore.step.stage import MegatronStage

    def filled(seed: int, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(stage: Any, microbatch: int, *args: Any, **options: Any) -> Any:
            received = args[0] if args else None
            if isinstance(received, torch.Tensor) and received.is_floating_point():
                number = (seed * 64 + stage.stage) * 1024 + microbatch + 1
                generator = torch.Generator(received.device).manual_seed(number)
                received.detach().normal_(std=1e-2, generator=generator)
            return method(stage, microbatch, *args, **options)

        return run

    stage: Any = MegatronStage
    for seed, kind in enumerate((*PARTS, Kind.BW)):
        # A B and a full backward receive the same gradient.
        seed = 1 if str(kind) in ("B", "BW") else seed + 2
        setattr(stage, kind.method, filled(seed, getattr(stage, kind.method)))


# --- the parts ----------------------------------------------------------------------------------


def run_part(name: str) -> None:
    """Run a part and print its result as the last line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    start = time.perf_counter()
    try:
        if name in TRAINER_FLAGS:
            result = check_trainer(name)
        else:
            from megatron_vshape.environment import set_missing

            set_missing(os.environ, kernels=True, ordered=True)
            result = check_layers(Sizes()) if name == "layers" else check_fp8(Sizes(), name)
        result["seconds"] = time.perf_counter() - start
    except BaseException:
        result = {"error": traceback.format_exc()}
    print(json.dumps(result), file=out, flush=True)
    os._exit(0)  # some threads wait for other ranks


def run_parts(names: Sequence[str], output: Path) -> dict[str, Any]:
    """Run the parts one after the other; write and print their results."""
    results: dict[str, Any] = {}
    for name in names:
        command = [sys.executable, __file__, "--part", name]
        environment = os.environ | {"OMP_NUM_THREADS": "4"}
        log = output.with_suffix(f".{name}.log")
        with log.open("w") as errors:
            try:
                ran = subprocess.run(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=environment,
                    timeout=LIMITS_S[name],
                )
                lines = ran.stdout.strip().splitlines()
                results[name] = json.loads(lines[-1]) if lines else {"error": "no result"}
            except subprocess.TimeoutExpired:
                results[name] = {"error": f"not done in {LIMITS_S[name]} s"}
        text = log.read_text(errors="replace")
        results[name]["log"] = text[-3000:] if "error" in results[name] else ""
        results[name]["told"] = [line for line in text.splitlines() if "CUDA graphs of W" in line]
        output.write_text(json.dumps(results, indent=1))
        print("\n".join(lines_of(name, results[name])), flush=True)
    return results


def lines_of(name: str, part: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines on the results of a part."""
    yield f"## {name} ({part.get('seconds', math.nan):.0f} s)"
    if "error" in part:
        yield part["error"]
        yield part["log"]
        return
    yield from part["told"]
    if name.startswith("trainer"):
        memory = part["memory_mib"][-1]
        yield (
            f"steps {' '.join(f'{step_s:.3f}' for step_s in part['step_s'])} s, peak "
            f"{part['peak_bytes'] / MIB:.0f} MiB, reserved {part['reserved_bytes'] / MIB:.0f} MiB, "
            f"graphs' pool {memory['pool']:.0f} MiB; losses {part['losses']}"
        )
        yield "| pass | number | GPU ms | host us | adds MiB |\n|---|---|---|---|---|"
        for kind in part["kinds"]:
            yield (
                f"| {kind['kind']}{kind['chunk']} | {kind['number']} | {kind['ms']:.3f} | "
                f"{kind['host_us']:.0f} | {kind['adds_bytes'] / MIB:.0f} |"
            )
        return
    for label, figures in part.items():
        if not isinstance(figures, dict) or label == "sizes":
            continue
        yield f"**{label}**"
        if "error" in figures:
            yield figures["error"]
            continue
        yield json.dumps(figures)


def verdicts(results: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the required properties, and whether they are true."""
    layers = results.get("layers", {})
    if "layers" in results:
        result = layers.get("graphs of F, B and W", {})
        yield "layers: graphs of F, B and W make eager gradients", not any(result.get("wrong", [1]))
        careless = layers.get("without copies", {})
        yield "layers: without copies gradients differ", any(careless.get("wrong", []))
        yield "layers: captured W read graphs' memory alone", result.get("outside") == ""
    for name in (part for part in results if part.startswith("fp8")):
        result = results[name].get("graphs of F, B and W", {})
        yield f"{name}: W late and W in B make equal gradients", not any(result.get("wrong", [1]))
        yield f"{name}: captured W read graphs' memory alone", result.get("outside") == ""
    eager = results.get("trainer-eager", {}).get("sums")
    for name in ("trainer-graphs", "trainer-split"):
        if name in results:
            equal = eager is not None and results[name].get("sums") == eager
            yield f"{name}: main_grad of {TRAINER_STEPS} steps equals eager", equal


def main() -> int:
    """Run the parts, print their results, and return 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("graph_weights.json"))
    parser.add_argument("--only", nargs="+", choices=LIMITS_S, default=list(LIMITS_S))
    parser.add_argument("--part", choices=LIMITS_S, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        run_part(args.part)
        return 0
    results = run_parts([name for name in LIMITS_S if name in args.only], args.output)
    holds = [*verdicts(results)]
    for text, is_so in holds:
        print(f"{'yes' if is_so else 'NO '}  {text}")
    return int(not all(is_so for _, is_so in holds))


if __name__ == "__main__":
    raise SystemExit(main())

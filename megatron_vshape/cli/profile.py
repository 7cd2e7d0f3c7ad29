"""megatron-vshape profile: the costs of a model's stages, measured on one device or on ranks.

Started by torchrun, the ranks it is given measure what they can together: passes with the exchanges
of their tensor-parallel groups, and messages between neighbours. On one device both are
assumed, from the links' rates, and marked so.
"""

import argparse
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vshape.cli.files import Output, check_target, is_installed, write_all
from megatron_vshape.cli.help import MEMORY, MODEL, OUTPUT, REQUIRED, SCHEDULE, group
from megatron_vshape.cli.options import count, float_or_nan, time_of_0
from megatron_vshape.cli.what_fits import check_memory
from megatron_vshape.core.model.costs import Costs, Piece
from megatron_vshape.core.model.costs_file import ASSUMED, MEASURED
from megatron_vshape.core.model.kinds import (
    COPY_BACK,
    COPY_OUT,
    LOGITS,
    LOOKED_UP,
    LOSS,
    PARTS,
    RELEASE,
    VOCABULARY,
    Kind,
    ScheduleError,
)
from megatron_vshape.core.model.layers import (
    AUTO_SPLIT,
    Pieces,
    even_layers,
    even_with_ends,
    parse_layers,
)
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.planner.vocabulary import shared_pieces
from megatron_vshape.view.numbers import prices_told

if TYPE_CHECKING:
    from megatron_vshape.mcore.one_device import Model
    from megatron_vshape.sweep.files import ModelFile

NEEDED = {
    "torch": "megatron",
    "megatron.core": "megatron",
    "pydantic": "sweep",
    "yaml": "sweep",
}
"""Required modules, and the extra that installs each."""

OPTIONS_HERE = {
    "add --layer-split auto (to training: --pipeline-layer-split)": "give --layer-split",
    "--pipeline-layer-split": "--layer-split",
    "--num-layers": "--layers",
    "neither auto nor whole numbers": "not whole numbers",
}
"""Texts about the trainer's options in errors about layers, and their replacements here."""

MEASUREMENT = "Measurement"
MIB = 2.0**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = (
        "megatron-vshape profile --model FILE.yaml --devices D --seq-length S "
        "--output FILE.json [OPTIONS]"
    )
    model = group(parser, MODEL)
    model.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="FILE.yaml",
        help="Model file, as in configs/models" + REQUIRED,
    )
    model.add_argument(
        "--devices",
        type=count,
        required=True,
        metavar="D",
        help="Pipeline ranks, with two stages each" + REQUIRED,
    )
    model.add_argument(
        "--seq-length",
        type=count,
        required=True,
        metavar="S",
        help="Sequence length in tokens" + REQUIRED,
    )
    model.add_argument(
        "--microbatch-size",
        type=count,
        default=1,
        metavar="B",
        help="Sequences per microbatch (default: 1)",
    )
    model.add_argument(
        "--layers", type=count, metavar="N", help="Layers (default: those of the model file)"
    )
    model.add_argument(
        "--layer-split",
        metavar="N,N,...",
        help="Layers per stage (default: even; if only layers + 2 divide, one less in the first "
        "and last stage)",
    )
    _add_ranks(parser)
    _add_features(parser)
    _add_links(parser)
    measurement = group(parser, MEASUREMENT)
    measurement.add_argument(
        "--device", choices=("cuda", "cpu"), help="Device (default: cuda if there is a GPU)"
    )
    measurement.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="Data type (default: that of the model file on a GPU, float32 on a CPU)",
    )
    measurement.add_argument(
        "--transformer-engine",
        action="store_true",
        help="Use Transformer Engine's layers instead of Megatron's local layers",
    )
    measurement.add_argument(
        "--repeats",
        type=count,
        default=10,
        metavar="N",
        help="Timed microbatches per stage (default: 10)",
    )
    group(parser, OUTPUT).add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE.json",
        help="Costs file to write" + REQUIRED,
    )


def _add_features(parser: argparse.ArgumentParser) -> None:
    """Add options for features that a plan may use, or that the planned run has."""
    memory, schedule = group(parser, MEMORY), group(parser, SCHEDULE)
    memory.add_argument(
        "--offload",
        action="store_true",
        help="Measure copies of activations to host memory and back, for plan",
    )
    schedule.add_argument(
        "--slices",
        type=_several,
        nargs="+",
        metavar="K",
        help="Numbers of sequence slices to measure, for the fixed overhead per pass (host_us)",
    )
    schedule.add_argument(
        "--vocab-parallel",
        action="store_true",
        help="Measure stages with vocabulary parallelism: every rank has 1/D of embedding and "
        "output layer; the all-reduce is measured if there are ranks of several stages",
    )


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parallel = group(parser, "Parallelism")
    parallel.add_argument(
        "--tensor-parallel",
        type=count,
        default=1,
        metavar="T",
        help="TP size (default: 1). Collectives are measured under torchrun with T ranks, and P2P "
        "messages with 2T ranks; otherwise both are estimated",
    )
    parallel.add_argument(
        "--expert-parallel",
        type=count,
        default=1,
        metavar="E",
        help="EP size (default: 1); a stage has max(T, E) ranks",
    )
    parallel.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="Use sequence parallelism, as Megatron's flag; needs torchrun",
    )


def _add_links(parser: argparse.ArgumentParser) -> None:
    measurement = group(parser, MEASUREMENT)
    measurement.add_argument(
        "--send-us",
        type=time_of_0,
        metavar="US",
        help="Time of a P2P message in us (default: measured, or estimated from --link)",
    )
    measurement.add_argument(
        "--link",
        type=_link,
        default="45,30",
        metavar="GB/S,US",
        help="Bandwidth and latency between stages, if not measured (default: %(default)s, 90%% "
        "of 400 Gb/s)",
    )
    measurement.add_argument(
        "--exchange-link",
        type=_link,
        default="235,20",
        metavar="GB/S,US",
        help="Bandwidth and latency between the ranks of a stage, if not measured (default: "
        "%(default)s, NCCL within a node)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print a line per kind of stage, write the file, and return 0."""
    check_target("--output", options.output, (".json",))
    _check_installed(options.transformer_engine)
    from megatron_vshape.sweep.files import ModelFile, load

    sizes = load(options.model, ModelFile)
    num_layers = options.layers or sizes.layers
    layers = stage_layers(num_layers, options.devices, options.layer_split)
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = _model(options, sizes, device)
    model.alone()  # says what does not divide, before anything is made
    _check_slices(options)
    if device == "cpu":
        check_memory(model, layers, options.devices, partial(stage_layers, num_layers, split=None))
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as torchrun has it
    from megatron_vshape.mcore.on_ranks import check_ranks
    from megatron_vshape.mcore.one_device import prepare

    check_ranks(model)
    with _megatron_quiet():
        prepare(device)
        is_first = torch.distributed.get_rank() == 0
        if is_first:
            columns = "".join(f"{kind + ' ms':>10}" for kind in (*PARTS, Kind.BW))
            print(f"{'':26}{columns}{'MiB after F':>13}{'after B':>10}")
        try:
            costs = _measure_all(model, layers, options)
            costs = _with_ends_told(costs, model, sizes, options)
        except torch.OutOfMemoryError:
            raise ScheduleError(
                f"a stage of {max(layers)} layers does not fit on this device: use more --devices "
                "or --tensor-parallel, or a smaller microbatch"
            ) from None
    if is_first:
        write_all([Output("--output", options.output, partial(_write, costs))])
        if options.offload:
            print(_copies_told(costs))
        if options.vocab_parallel:
            _tell_written(costs)
        print(*prices_told(costs), sep="\n")
        print(f"{options.output}: {costs.num_stages} stages for --devices {options.devices}")
    return 0


def _with_ends_told(
    costs: Costs, model: "Model", sizes: "ModelFile", options: argparse.Namespace
) -> Costs:
    """Return the costs with layers of multi-token prediction, and a vocabulary shared, as is told.

    The former follow from what is measured of other layers and of the ends, and sums of parts that
    no rank here has from --link.
    """
    further, shares = sizes.mtp_layers, options.vocab_parallel
    if not (further or shares) or costs.layers is None:
        return costs
    from megatron_vshape.mcore.on_ranks import Link, with_shared_ends
    from megatron_vshape.sweep.subject import of_model_file

    pieces, devices = Pieces.of(costs, costs.layers), options.devices
    if shares:
        link = Link(*options.link)
        rows = model.vocabulary_size / (model.tensor_parallel * devices)
        tokens = options.seq_length * options.microbatch_size
        held = model.torch_dtype.itemsize * tokens * rows + model.message_bytes
        sum_us = link.message_us(model.message_bytes)
        pieces = shared_pieces(pieces, devices, sum_us, held * (1 + further), further)
    widths = of_model_file(sizes, model.device == "cpu", options.model).widths(options.seq_length)
    pieces = pieces.predicting(further, widths.merging_in_layers)
    made = pieces.costs(costs.layers)
    if further:
        told = f"{MEASURED}, and of {further} layers of multi-token prediction from that of others"
        made = made.with_source(told, *(f"{name}_us" for name in ("forward", "backward", "weight")))
    if shares:
        held_told = f"{ASSUMED}: probabilities and hidden states of 1/{devices} of the vocabulary"
        made = made.with_source(held_told, LOGITS.takes)
        sums = f"{ASSUMED}: {1 + further} x {model.message_bytes:,} bytes at {link}"
        made = made.with_source(sums, LOOKED_UP.time, LOSS.time)
        made = with_shared_ends(made, model, devices, 1 + further, options.repeats)
    return made


def _measure_all(model: "Model", layers: Sequence[int], options: argparse.Namespace) -> Costs:
    """Measure the costs of the stages, and the fixed overhead per pass if slices are given."""
    costs = _measure(model, layers, options)
    if options.slices is None:
        return costs
    from megatron_vshape.mcore.price_of_slices import with_price

    return with_price(costs, model, layers, options.slices, options.repeats, print)


def _check_slices(options: argparse.Namespace) -> None:
    for slices in options.slices or ():
        if options.seq_length % slices:
            raise ScheduleError(
                f"{options.seq_length} tokens cannot be cut in {slices} equal slices"
            )


def _measure(model: "Model", layers: Sequence[int], options: argparse.Namespace) -> Costs:
    """Return the costs, of which what these ranks cannot measure is assumed."""
    from megatron_vshape.mcore import on_ranks, one_device

    if on_ranks.num_ranks() > 1:
        costs = on_ranks.measure(model, layers, options.repeats, _tell)
    else:
        link = on_ranks.Link(*options.link)
        own = model.alone()
        found = one_device.profile_stages(own, layers, options.repeats, _tell)
        stages = [found[name] for name in one_device.names_of(layers)]
        host_us = on_ranks.host_us_of(own, options.repeats)
        costs = Costs.of(stages, link.message_us(model.message_bytes), layers, host_us)
        costs = costs.with_source(f"{ASSUMED}: {model.message_bytes:,} bytes at {link}", "send_us")
        costs = costs.with_source(f"{MEASURED} on one device")
        costs = on_ranks.assumed(costs, model, on_ranks.Link(*options.exchange_link))
    if options.offload:
        costs = on_ranks.with_copies(costs, model, layers, options.repeats)
    if options.send_us is None:
        return costs
    given = replace(costs, send_us=options.send_us)
    return given.with_source(f"{ASSUMED}: given as --send-us", "send_us")


def stage_layers(num_layers: int, devices: int, split: str | None) -> tuple[int, ...]:
    """Return the layers of the stages of a V over so many devices.

    Raises:
        ScheduleError: they do not divide, or the split is not one.
    """
    placement = v_shape(devices)
    stages = len(placement)
    if split == AUTO_SPLIT:
        raise ScheduleError(
            f"--layer-split {AUTO_SPLIT} balances by the costs that are measured here: give every "
            "stage's layers, as in 2,3,3,2, or leave it out, and balance the run by the costs file"
        )
    try:
        if split is not None:
            return parse_layers(split, num_layers, placement)
        short_ends = even_with_ends(num_layers, stages) if num_layers % stages else None
        return short_ends or even_layers(num_layers, placement)
    except ScheduleError as error:
        text = str(error)
        for theirs, ours in OPTIONS_HERE.items():
            text = text.replace(theirs, ours)
        raise ScheduleError(text) from None


@contextmanager
def _megatron_quiet() -> Iterator[None]:
    """Keep to itself what Megatron says of packages that a measurement does not need."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


def _model(options: argparse.Namespace, sizes: "ModelFile", device: str) -> "Model":
    from megatron_vshape.mcore.one_device import Experts, Model

    experts = sizes.experts
    if experts is None and options.expert_parallel > 1:
        raise ScheduleError(
            f"--expert-parallel {options.expert_parallel}: {options.model} has no experts; add "
            "experts: with count, per_token and ffn_hidden_size, or leave the option out"
        )
    if (options.vocab_parallel or sizes.mtp_layers) and options.offload:
        what = "--vocab-parallel" if options.vocab_parallel else f"mtp_layers in {options.model}"
        raise ScheduleError(f"{what} does not support --offload: measure one or the other")
    if options.sequence_parallel and options.tensor_parallel == 1:
        raise ScheduleError("--sequence-parallel needs --tensor-parallel of at least 2")
    own = "bfloat16" if sizes.parameter_bytes == 2 and device == "cuda" else "float32"
    return Model(
        layers=sizes.layers,
        hidden_size=sizes.hidden_size,
        attention_heads=sizes.attention_heads,
        vocabulary_size=sizes.vocabulary_size,
        sequence_length=options.seq_length,
        microbatch_size=options.microbatch_size,
        device=device,
        dtype=options.dtype or own,
        use_te=options.transformer_engine,
        ffn_hidden_size=sizes.ffn,
        query_groups=sizes.groups,
        gated=sizes.gated,
        dropout=0.1 if sizes.dropout else 0.0,
        flash_attention=sizes.flash_attention,
        experts=None if experts is None else Experts(**experts.model_dump()),
        tensor_parallel=options.tensor_parallel,
        expert_parallel=options.expert_parallel,
        sequence_parallel=options.sequence_parallel,
    )


def _check_installed(transformer_engine: bool) -> None:
    if transformer_engine and not is_installed("transformer_engine"):
        raise ScheduleError(
            "--transformer-engine: it is not installed; leave it out to measure Megatron's layers"
        )
    for name, extra in NEEDED.items():
        if not is_installed(name):
            raise ScheduleError(
                f"profile needs {name}, which is not installed: "
                f"pip install 'megatron-vshape[{extra}]'"
            )


def _several(text: str) -> int:
    value = count(text)
    if value == 1:
        raise argparse.ArgumentTypeError("1 slice is the whole: give 2 and more")
    return value


def _link(text: str) -> tuple[float, float]:
    rate, _, latency = text.partition(",")
    values = float_or_nan(rate), float_or_nan(latency)
    if not (0 < values[0] < float("inf") and 0 <= values[1] < float("inf")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a rate above 0 in GB/s and a time of at least 0 in us, as in 45,30"
        )
    return values


def _tell(what: str, costs: Piece) -> None:
    forward_us = costs.forward_us + costs.forward_exchange_us
    backward_us = costs.backward_us + costs.backward_exchange_us
    whole_us = backward_us + costs.weight_us - costs.saved_us - costs.hidden_exchange_us
    times = (forward_us, backward_us, costs.weight_us, whole_us)
    held = (costs.held_after_forward_bytes, costs.held_after_backward_bytes)
    row = "".join(f"{each / 1000:10.2f}" for each in times)
    print(f"{what:26}{row}{held[0] / MIB:13.2f}{held[1] / MIB:10.2f}", flush=True)


def _tell_written(costs: Costs) -> None:
    """Print the stages without the model's ends, as a file has them, and a device's part of these.

    Of stages that are alike one line.
    """
    print("as written, with the embedding and the output layer shared:")
    assert costs.layers is not None
    alike: dict[tuple[int, Piece], list[int]] = {}
    for stage, key in enumerate(zip(costs.layers, costs.stages(), strict=True)):
        alike.setdefault(key, []).append(stage)
    for (layers, piece), stages in alike.items():
        which = f"stage {', '.join(map(str, stages))}" if len(alike) > 1 else "every stage"
        _tell(f"{which}: {layers} layer{'s' if layers != 1 else ''}", piece)
    others = dict(costs.others)
    for kind in VOCABULARY:
        print(f"{kind.label + ', ms':40}{max(others[kind.time]) / 1000:10.3f}")


def _copies_told(costs: Costs) -> str:
    """Return what can wait in host memory, and at what rate it is copied."""
    copied = dict(costs.others)
    sizes = copied[RELEASE.frees]
    rates = [
        f"{max(size / us for size, us in zip(sizes, copied[kind.time], strict=True)) / 1e3:.1f}"
        for kind in (COPY_OUT, COPY_BACK)
    ]
    return (
        f"copies to host memory of up to {max(sizes) / MIB:.2f} MiB a microbatch and stage: "
        f"{rates[0]} GB/s out, {rates[1]} GB/s back, both ways at once"
    )


def _write(costs: Costs, path: Path) -> None:
    path.write_text(costs.to_json() + "\n", encoding="utf-8")

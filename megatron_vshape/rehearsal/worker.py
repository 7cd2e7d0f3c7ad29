"""A process that imports Megatron and Transformer Engine once, and forks for every rank.

    python -m megatron_vshape.rehearsal.worker '{"megatron": TREE, "te": DIRECTORY, "jobs": 2}'

It reads jobs from stdin, one JSON object per line, until an empty line. Then it runs
`one_rank.rehearse` for each job in a fork, and writes a result per line, in JSON: a `RankReport`, a
`CheckedRank` or a `FailedRank`; at the end an empty line. It ends at the end of stdin.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from megatron_vshape.rehearsal.rank_job import RankJob
from megatron_vshape.rehearsal.rank_report import ending
from megatron_vshape.rehearsal.sources import hide_old_megatron

_LOG_CHARACTERS = 6000
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""Read when torch is imported; no GPU is queried, and nothing is downloaded."""

AGAIN = "again"
"""Key of the reason for which a rank has to be traced again, with all microbatches."""

_IMPORTED_ONCE = (
    "megatron.training.training",
    "megatron_vshape.rehearsal.one_rank",
    "megatron_vshape.mcore.hooks.registry",
)


def prepare(megatron: str | None, te: str | None) -> None:
    """Import all modules with the replacements installed; once per process, before torch."""
    gc.disable()  # the imports create a million objects, hardly any of them garbage
    os.environ.update(ENVIRONMENT)
    hide_old_megatron()
    if megatron:
        sys.path.insert(0, megatron)
    from megatron_vshape.rehearsal import compiled_packages, device, exchanges
    from megatron_vshape.rehearsal.gpus import GPUS

    device.report_requested_gpu()
    device.Current.gpu = GPUS["h100"]  # for queries during imports
    exchanges.complete_at_once()
    compiled_packages.replace_packages()
    if te:
        from megatron_vshape.rehearsal import te_extension, te_kernels

        te_extension.load(Path(te), te_kernels.functions())
        te_kernels.fix_random_signs()
        quantized = importlib.import_module("transformer_engine.pytorch.quantized_tensor")
        device.report_gpu_device(quantized.QuantizedTensor)
        _choose_attention()
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)
    with contextlib.suppress(ModuleNotFoundError), _deferred_import("transformers"):
        importlib.import_module("megatron.core.tokenizers.text")  # not in every release
    parse_docstrings_once()
    gc.enable()
    gc.collect()
    gc.freeze()  # exclude all current objects from the collections of each rank


@contextlib.contextmanager
def _deferred_import(name: str) -> Iterator[None]:
    """Have modules that are imported in this context import `name` at the first use of its names.

    Megatron's tokenizers import transformers, which takes a fifth of the time of `prepare`, but a
    dry run has a tokenizer without files.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = _DeferredModule(name)
    try:
        yield
    finally:
        del sys.modules[name]


class _DeferredModule(ModuleType):
    def __getattr__(self, name: str) -> _DeferredName:
        if name.startswith("__"):  # read by imports
            raise AttributeError(name)
        return _DeferredName(self.__name__, name)


@dataclass(frozen=True, slots=True)
class _DeferredName:
    """A name of a module that is imported when an attribute of the name is read."""

    _module: str
    _name: str

    def __getattr__(self, attribute: str) -> Any:
        return getattr(getattr(importlib.import_module(self._module), self._name), attribute)


def parse_docstrings_once() -> None:
    """Cache the docstrings that Megatron's parser reads from the source of its configs.

    They are help texts, and reading them takes a fifth of the time of a small dry run.
    """
    try:
        factory: Any = importlib.import_module("megatron.training.argument_utils")
        read = factory.ArgumentGroupFactory._get_field_docstrings
    except (ModuleNotFoundError, AttributeError):  # not in every release
        return
    docstrings: dict[type, dict[str, str]] = {}

    def read_once(self: Any, config: type) -> dict[str, str]:
        if config not in docstrings:
            docstrings[config] = read(self, config)
        return docstrings[config]

    factory.ArgumentGroupFactory._get_field_docstrings = read_once
    arguments: Any = importlib.import_module("megatron.training.arguments")
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def _choose_attention() -> None:
    """Select a fused attention kernel without cuDNN and flash-attn, unless the flags forbid both.

    Megatron sets these two variables from --attention-backend. As in Transformer Engine, attention
    in fp32 has no fused kernel.
    """
    import torch
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    def choose(params: Any, *unused: Any, **options: Any) -> tuple[Any, ...]:
        import transformer_engine_torch as tex

        forbidden = [os.environ.get(f"NVTE_{name}_ATTN") for name in ("FLASH", "FUSED")]
        fused = forbidden != ["0", "0"] and params.qkv_dtype != torch.float32
        backend = tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen if fused else None
        return False, None, fused, backend, not fused, [False, fused, not fused]

    utils.get_attention_backend = choose


def serve(jobs: Iterable[str], out: TextIO, at_once: int) -> None:
    """Run jobs, `at_once` in parallel, and write results in order of completion."""
    running: dict[int, tuple[str, Any]] = {}
    for line in jobs:
        while len(running) >= at_once:
            _write_one_result(running, out)
        _start(line, running)
    while running:
        _write_one_result(running, out)


def _start(line: str, running: dict[int, tuple[str, Any]]) -> None:
    answer = tempfile.TemporaryFile("w+")  # noqa: SIM115
    process = os.fork()
    if process:
        running[process] = (line, answer)
        return
    status = 1
    try:
        status = _child(line, answer)
    finally:
        os._exit(status)


def _child(line: str, answer: TextIO) -> int:
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as folder:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        sys.stdout = sys.stderr = log
        sys.stdin = open(os.devnull)  # noqa: SIM115
        os.chdir(folder)  # files that the program writes are deleted with the folder
        try:
            from megatron_vshape.rehearsal.one_rank import rehearse
            from megatron_vshape.rehearsal.repeats import NotRepeatedError

            try:
                result = rehearse(RankJob.from_json(line)).to_json()
            except NotRepeatedError as error:
                result = {AGAIN: str(error)}
        except BaseException as error:
            result = {"error": _error_text(error, log), "log": _tail(log, traceback.format_exc())}
        json.dump(result, answer)
        answer.flush()
    return 0


_FIXES = {
    "cannot import name": ". The script needs another version of Megatron: pass its checkout with "
    "--megatron DIR",
    # Megatron requires Transformer Engine even with --transformer-impl local.
    "apply_rope_fusion is not available": " Or add --no-rope-fusion: without it, Megatron needs "
    "Transformer Engine for RoPE even with --transformer-impl local.",
    "persist_layer_norm not supported": ". Add --no-persist-layer-norm",
}
"""The fix for a message of Megatron that does not name a flag, by a part of the message."""


def _error_text(error: BaseException, log: TextIO) -> str:
    if isinstance(error, SystemExit):
        if why := getattr(error, "why", None):  # set on every rank, unlike the exit status
            return str(why)
        if isinstance(error.code, str):
            return error.code
        lines = [line.strip() for line in _tail(log, "").splitlines() if line.strip()]
        refused = [line for line in lines if "error:" in line]
        if refused:
            return refused[-1]
        end = f". The end of its output: {lines[-1]}" if lines else ""
        return f"the program ended by itself: {_raised_at(error)}{end}"
    text = (str(error).strip().splitlines() or [_raised_at(error)])[0]
    fix = next((fix for part, fix in _FIXES.items() if part in text), "")
    return f"{type(error).__name__}: {text}{fix}"


def _raised_at(error: BaseException) -> str:
    """Return the statement that raised an error without a text, such as an `assert` of Megatron."""
    every_frame = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every_frame if not frame.filename.startswith("<")]
    if not frames:
        return "no reason given"
    return f"{frames[-1].line} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def _tail(log: TextIO, trace: str) -> str:
    log.flush()
    log.seek(0)
    return log.read()[-_LOG_CHARACTERS:] + trace[:_LOG_CHARACTERS] + trace[-_LOG_CHARACTERS:]


def _write_one_result(running: dict[int, tuple[str, Any]], out: TextIO) -> None:
    process, status = os.wait()
    line, answer = running.pop(process)
    answer.seek(0)
    text = answer.read()
    job = RankJob.from_json(line)
    if text:
        result = json.loads(text)
        if AGAIN in result:
            answer.close()
            _start(replace(job, traces_all=True).to_json(), running)
            return
    else:
        how = ending(os.waitstatus_to_exitcode(status))
        result = {"error": f"the process of rank {job.rank} ended {how}", "log": ""}
    answer.close()
    print(json.dumps({"name": job.name, "rank": job.rank, **result}), file=out)
    out.flush()


def main() -> None:
    """Run the jobs on stdin, one set after another."""
    options = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep output during imports out of the results
    prepare(options.get("megatron"), options.get("te"))
    for line in sys.stdin:
        jobs = [line, *takewhile(str.strip, sys.stdin)] if line.strip() else []
        serve(jobs, out, options.get("jobs", 1))
        print(file=out, flush=True)


if __name__ == "__main__":
    main()

"""Run `advise` for published recipes, once per model and system; prints benchmarks/recipes.md.

    python benchmarks/replan_recipes.py [RECIPES.json --megatron CHECKOUT --te DIRECTORY]

RECIPES.json contains {"rows": [{"recipe", "options"}]}, of NVIDIA-NeMo/Megatron-Bridge. Without it
the page is printed from the answers in benchmarks/evidence/replanned.json.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

from published_runs import EVIDENCE, models

from megatron_vshape.rehearsal import accuracy
from megatron_vshape.rehearsal.command import flags_of as flag_words
from megatron_vshape.rehearsal.gpus import GPUS

OUT = EVIDENCE / "replanned.json"
MODELS = {
    "llama3_70b": "LLAMA3_70B",
    "llama31_405b": "LLAMA3.1_405B",
    "qwen3_30b_a3b": "Qwen3_30B_a3B",
    "qwen3_235b_a22b": "Qwen3_235B_a22B",
    "deepseek_v3": "DeepSeekV3",
    "kimi_k2": "Kimi_K2",
    "gpt_oss_120b": "GPT OSS 120B",
}
NAME = re.compile(r"_pretrain_(\d+)gpu_(h100|b200|b300|gb200|gb300)_(bf16|fp8cs|fp8mx|nvfp4)_")
PREFERRED = ("fp8mx", "fp8cs", "bf16")
FORMATS = {
    "bf16": "",
    "fp8cs": "--fp8-format hybrid --fp8-recipe tensorwise",
    "fp8mx": "--fp8-format e4m3 --fp8-recipe mxfp8",
}
FP8_PARAMETERS = {
    "bf16": "",
    "fp8cs": "--fp8-param-gather",
    "fp8mx": "--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag",
}
"""Weights in FP8, as `_perf_precision` of the recipes sets them."""
BF16_PARAMETERS = "kimi_k2"
"""Recipes that turn FP8 weights off."""
TAKEN = """
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size sequence_parallel global_batch_size
    micro_batch_size seq_length recompute_granularity recompute_method recompute_num_layers
    recompute_modules tp_comm_overlap moe_token_dispatcher_type moe_flex_dispatcher_backend
    mtp_num_layers
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
""".split()

WITHIN_PERCENT = 100 * accuracy.threshold(accuracy.WITHIN)
"""Gains below are within the error of most recipes, which have experts."""

SECONDS = "12"
"""Search seconds: twice the default of advise, to reduce the influence of other load."""

Row = dict[str, Any]


def main() -> None:
    """Run `advise` for every recipe without an answer, or print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", type=Path, nargs="?")
    parser.add_argument("--megatron", type=Path)
    parser.add_argument("--te", type=Path)
    options = parser.parse_args()
    if options.recipes is None:
        print(page(), end="")
        return
    answered = json.loads(OUT.read_text()) if OUT.is_file() else {}
    for name, row in chosen(json.loads(options.recipes.read_text())["rows"]).items():
        if "predicted" in answered.get(name, {}):
            continue
        answered[name] = {"recipe": row["recipe"], **ask(row, options.megatron, options.te)}
        print(name, answered[name].get("error", "answered"), flush=True)
        OUT.write_text(json.dumps(answered, indent=1) + "\n")


def chosen(rows: list[Row]) -> dict[str, Row]:
    """Return one recipe for each model and system: of the narrowest format, and most GPUs."""
    best_rows: dict[str, tuple[tuple[int, int], Row]] = {}
    for row in rows:
        match = NAME.search(row["recipe"] + "_")
        model = next((model for model in MODELS if row["recipe"].startswith(model + "_")), None)
        if match is None or model is None or match[3] not in PREFERRED:
            continue
        if "large_scale" in row["recipe"] or "dev" in row["recipe"]:
            continue
        rank = -PREFERRED.index(match[3]), int(match[1])
        name = f"{MODELS[model]} {match[2]}"
        if name not in best_rows or rank > best_rows[name][0]:
            best_rows[name] = rank, row
    return {name: row for name, (_, row) in sorted(best_rows.items())}


def flags_of(row: Row) -> tuple[str, list[str]]:
    """Return the GPUs and the flags of a recipe."""
    match = NAME.search(row["recipe"] + "_")
    model = next(model for model in MODELS if row["recipe"].startswith(model + "_"))
    if match is None:
        raise ValueError(f"{row['recipe']} does not name its GPUs")
    model_flags = models()
    text = f"{model_flags['every']} {model_flags['models'][MODELS[model]]} {FORMATS[match[3]]}"
    if model != BF16_PARAMETERS:
        text += f" {FP8_PARAMETERS[match[3]]}"
    words = [*shlex.split(text), "--cross-entropy-fusion-impl", "native", "--grad-reduce-in-bf16"]
    options = {"seq_length": 4096} | row["options"]
    if options.get("recompute_granularity") == "selective" and not options.get("recompute_modules"):
        del options["recompute_granularity"]
    options["moe_flex_dispatcher_backend"] = (
        "hybridep" if options.get("moe_token_dispatcher_type") == "flex" else None
    )
    chunks = options.get("virtual_pipeline_model_parallel_size") or 1
    flags = {
        name: options.get(name) or None
        for name in TAKEN
        if "num-experts" in text or not name.startswith("moe_")
    }
    flags["max_position_embeddings"] = options["seq_length"]
    layout = options.get("pipeline_model_parallel_layout") or ""
    if layout[:1] == "E":  # not the result of a function of the recipe
        flags["pipeline_model_parallel_layout"], chunks = layout, 1
    flags["num_virtual_stages_per_pipeline_rank"] = chunks if chunks > 1 else None
    return f"{match[1]}x{match[2]}", [*words, *flag_words(flags)]


def ask(row: Row, megatron: Path, te: Path) -> Row:
    """Return the answer's lines with the recipe's parallelism and with any, or an error.

    `check` of each is the result of the start-up checks for the command of the best line.
    """
    gpus, words = flags_of(row)
    answers: Row = {"gpus": gpus, "predicted": date.today().isoformat()}
    sources = ["--megatron", str(megatron)] * (megatron is not None) + ["--te", str(te)]
    for name, keep_options in (("lines", ["--keep", "tp,pp,cp,ep,microbatch"]), ("anywhere", [])):
        with tempfile.TemporaryDirectory() as folder:
            file, script = Path(folder) / "advice.json", Path(folder) / "run.sh"
            options = ["--gpus", gpus, *keep_options, "--seconds", SECONDS, *sources]
            options += ["--json", str(file), "--write", str(script)]
            advised = _run("advise", *options, "--", "pretrain_gpt.py", *words)
            if advised.returncode:
                return {"error": _last_line(advised.stderr)}
            answer = json.loads(file.read_text())
            if script.is_file():  # not if the command itself is the best
                checked = _run("rehearse", "--gpus", gpus, "--check", *sources, script)
                check = _last_line(checked.stderr) if checked.returncode else "starts"
                answers[f"{name}_check"] = check
        answers[name] = {what: _short(line) for what, line in answer.items()}
    return answers


def _run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_vshape", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


def _short(line: Row) -> Row:
    peak, step = max(line["peak_bytes"]) / 2**30, float(f"{line['step_s']:.4g}")
    fields = {name: field for name, field in line.items() if name not in ("peak_bytes", "layers")}
    return {**fields, "step_s": step, "peak_gib": round(peak, 1)}


HEAD = """\
# Published recipes: best stock schedule and best schedule of this package

Recipes of NVIDIA-NeMo/Megatron-Bridge (067f987d) with a pipeline, one for each model and system.
`megatron-vshape advise` predicts the schedule of the recipe, the best stock Megatron schedule, and
the best schedule with this package: first with the recipe's TP, PP, CP, EP and microbatch size,
then with one or two of them halved or doubled. Recomputation is that of the recipe, or none. All
values are predicted, not measured; a difference of less than {within:g}% is a tie. Full-iteration
CUDA graphs and the overlap of expert communication, which some recipes use, are not included, and
DeepEP is counted as HybridEP. Stock schedules can have a pipeline layout with uneven layers, as
some recipes do; a layout that is returned by a function of the recipe is assumed to be balanced.
{checks}

`python benchmarks/replan_recipes.py RECIPES.json --megatron DIR --te DIR` predicts them; without
arguments, it prints this page.
"""
DOUBTFUL = """\
Left out of these counts and without a gain below: {names}. By the estimate, the published recipe
does not fit its own GPU (180 of 179 GiB). No run of it is published: its sizes are those of GB200,
which has 6 GiB more, and whose published runs have twice the data-parallel ranks.
"""
BY_HAND = """\
Gains of more than {within:g}% over stock, with one or two sizes halved or doubled:

* Kimi K2 on B200 and B300, 9% and 8%: against stock with the same EP 8, in one node. No run with
  these sizes is published.
* DeepSeek V3 on GB200 and GB300, 11% and 17%, and Kimi K2 on GB200, 16%, with two sequences per
  microbatch: not confirmed.

The other gains over today need no package: stock Megatron reaches them with two sequences per
microbatch (GPT OSS, Qwen3 235B), another EP, no recomputation or more chunks per rank.
"""
WHERE = {
    "lines": "the sizes of the recipe",
    "anywhere": "one or two sizes halved or doubled",
}
NO_RECOMPUTE = "no recomputation"
SIZES = {
    "tensor": "TP",
    "pipeline": "PP",
    "context": "CP",
    "experts": "EP",
    "microbatch": "microbatches of",
}


def page() -> str:
    """Return benchmarks/recipes.md."""
    answered = json.loads(OUT.read_text())
    there = {name: answer for name, answer in answered.items() if "best" in answer.get("lines", {})}
    lines = [HEAD.format(within=WITHIN_PERCENT, checks=_checks(there.values()))]
    fitting = [answer for answer in there.values() if fits_today(answer)]
    for where, words in WHERE.items():
        lines += [
            _counts([answer[where] for answer in fitting], words, WITHIN_PERCENT / 100),
            "",
        ]
    doubtful = [name for name, answer in there.items() if not fits_today(answer)]
    lines += [DOUBTFUL.format(names=", ".join(doubtful)), ""]
    for where, words in WHERE.items():
        lines += [f"With {words}:", ""]
        lines.append("| model, GPUs | today | stock | with this package | gain over stock |")
        lines.append("|---|---|---|---|---:|")
        for name, answer in there.items():
            lines.append(_line(name.rsplit(" ", 1)[0], answer, answer[where]))
        lines.append("")
    lines.append(BY_HAND.format(within=WITHIN_PERCENT))
    failures = [
        f"* {name}: {answer.get('error', 'no configuration fits with the headroom')}"
        for name, answer in answered.items()
        if name not in there
    ]
    if failures:
        lines += ["Without an answer:", "", *failures, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _checks(answers: Iterable[Row]) -> str:
    """Return the sentence on the start-up checks of recommended commands."""
    results = [
        answer[f"{where}_check"]
        for answer in answers
        for where in WHERE
        if f"{where}_check" in answer
    ]
    rejected = sorted({result for result in results if result != "starts"})
    if not results:
        return "No recommendation was checked by `rehearse --check`."
    text = f"`rehearse --check` accepts {results.count('starts')} of {len(results)} recommendations"
    return f"{text}: {'; '.join(rejected)}" if rejected else f"{text}."


def _counts(there: list[Row], words: str, within: float) -> str:
    """Return the sentences on the number of gains, and their causes."""
    gain_texts = []
    for past, name in (("today", "today's schedule"), ("stock", "the best stock schedule")):
        gains = [
            1 - answer["best"]["step_s"] / answer[past]["step_s"]
            for answer in there
            if past in answer
        ]
        gains_text = ", ".join(
            f"{sum(gain > threshold for gain in gains)} gain more than {100 * threshold:g}%"
            for threshold in (0.05, within, 0.1)
        )
        gain_texts.append(f"over {name}, {gains_text}")
    gained = [
        answer
        for answer in there
        if answer["best"]["step_s"] < answer["today"]["step_s"] * (1 - within)
    ]
    by = Counter(what for answer in gained for what in changed(answer["today"], answer["best"]))
    what = ", ".join(f"{name} {times}" for name, times in by.most_common())
    return (
        f"With {words}, {len(there)} recipes: {'; '.join(gain_texts)}. "
        f"Changes of the recipes that gain more than {100 * within:g}% over today: "
        f"{what or 'none'}."
    )


def changed(today: Row, best: Row) -> Iterator[str]:
    """Yield the differences of a line from today's run."""
    old, new = today["shape"], best["shape"]
    if old["recompute"] != new["recompute"]:
        yield f"{new['recompute']} recomputation" if new["recompute"] != "none" else NO_RECOMPUTE
    for name, words in SIZES.items():
        if new[name] != old[name]:
            yield f"{words.split()[0]} {'lowered' if new[name] < old[name] else 'raised'}"
    if best["schedule"] != today["schedule"]:
        yield "a plan" if best["schedule"].startswith("planned") else "a published schedule"
    if "copies" in best["schedule"]:
        yield "offloading"
    if best.get("shares_vocabulary"):
        yield "vocabulary parallelism"


def _schedule(name: str) -> str:
    """Return the name of a schedule as the page shows it."""
    return name.replace("planned order", "plan").replace("with copies", "with offloading")


def fits_today(answer: Row) -> bool:
    """Return whether the recipe itself is estimated to fit its GPU."""
    gpu = GPUS[answer["gpus"].partition("x")[2]]
    peak_bytes = answer["lines"]["today"]["peak_gib"] * 2**30
    return bool(peak_bytes <= gpu.allocatable_bytes(communicators=0, headroom_bytes=0.0))


def _line(model: str, answer: Row, lines: Row) -> str:
    def line_text(line: Row | None) -> str:
        if line is None:
            return "nothing fits"
        new, old = line["shape"], lines["today"]["shape"]
        parts = [_schedule(line["schedule"])]
        parts += ["vocabulary parallelism"] if line.get("shares_vocabulary") else []
        parts += [f"{new['recompute']} recomputation"] if new["recompute"] != "none" else []
        parts += [f"{label} {new[name]}" for name, label in SIZES.items() if new[name] != old[name]]
        return f"{line['step_s']:.3g} s, {line['peak_gib']:.0f} GiB: {', '.join(parts)}"

    today, stock, best = (lines.get(what) for what in ("today", "stock", "best"))
    is_gain = stock is not None and fits_today(answer)
    gain = f"{100 * (1 - best['step_s'] / stock['step_s']):.0f}%" if is_gain else ""
    return (
        f"| {model}, {answer['gpus']} | {line_text(today)} | {line_text(stock)} | "
        f"{line_text(best)} | {gain} |"
    )


if __name__ == "__main__":
    main()

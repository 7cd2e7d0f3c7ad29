"""Text and JSON of a comparison of `advise`, and the commands of its rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vshape.rehearsal import accuracy
from megatron_vshape.rehearsal.command import Command, flag_changes
from megatron_vshape.rehearsal.megatron_layers import flags_text
from megatron_vshape.rehearsal.report import gib, wrap_text
from megatron_vshape.tuning import fsdp
from megatron_vshape.tuning.advice import Advice
from megatron_vshape.tuning.comparison import (
    Comparison,
    ComparisonRow,
    describe,
    recompute_of,
    schedule_name,
)
from megatron_vshape.tuning.configurations import KEEP, Subject
from megatron_vshape.tuning.further_options import find_fitting_options
from megatron_vshape.tuning.predictor import Prediction, Verdict, step_seconds
from megatron_vshape.tuning.row_command import needs_file, row_command, script_of


def format_rejection(today: Prediction, command: Command) -> list[str]:
    """Format why Megatron does not start the command, and the flags of the row today."""
    if _starts(today):
        return []
    ranks = today.configuration.pipeline_parallel
    return [
        f"Megatron does not start this command: {today.reason}. The row today is for the layers "
        f"{flags_text(today.layers, ranks, command)}."
    ]


def format_full_step(comparison: Comparison, share: float) -> list[str]:
    """Format the gain of a step of which training is only a share, as with rollouts."""
    today, best = comparison.today, comparison.best
    if share == 1 or best is None or not _starts(today):
        return []
    gains = [
        f"{100 * share * (1 - step_seconds(row.prediction) / step_seconds(today)):.1f}% "
        f"({row.title})"
        for row in comparison.rows
        if row.key == "stock" or (row.key == "best" and not row.prediction.is_stock)
    ]
    return [
        f"Full step, of which training takes {100 * share:g}% today: {', '.join(gains)} faster, "
        "and the rest unchanged."
    ]


def _starts(prediction: Prediction) -> bool:
    return prediction.verdict is not Verdict.REJECTED


@dataclass(frozen=True, slots=True)
class AdviceReport:
    """The comparison of a command with other configurations, for a user."""

    advice: Advice
    comparison: Comparison
    file: str  # of the schedule, in the flags of a row
    is_file_written: bool
    training_share: float  # of a full step, below 1 with rollouts

    @property
    def subject(self) -> Subject:
        """The model with today's command."""
        return self.advice.predictor.subject

    @property
    def recommended(self) -> Prediction | None:
        """Today's, best stock or best prediction of all (`Comparison.recommended`).

        A change must gain more than the error. None if nothing fits.
        """
        return self.comparison.recommended(accuracy.threshold(self.advice.case))

    def command(self, prediction: Prediction) -> Command:
        """Return the whole command of a prediction; a plan is read from the schedule file."""
        post_validation = self.advice.predictor.post_validation
        return row_command(prediction, self.subject, self.file, post_validation)

    def changes(self, prediction: Prediction) -> list[str]:
        """Return the changes of today's command for a prediction."""
        return flag_changes(self.subject.command, self.command(prediction))

    def script(self) -> str | None:
        """Return a script that starts the recommended command; None if nothing fits."""
        recommended, machine = self.recommended, self.advice.predictor.machine
        if recommended is None:
            return None
        is_today = recommended is self.comparison.today
        command = self.subject.command if is_today else self.command(recommended)
        return script_of(command, machine.num_devices, machine.gpu.node)

    def to_json(self) -> dict[str, Any]:
        """Return the predictions by the key of their row as plain values."""
        return {
            row.key: self._plain(row.prediction)
            | {"flags": [] if row.key == "today" else self.changes(row.prediction)}
            for row in self.comparison.rows
        }

    def _plain(self, prediction: Prediction) -> dict[str, Any]:
        config = prediction.configuration
        return {
            "schedule": schedule_name(prediction),
            "shape": {
                "tensor": config.tensor_parallel,
                "pipeline": config.pipeline_parallel,
                "recompute": recompute_of(config, self.subject),
                "context": config.context_parallel,
                "experts": config.expert_parallel,
                "microbatch": config.microbatch_size,
            },
            **config.features_in_json,
            "step_s": prediction.step_s,
            "mfu": prediction.mfu,
            "peak_bytes": [rank.allocated for rank in prediction.ranks],
            "layers": list(prediction.layers),
            "is_stock": prediction.is_stock,
            "starts": _starts(prediction),
        }

    def lines(self) -> list[str]:
        """Return the lines of the report: recommendation, table, flags of the rows, errors."""
        advice, comparison, today = self.advice, self.comparison, self.comparison.today
        command, machine = self.subject.command, advice.predictor.machine
        today_sentence = format_rejection(today, command)
        if _starts(today) and not today.fits:
            today_sentence.append(f"Today: {today.fit}.")
        today_sentence += self._verdict()
        today_sentence += format_full_step(comparison, self.training_share)
        baseline = comparison.best or today
        today_sentence.append(fsdp.format_comparison(comparison.fsdp, baseline, advice.case))
        rows = comparison.distinct_rows(self.subject)
        row_sentences = [self._flags_sentence(row) for row in rows if row.key != "today"]
        row_sentences += [
            self._largest_rank(),
            *accuracy.sentences(advice.case, machine.gpu, machine.num_devices),
            *accuracy.upper_bound(advice.case, command.has("--overlap-moe-expert-parallel-comm")),
            "The cost of splitting the backward is not in these errors; measure it with "
            "megatron-vshape rehearse --measure on one GPU.",
            "rehearse runs all layers, advise one layer per stage: peaks and step times differ by "
            "less than 1%, peaks of virtual stages by up to 2% because Megatron keeps messages of "
            "each.",
            *(["Not evaluated: " + "; ".join(advice.left_out)] if advice.left_out else []),
        ]
        sizes = (
            f"\n{advice.layers} layers, {command.value('--seq-length') or '?'} tokens, batch "
            f"{command.value('--global-batch-size') or '?'}, {machine.num_devices} "
            f"{machine.gpu.name.upper()}. Estimated, not measured."
        )
        return [
            *map(wrap_text, filter(None, today_sentence)),
            sizes,
            *self._table(rows),
            *map(wrap_text, row_sentences),
        ]

    def _table(self, rows: Sequence[ComparisonRow]) -> list[str]:
        name = self.advice.command_name
        titles = [name if row.key == "today" else row.title for row in rows]
        descriptions = [describe(row.prediction, self.subject) for row in rows]
        wide, wider = (max(map(len, texts)) for texts in (titles, descriptions))
        lines = [f"{'':{wide}}  {'':{wider}}  {'step':>8}  {'MFU':>6}  GiB by pipeline rank"]
        for row, title, description in zip(rows, titles, descriptions, strict=True):
            prediction = row.prediction
            peaks = " ".join(gib(rank.allocated) for rank in prediction.ranks)
            over = ""
            if not prediction.fits:
                over = f"  {prediction.fit if _starts(prediction) else prediction.verdict}"
            figures = f"{step_seconds(prediction):6.2f} s  {100 * (prediction.mfu or 0):5.1f}%"
            lines.append(f"{title:{wide}}  {description:{wider}}  {figures}  {peaks}{over}")
        return lines

    def _verdict(self) -> list[str]:
        """Return the recommendation, and the comparison with the best of this package."""
        within, name = accuracy.threshold(self.advice.case), self.advice.command_name
        today, stock, best = self.comparison.today, self.comparison.stock, self.comparison.best
        recommended = self.recommended
        if best is None or recommended is None:
            return self._nothing_fits()
        if recommended is today:
            gain = 1 - step_seconds(best) / step_seconds(today)
            return [
                f"Recommendation: keep the flags of {name}. The best configuration is "
                f"{100 * gain:.1f}% faster, within the error of the estimate ({100 * within:.1f}%)."
            ]
        faster = 100 * (1 - step_seconds(recommended) / step_seconds(today))
        how = f"{faster:.0f}% faster than {name}" if today.fits and faster > 0 else "it fits"
        how = how if _starts(today) else "it starts"
        text = f"{', '.join(self.changes(recommended))}: {how}"
        gain = 0.0 if stock is None else 100 * (1 - step_seconds(best) / step_seconds(stock))
        if recommended is best and not (best.is_stock and recommended is stock):
            beyond = f", {gain:.0f}% faster than the best stock" if stock is not None else ""
            return [f"Recommendation: {text}{beyond}."]
        texts = [f"Recommendation (no package needed): {text}."]
        if best.is_stock:
            return [*texts, "No schedule of this package is faster."]
        return [
            *texts,
            f"This package: another {gain:.0f}% faster than the best stock "
            f"({schedule_name(best)}), within the error of the estimate ({100 * within:.1f}%).",
        ]

    def _nothing_fits(self) -> list[str]:
        predictor = self.advice.predictor
        limit_bytes = predictor.allocatable_bytes(self.advice.command_config)
        headroom = gib(predictor.headroom_bytes)
        memory_bytes = predictor.machine.gpu.memory_bytes
        outside = gib(memory_bytes - predictor.headroom_bytes - limit_bytes)
        return [
            f"Recommendation: none. No evaluated configuration fits {gib(limit_bytes)} GiB "
            f"of a GPU: {headroom} GiB are kept free, and CUDA and NCCL need about {outside} GiB.",
            *self._further_options(),
        ]

    def _further_options(self) -> Iterator[str]:
        """Format the options with which the command fits; they are estimated now."""
        advice, ranks = self.advice, self.comparison.today.ranks
        largest = max(range(len(ranks)), key=lambda rank: ranks[rank].allocated)
        texts = find_fitting_options(
            self.subject,
            advice.command_config,
            largest,
            advice.make_dry_run_config(),
            advice.predictor.headroom_bytes,
        )
        for text in texts:
            yield f"It fits with {text}."
        if not texts:
            yield (
                "Neither full recomputation with bf16 optimizer states, with an optimizer on the "
                "CPU, with LoRA adapters, nor with 8 times as many GPUs is enough."
            )

    def _flags_sentence(self, row: ComparisonRow) -> str:
        """Format the changes of today's command for a row, and how to write its schedule file."""
        words = self.changes(row.prediction) or ["the flags of today"]
        text = f"Flags, {row.title}: {', '.join(words)}."
        is_best = row.prediction is self.comparison.best
        if not needs_file(row.prediction) or (is_best and self.is_file_written):
            return text
        sizes = "" if is_best else f"--keep {','.join(KEEP)} with these sizes and "
        return f"{text} advise {sizes}--export {self.file} writes the schedule."

    def _largest_rank(self) -> str:
        """Format the memory of the command's largest rank by component."""
        ranks = self.comparison.today.ranks
        largest = max(ranks, key=lambda rank: rank.allocated)
        return (
            f"Largest rank of {self.advice.command_name}: {ranks.index(largest)}, "
            f"{gib(largest.states)} GiB of weights, gradients and optimizer, "
            f"{gib(largest.buffers)} GiB of workspaces and P2P buffers, "
            f"{gib(largest.activations)} GiB of activations."
        )

"""The passes of a vocabulary that all pipeline ranks share, during one step.

F of the first stage finds the embeddings of its tokens there, and F of the last ends where logits
would begin. The microbatch's tokens are known when they are looked up: the trainer's function,
which reads them and calls the model, is called then, and its call of the model is kept for F.

The loss is made by the trainer's own function, of true losses, once the sums are there: before
whatever needs its gradient first, which is the next S, with which the gradient goes to all ranks.
Only that of a step's last microbatch goes by itself, and the loss rank waits for the sums within
that S; it never does within others. The trainer's function may communicate, so it runs where
passes run, in their order, and not beside them.

A trainer that calls the model without labels makes its loss of logits in S, on every rank of that
rank's rows (`loss_of_logits`).

Each layer of multi-token prediction has tokens and logits of its own for every token. They are
further sequences of the same microbatch in all these passes (`further_losses`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import roll_tensor
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_vshape.core.model.kinds import (
    HEAD_WEIGHT,
    LOGITS,
    LOOKED_UP,
    LOOKUP,
    LOOKUP_WEIGHT,
    LOSS,
    Kind,
)
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore.refusals import UnsupportedError, check_vocabulary, refusing
from megatron_vshape.mcore.replaced import Replaced
from megatron_vshape.mcore.step.further_losses import FurtherLosses
from megatron_vshape.mcore.step.late_checks import LateFaults, unlike
from megatron_vshape.mcore.step.loss_of_logits import LossOfLogits, called_up_to_logits
from megatron_vshape.mcore.step.microbatches import Reader
from megatron_vshape.mcore.step.parts import Beginning, Capability, ForwardStep, Part, counted
from megatron_vshape.mcore.step.stage import loss_maker
from megatron_vshape.mcore.step_state import unwrapped
from megatron_vshape.runtime.stage import Handler
from megatron_vshape.runtime.together import Pending, Together
from megatron_vshape.runtime.vocabulary import Logits, Rows, Statistics, add_rows, look_up
from megatron_vshape.runtime.weight_jobs import (
    WeightGradKernel,
    accumulate_weight_grad,
    fused_kernel,
)

FIELDS = len(Statistics._fields)

_OTHER_TOKENS = (
    "--pipeline-vocab-parallel does not support a model that looks up other tokens in its word "
    "embedding than the input_ids it is called with: all ranks look up input_ids before the "
    "forward pass. Remove --pipeline-vocab-parallel"
)
_OTHER_LOGITS = (
    "--pipeline-vocab-parallel does not support a model that changes the logits of its output "
    "layer: every rank computes its rows of them outside of the model, and that change would be "
    "dropped. Remove --pipeline-vocab-parallel"
)


@dataclass(eq=False)
class SharedVocabulary(Part):
    """This rank's part in one step."""

    beginning: Beginning
    together: Together
    running: int = -1  # the microbatch whose F runs
    _calls: dict[int, tuple[tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=dict)
    _tokens: dict[int, Tensor] = field(default_factory=dict)
    _lookups: dict[int, Pending[tuple[Tensor, ...]]] = field(default_factory=dict)
    _found: dict[int, list[Tensor]] = field(default_factory=dict)  # of them, what F has yet to take
    _embedded: dict[int, list[Tensor]] = field(default_factory=dict)  # and what it has
    _embedded_gradients: dict[int, list[Tensor]] = field(default_factory=dict)
    _read: dict[int, Tensor] = field(default_factory=dict)  # what this rank reads in a meeting
    _last_hidden: dict[int, Tensor] = field(default_factory=dict)  # of the F that runs
    _labels: dict[int, Tensor] = field(default_factory=dict)
    _loss_functions: dict[int, Any] = field(default_factory=dict)
    _logits: dict[int, Logits] = field(default_factory=dict)
    _sums: dict[int, Pending[tuple[Tensor, ...]]] = field(default_factory=dict)
    _whole: dict[int, Statistics] = field(default_factory=dict)
    _parts: dict[int, Tensor] = field(default_factory=dict)  # dX / g, on the loss rank
    _gradients: dict[int, Tensor] = field(default_factory=dict)  # g, [heads x b, s]
    _last_gradient: Pending[Tensor] | None = None
    _shapes: dict[int, tuple[int, int]] = field(default_factory=dict)  # [b, s] of microbatches
    _wants_logits: bool | None = None  # whether the trainer makes its loss of them: in the first S
    _of_logits: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # gradient, hidden
    _faults: LateFaults = field(default_factory=LateFaults)
    makes_loss = True

    def __post_init__(self) -> None:
        """Find this rank's rows, and tell what reduces gradients when theirs are complete."""
        begun, step = self.beginning, self.beginning.step
        self.state, self.config = begun.state, step.config
        self.stage_map, self.iterator = begun.pipeline.stage_map, begun.iterators[0]
        self.first, self.last = begun.chunks[0], begun.chunks[-1]  # as the trainer has them
        self.forward_step_func, self.num_microbatches = (
            step.forward_step_func,
            step.num_microbatches,
        )
        self.learns, self.gradient_sync = not step.forward_only, step.gradient_sync
        self.tensor_group, self.context_group = begun.groups.tp, begun.groups.cp
        self.again = begun.again
        # [b, s] of a microbatch on this rank; None where they have unlike ones, as the first tells.
        self.tokens_shape: tuple[int, int] | None = None
        if not self.config.variable_seq_lengths:
            length, batch, _ = begun.shape
            whole = begun.groups.tp.size() if self.config.sequence_parallel else 1
            self.tokens_shape = batch, length * whole
        # Makes the loss of a microbatch by its losses, [b, s], and the function that F returned.
        reports = begun.groups.pp.rank() == self.stage_map.loss_rank
        self.lose = loss_maker(self.state, step, self.last, self.stage_map.num_chunks, reports)
        self._rows = unwrapped(self.first).embedding.word_embeddings
        head = unwrapped(self.last).output_layer
        self._table = self._rows.weight
        self._head = self._table if head.weight is None else head.weight
        self._modules = self._rows, head
        self._first_row = self._rows.vocab_start_index
        self._first_device, self._loss_device = self.stage_map.end_ranks
        self._device = self.together.device
        self._tensor_ranks = self.tensor_group.size()
        self._scatters = self.config.sequence_parallel and self._tensor_ranks > 1
        # Who looks up the tokens, and then those of each layer of multi-token prediction.
        predicting = self.stage_map.predicting
        self._readers = self._first_device, *(self._loss_device,) * predicting
        self._further = FurtherLosses(predicting, self._shapes)
        for _ in range(self.num_microbatches if self.learns else 0):
            self.gradient_sync.deferred([self._table])
            self.gradient_sync.deferred([self._head])

    def handlers(self) -> Mapping[Kind, Handler]:
        """Return what runs I, E, S, C, T and J; E and C beside the passes."""

        def of(method: Callable[[int], None], *join: Callable[[Pass], None]) -> Handler:
            return Handler(lambda work: method(work.microbatch), *join)

        return {
            LOOKUP: of(self.look_up, self.join),
            LOOKED_UP: of(self.wait_for_embeddings),
            LOGITS: counted(self.state, of(self.own_logits, self.join)),
            LOSS: of(self.wait_for_sums),
            HEAD_WEIGHT: counted(self.state, of(self.own_head_weights)),
            LOOKUP_WEIGHT: counted(self.state, of(self.own_embedding_weights, self.join)),
        }

    @contextmanager
    def session(self) -> Iterator[None]:
        """Have layers find this inside; who waits for a collective is told if a pass fails."""
        self.state.shared_vocabulary = self
        try:
            yield
            self.together.drain()
            self._faults.check()
        except BaseException:
            self.together.close()
            raise
        finally:
            self.state.shared_vocabulary = None

    def join(self, work: Pass) -> None:
        """Come to I, S or J and return once what it reads is there."""
        joins = {
            LOOKUP: self._read_tokens,
            LOGITS: self._read_hidden,
            LOOKUP_WEIGHT: self._read_embedding_gradient,
        }
        if work.kind is not LOOKUP_WEIGHT:
            self._gather_parameters()
        joins[work.kind](work.microbatch)

    def look_up(self, microbatch: int) -> None:
        """Run I."""
        tokens = self._tokens[microbatch]
        table, each = self._table.detach(), tokens.split(self._shapes[microbatch][0])
        parts = [look_up(table, own, self._first_row) for own in each]

        def add_up() -> tuple[Tensor, ...]:
            made = []
            for device, part in zip(self._readers, parts, strict=True):
                summed = self.together.sum_to(device, part, "the embeddings' sum")
                made += [summed] * (device == self._device)
            return tuple(made)

        pending = self.together.begin(add_up, parts)
        if self._device in self._readers:
            self._lookups[microbatch] = pending

    def wait_for_embeddings(self, microbatch: int) -> None:
        """Run E, beside the passes."""
        self._lookups[microbatch].wait()

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the embeddings for the F that runs: [b, s, h], or a sequence's part [s/t, b, h].

        The sum over tensor-parallel ranks is made here, as Megatron's embedding makes it. Tokens
        of multi-token prediction, which calls for them layer by layer, follow those of the model.
        `tokens`, [b, s], must be those that were looked up before F.
        """
        if self.running in self._lookups:
            self._found[self.running] = list(self._lookups.pop(self.running).result())
        left = self._found[self.running]
        own = [at for at, device in enumerate(self._readers) if device == self._device]
        known = self._tokens[self.running].split(self._shapes[self.running][0])[own[-len(left)]]
        self._faults.add(unlike(tokens, known), _OTHER_TOKENS)
        part = left.pop(0)
        if self._rows.reduce_scatter_embeddings and self._tensor_ranks > 1:
            part = self._reduce_scattered(part.transpose(0, 1))
        elif self._tensor_ranks > 1:
            dist.all_reduce(part, group=self.tensor_group)
        if self.learns:
            self._embedded.setdefault(self.running, []).append(part.requires_grad_())
        return part

    def forward(self, stage: int, is_last: bool, number: int, step: ForwardStep) -> ForwardStep:
        """Return what stands for the trainer's function in F of the first and the last stage."""
        self.running = number
        if stage == 0:
            args, options, loss_function = self._calls.pop(number)
            return lambda iterator, model: (model(*args, **options), loss_function)
        return self._last_forward(number) if is_last else step

    def _last_forward(self, microbatch: int) -> ForwardStep:
        """Return what calls the last stage, which makes no loss yet."""

        def forward(iterator: Any, model: Any) -> Any:
            with self._further.forward(microbatch):
                made, logits = called_up_to_logits(
                    self.forward_step_func, iterator, model, self._labels
                )
            hidden = self._last_hidden.pop(microbatch)
            if logits is not None:
                self._faults.add(unlike(logits, hidden.transpose(0, 1)), _OTHER_LOGITS)
            if made is not None:
                output, self._loss_functions[microbatch] = made
                return output, None
            if self.stage_map.predicting:
                raise UnsupportedError(
                    "multi-token prediction learns from labels, and the model was called without: "
                    "pass labels, or remove --pipeline-vocab-parallel"
                )
            return hidden, None

        return forward

    def before_logits(self, hidden: Tensor) -> Tensor:
        """Return what stands for the logits of a hidden state of the F that runs."""
        further = self._further.begin(self.running, hidden)
        if further is not None:
            return further
        whole: Tensor = make_viewless_tensor(hidden, hidden.requires_grad, keep_graph=True)
        self._last_hidden[self.running] = whole
        return whole

    def keep_labels(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Take the labels, [b, s], of what stands for logits; return what does for their losses."""
        further = self._further.keep_labels(self.running, labels, logits)
        if further is not None:
            return further
        if logits is not self._last_hidden[self.running]:
            raise UnsupportedError(_OTHER_LOGITS)
        self._labels[self.running] = labels
        return logits

    def output(self, is_last: bool, number: int, output: Tensor) -> Tensor:
        """Take the last stage's, [s, b, h] or a part of the sequence, with its graph."""
        if is_last and self.learns and number in self._labels:
            made = self._further.end(number, output, self._labels[number])
            self._read[number], self._labels[number] = made
        elif is_last:
            self._read[number] = output.detach()
            self._further.forget(number)
        return output

    def own_logits(self, microbatch: int) -> None:
        """Run S, and begin the sums."""
        hidden = self._read.pop(microbatch)
        if self._scatters:
            hidden = self._gathered(hidden)
        tokens = self._tokens[microbatch] if self.learns else self._tokens.pop(microbatch)
        if self._wants_logits:
            self._lose_of_logits(microbatch, hidden, tokens)
            return
        if isinstance(self.again, Reader):
            self.again.pass_over()
        labels = self._labels.pop(microbatch)
        flat, weight = labels.t().flatten(), self._head.detach()
        asks_best = len(labels) > self._shapes[microbatch][0]
        made = Logits.of(weight, hidden.flatten(0, 1), flat, self._first_row, asks_best)
        product = made.softmax @ weight if self.learns else None
        part = torch.stack(made.statistics)
        parts = self._of_tensor_ranks(part)
        vocabulary = weight.shape[0] * self._modules[0].tp_group.size()
        device = self._device

        def add_up() -> tuple[Tensor, ...]:
            everyones = self.together.gather(parts, f"the maxima and sums of S.{microbatch}")
            whole = Statistics.whole(everyones.flatten(0, 1), flat, vocabulary)
            if product is None:
                return whole
            own = made.input_gradient(weight, product, whole)
            self.together.sum_to(self._loss_device, own, f"the gradients of S.{microbatch}")
            return (*whole, own) if device == self._loss_device else whole

        inputs = [flat, *made.statistics, parts, *([] if product is None else [product])]
        self._sums[microbatch] = self.together.begin(add_up, inputs)
        if self.learns:
            self._logits[microbatch] = made
            self._count(made.softmax, made.hidden)
        if microbatch == self.num_microbatches - 1 or not self.learns:
            self._tell_last_gradient(microbatch)

    def _lose_of_logits(self, microbatch: int, hidden: Tensor, tokens: Tensor) -> None:
        weight = self._head.detach()
        makes = LossOfLogits(
            self.state,
            self.last,
            self.again,
            self.forward_step_func,
            self._modules[0].tp_group,
            self.lose,
            self._faults,
        )
        gradient = makes.of(hidden, weight, tokens)
        if not self.learns:
            return
        if gradient is None:  # the loss does not depend on the logits
            gradient = hidden.new_zeros((*hidden.shape[:2], len(weight)))
        flat = gradient.flatten(0, 1)
        product, device = flat @ weight, self._loss_device

        def add_up() -> tuple[Tensor, ...]:
            self.together.sum_to(device, product, f"the gradients of S.{microbatch}")
            return (product,)

        self._sums[microbatch] = self.together.begin(add_up, [product])
        self._of_logits[microbatch] = flat, hidden.flatten(0, 1)
        self._count(*self._of_logits[microbatch])

    def wait_for_sums(self, microbatch: int) -> None:
        """Run C, beside the passes."""
        pending = self._sums.get(microbatch)
        if pending is not None:  # else a pass has taken it
            pending.wait()

    def gradient(self, is_last: bool, number: int, received: Tensor | None) -> Tensor | None:
        """Return the gradient of the last stage's output, for its B."""
        if not is_last:
            return received
        batch = self._shapes[number][0]
        if self._wants_logits:
            (part,) = self._sums.pop(number).result()
            return self._over_tensor_ranks(part.view(-1, batch, part.shape[-1]))
        gradient = self._gradient(number).t()
        part = self._over_tensor_ranks(self._parts.pop(number).view(*gradient.shape, -1))
        if self._scatters:
            gradient = gradient.chunk(self._tensor_ranks)[self.tensor_group.rank()]
        whole = (gradient.unsqueeze(-1) * part).to(part.dtype)
        parts: list[Tensor] = [each.contiguous() for each in whole.split(batch, dim=1)]
        self._further.keep_gradients(number, parts[1:])
        return parts[0]

    def own_head_weights(self, microbatch: int) -> None:
        """Run T."""
        if self._wants_logits:
            gradient, hidden = self._of_logits.pop(microbatch)
            accumulate_weight_grad(self._head, gradient, hidden, self._kernel())
            self.gradient_sync.added([self._head])
            return
        whole, gradient = self._sum(microbatch), self._gradient(microbatch)
        made = self._logits.pop(microbatch)
        made.add_weight_gradient(self._head, whole, gradient.t().flatten(), self._kernel())
        self.gradient_sync.added([self._head])

    def own_embedding_weights(self, microbatch: int) -> None:
        """Run J."""
        rows = Rows.of(self._tokens.pop(microbatch).flatten(), self._first_row, len(self._table))
        gradients = [each.flatten(0, 1) for each in self._embedded_gradients.pop(microbatch)]
        add_rows(self._table, rows, torch.cat(gradients) if len(gradients) > 1 else gradients[0])
        self.gradient_sync.added([self._table])

    def _read_tokens(self, microbatch: int) -> None:
        if self._device == self._first_device:
            tokens = self._next_tokens(microbatch)
            self._shapes[microbatch] = self._tell_shape(tokens.shape)
        else:
            self._shapes[microbatch] = self._tell_shape((0, 0))
            batch, sequence = self._shapes[microbatch]
            shape = (1 + self.stage_map.predicting) * batch, sequence
            tokens = self._empty(shape, torch.int64)
        self._tokens[microbatch] = self.together.from_one(self._first_device, tokens, "tokens")

    def _tell_shape(self, lookups: Sequence[int]) -> tuple[int, int]:
        """Return the [b, s] of a microbatch; the first device tells it by those of its lookups."""
        if self.tokens_shape is not None:
            return self.tokens_shape
        shape = torch.tensor(tuple(lookups), device=self._table.device)
        shape = self.together.from_one(self._first_device, shape, "the shape of tokens")
        is_known = self._device == self._first_device  # its host need not wait for the device
        batches, sequence = lookups if is_known else shape.tolist()
        return batches // (1 + self.stage_map.predicting), sequence

    def _next_tokens(self, microbatch: int) -> Tensor:
        """Have the trainer's function read a microbatch, and keep its call of the model for F."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        blank = self._empty((), torch.float32)

        def keep(*args: Any, **options: Any) -> Tensor:
            calls.append((args, options))
            return blank

        with Replaced() as replaced, self.state.running(0):
            replaced.put(self.first, "forward", keep)
            _, loss_function = self.forward_step_func(self.iterator, self.first)
        (call,) = calls
        self._calls[microbatch] = (*call, loss_function)
        model = unwrapped(self.first)
        bound = inspect.signature(type(model).forward).bind(model, *call[0], **call[1])
        tokens: Tensor | None = bound.arguments.get("input_ids")
        if (
            tokens is None
            or tokens.dim() != 2
            or tuple(tokens.shape) != (self.tokens_shape or tuple(tokens.shape))
        ):
            found = "none" if tokens is None else list(tokens.shape)
            raise UnsupportedError(
                "--pipeline-vocab-parallel requires microbatches of "
                f"{list(self.tokens_shape or 'bs')} tokens, and the model was called with {found}. "
                "Pad them, or remove --pipeline-vocab-parallel"
            )
        sequences, packed = [tokens], bound.arguments.get("packed_seq_params")
        for _ in range(self.stage_map.predicting):
            rolled, *_ = roll_tensor(sequences[-1], -1, -1, self.context_group, packed)
            sequences.append(rolled)
        return torch.cat(sequences)

    def _read_hidden(self, microbatch: int) -> None:
        """Read the last stage's output and labels, and g of the microbatch before."""
        what = f"the output of the last stage's F of microbatch {microbatch}"
        self._tell_what_is_wanted(microbatch, what)
        shape = self._logits_shape(microbatch)
        if self._device == self._loss_device:
            hidden = self._read[microbatch].contiguous()
        else:
            length = shape[1] // (self._tensor_ranks if self._scatters else 1)
            width = self._table.shape[1]
            hidden = self._empty((length, shape[0], width), self.config.pipeline_dtype)
        self._read[microbatch] = self.together.from_one(self._loss_device, hidden, what)
        if self._wants_logits:
            return
        before = microbatch - 1 if self.learns else -1
        notes = self._empty((2, *shape), torch.float64)
        if self._device == self._loss_device:
            notes[0] = self._labels[microbatch]
            notes[1] = 0 if before < 0 else self._gradient(before)
        notes = self.together.from_one(self._loss_device, notes, what)
        self._labels[microbatch] = notes[0].long()
        if before >= 0:
            self._gradients.setdefault(before, notes[1].float())

    def _logits_shape(self, microbatch: int) -> tuple[int, int]:
        """Return [b, s] with the sequences of further layers: only training wants their logits."""
        batch, sequence = self._shapes[microbatch]
        return (1 + self.stage_map.predicting * self.learns) * batch, sequence

    def _tell_what_is_wanted(self, microbatch: int, what: str) -> None:
        """Have all ranks know whether the trainer makes its loss of logits, in all of a step."""
        has_labels = microbatch in self._labels
        if self._wants_logits is None:
            asks = self._device == self._loss_device and not has_labels  # elsewhere it is heard
            wanted = torch.tensor([asks], device=self._table.device)
            self._wants_logits = bool(self.together.from_one(self._loss_device, wanted, what))
        if self._device == self._loss_device and has_labels == self._wants_logits:
            raise UnsupportedError(
                "the model was called with labels in one microbatch of a step and without in "
                "another. Pass labels in all or in none, or remove "
                "--pipeline-vocab-parallel"
            )

    def _read_embedding_gradient(self, microbatch: int) -> None:
        what = f"the embeddings' gradient of microbatch {microbatch}"
        own, made = self._embedded.pop(microbatch, []), []
        for device in self._readers:
            if self._device == device:
                gradient = own.pop(0).grad
                assert gradient is not None
                if self._rows.reduce_scatter_embeddings and self._tensor_ranks > 1:
                    gradient = self._gathered(gradient).transpose(0, 1)
                gradient = gradient.contiguous()
            else:
                shape = (*self._shapes[microbatch], self._table.shape[1])
                gradient = self._empty(shape, self._table.dtype)
            made.append(self.together.from_one(device, gradient, what))
        self._embedded_gradients[microbatch] = made

    def _sum(self, microbatch: int) -> Statistics:
        """Return what a microbatch's sums are; waits for them."""
        if microbatch not in self._whole:
            made = self._sums[microbatch].result()
            del self._sums[microbatch]
            self._whole[microbatch] = Statistics(*made[:FIELDS])
            for part in made[FIELDS:]:
                self._parts[microbatch] = part
        return self._whole[microbatch]

    def _gradient(self, microbatch: int) -> Tensor:
        """Return g of a microbatch; the loss rank makes it when it is first asked for."""
        if microbatch not in self._gradients:
            if self._device == self._loss_device:
                self._make_loss(microbatch)
            else:
                assert self._last_gradient is not None
                self._gradients[microbatch] = self._last_gradient.result()
        return self._gradients[microbatch]

    def _make_loss(self, microbatch: int) -> None:
        whole, batches = self._sum(microbatch), self._shapes[microbatch][0]
        losses = self._by_sequence(microbatch, whole.losses)
        gradient = self.lose(losses[:batches].contiguous(), self._loss_functions.pop(microbatch))
        if gradient is not None:
            _, *further = losses.split(batches)
            _, *best = self._by_sequence(microbatch, whole.best).split(batches)
            gradients = self._further.learn(microbatch, further, best)
            self._gradients[microbatch] = torch.cat([gradient, *gradients])

    def _by_sequence(self, microbatch: int, flat: Tensor) -> Tensor:
        """Return numbers of all tokens as [heads x b, s]."""
        return flat.view(*self._logits_shape(microbatch)[::-1]).t()

    def _tell_last_gradient(self, microbatch: int) -> None:
        """Make the loss that no S follows, and tell all ranks its gradient."""
        if self._device == self._loss_device:
            self._make_loss(microbatch)
        if not self.learns:
            self._sums.pop(microbatch, None)
            self._whole.pop(microbatch, None)
            return
        if self._device == self._loss_device:
            gradient = self._gradients[microbatch]
        else:
            gradient = self._empty(self._logits_shape(microbatch), torch.float32)
        tell = partial(self.together.tell_all, self._loss_device, gradient, "the loss's gradient")
        self._last_gradient = self.together.begin(tell, [gradient])

    def _of_tensor_ranks(self, part: Tensor) -> Tensor:
        """Return the parts, [t, ...], of the tensor-parallel ranks that share this one's stage."""
        whole = part.new_empty((self._tensor_ranks, *part.shape))
        if self._tensor_ranks == 1:
            return part.unsqueeze(0)
        dist.all_gather(list(whole.unbind()), part, group=self.tensor_group)
        return whole

    def _gathered(self, part: Tensor) -> Tensor:
        """Return a sequence whose parts, [s/t, ...], the tensor-parallel ranks have."""
        return self._of_tensor_ranks(part.contiguous()).flatten(0, 1)

    def _over_tensor_ranks(self, part: Tensor) -> Tensor:
        """Return the sum [s, b, h] of these ranks' parts, or where they cut it this one's of it."""
        if self._scatters:
            return self._reduce_scattered(part)
        if self._tensor_ranks > 1:
            dist.all_reduce(part, group=self.tensor_group)
        return part

    def _reduce_scattered(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the sequence, [s/t, ...], of the sum over these ranks."""
        parts = [each.contiguous() for each in whole.chunk(self._tensor_ranks)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=self.tensor_group)
        return own

    def _kernel(self) -> WeightGradKernel:
        if not self.config.gradient_accumulation_fusion:
            return WeightGradKernel.MATMUL_ADD
        total = getattr(self._head, "main_grad", self._head)
        return fused_kernel(total.device.type, total.dtype, self._head.dtype)

    def _gather_parameters(self) -> None:
        """Do what Megatron hooks to the modules' forward, which waits for their parameters."""
        for module in self._modules:
            for hook in module._forward_pre_hooks.values():
                hook(module, ())

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._table.device)

    def _count(self, *tensors: Tensor) -> None:
        if self.state.census is not None:
            for each in tensors:
                self.state.census.add(each)


class VocabularySharing(Capability):
    """Has all ranks share the embedding and the output layer."""

    def begin(self, beginning: Beginning) -> Part | None:
        """Return this rank's part in a step, if its vocabulary is shared."""
        together = beginning.transport.together
        if not beginning.pipeline.choice.shares or together is None:
            return None
        with refusing():
            check_vocabulary(True, beginning.step.config)
        return SharedVocabulary(beginning, together)

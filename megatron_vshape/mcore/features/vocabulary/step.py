"""The passes of vocabulary parallelism during one step.

The F of the first stage uses embeddings from the LOOKUP pass, and the F of the last stage ends
before the logits. LOOKUP needs the tokens of the microbatch. So it calls the trainer's function,
which reads the tokens and calls the model, and records this call for F.

The trainer's own function computes the loss from true losses, after the reductions of the LOGITS
pass. It runs before the first use of its gradient, which is the next LOGITS pass: this pass also
sends the gradient to all ranks. The gradient of a step's last microbatch is sent separately, and
the loss rank waits for the reductions within that LOGITS pass; it never waits within others. The
trainer's function may communicate, so it runs in pass order and not on the collective stream.

If a trainer calls the model without labels, the LOGITS pass computes its loss of logits on every
rank, from the rows of this rank (`loss_of_logits`).

Each layer of multi-token prediction has its own tokens and logits per token. In all these passes
they are additional sequences of the same microbatch (`further_losses`).

In names and comments, g is the gradient of the losses and X the hidden state of the last stage.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
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
from megatron_vshape.mcore.features.vocabulary import check_model_options
from megatron_vshape.mcore.features.vocabulary.further_losses import FurtherLosses
from megatron_vshape.mcore.features.vocabulary.loss_of_logits import (
    LossOfLogits,
    called_up_to_logits,
)
from megatron_vshape.mcore.features.vocabulary.model import running_step_of
from megatron_vshape.mcore.features.vocabulary.router_replay import (
    LastCalls,
    ModelCalled,
    RecordedIterator,
    are_active,
    restore,
    routers_of,
    states_of,
)
from megatron_vshape.mcore.hook import Replaced
from megatron_vshape.mcore.refusals import UnsupportedError, refusing
from megatron_vshape.mcore.step.losses import LateFaults, unlike
from megatron_vshape.mcore.step.microbatches import Reader
from megatron_vshape.mcore.step.stage import (
    ForwardStep,
    StepContext,
    StepFeature,
    StepHook,
    counted,
    loss_maker,
)
from megatron_vshape.mcore.step_state import unwrapped
from megatron_vshape.runtime.device_collectives import DeviceCollectives, Pending
from megatron_vshape.runtime.program_runner import Handler
from megatron_vshape.runtime.vocabulary import Logits, Rows, Statistics, add_rows, look_up
from megatron_vshape.runtime.weight_jobs import (
    WeightGradKernel,
    accumulate_weight_grad,
    fused_kernel,
)

_NUM_STATISTICS = len(Statistics._fields)

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


@dataclass(slots=True, eq=False)
class MicrobatchState:
    """The values of a microbatch on this rank, in the order in which the passes make them.

    A pass that is the last reader of a value deletes it, or sets it to None.
    """

    # LOOKUP, and F of the first stage.
    shape: tuple[int, int] = field(init=False)  # [b, s]
    call: tuple[tuple[Any, ...], dict[str, Any], Any] = field(init=False)  # of the model, for F
    replayed_data: Any = None  # data that F reads instead of `call`, if routers record or replay
    tokens: Tensor = field(init=False)  # [b, s], with those of multi-token prediction
    lookup: Pending[tuple[Tensor, ...]] | None = None
    unused_embeddings: list[Tensor] = field(init=False)  # not yet used by F
    used_embeddings: list[Tensor] = field(default_factory=list)
    # F of the last stage.
    last_hidden: Tensor = field(init=False)
    labels: Tensor | None = None
    loss_function: Any = None
    head_input: Tensor = field(init=False)  # output of the last stage, for LOGITS
    # LOGITS and LOSS.
    logits: Logits = field(init=False)
    logit_gradient: tuple[Tensor, Tensor] = field(init=False)  # gradient of the logits, X
    pending_sums: Pending[tuple[Tensor, ...]] | None = None
    statistics: Statistics | None = None
    input_gradient: Tensor = field(init=False)  # dX / g, on the loss rank
    gradient: Tensor | None = None  # g, [heads x b, s]
    # LOOKUP_WEIGHT.
    embedding_gradients: list[Tensor] = field(init=False)


@dataclass(eq=False)
class SharedVocabulary(StepHook):
    """This rank's part of the vocabulary passes in one step."""

    context: StepContext
    collectives: DeviceCollectives
    running: int = -1  # microbatch of the running F
    _microbatches: defaultdict[int, MicrobatchState] = field(
        default_factory=lambda: defaultdict(MicrobatchState)
    )
    _last_gradient: Pending[Tensor] | None = None
    _has_loss_of_logits: bool | None = None  # set in the first LOGITS
    _faults: LateFaults = field(default_factory=LateFaults)
    makes_loss = True

    def __post_init__(self) -> None:
        """Find this rank's rows, and register their gradients for reduction."""
        context = self.context
        self.state, self.config = context.state, context.config
        self.stage_map, self.iterator = context.pipeline.stage_map, context.data.iterators[0]
        self.first, self.last = context.chunks[0], context.chunks[-1]  # wrapped
        self.forward_step_func = context.forward_step
        self.num_microbatches = context.num_microbatches
        self.learns, self.gradient_sync = not context.forward_only, context.gradient_sync
        self.tensor_group, self.context_group = context.groups.tp, context.groups.cp
        self.second_reader = context.second_reader
        self._last_calls = LastCalls(routers_of(self.last))
        # [b, s] of a microbatch on this rank; None with variable lengths (see `_broadcast_shape`).
        self.tokens_shape: tuple[int, int] | None = None
        if not self.config.variable_seq_lengths:
            length, batch, _ = context.shape
            sequence_ranks = context.groups.tp.size() if self.config.sequence_parallel else 1
            self.tokens_shape = batch, length * sequence_ranks
        # Computes the loss of a microbatch from its losses, [b, s], and the loss function of F.
        reports = context.groups.pp.rank() == self.stage_map.loss_rank
        self.compute_loss = loss_maker(context, reports)
        self._rows = unwrapped(self.first).embedding.word_embeddings
        head = unwrapped(self.last).output_layer
        self._table = self._rows.weight
        self._head = self._table if head.weight is None else head.weight
        self._modules = self._rows, head
        self._first_row = self._rows.vocab_start_index
        self._first_device, self._loss_device = self.stage_map.end_ranks
        self._device = self.collectives.device
        self._tensor_ranks = self.tensor_group.size()
        self._scatters = self.config.sequence_parallel and self._tensor_ranks > 1
        # The ranks that use embeddings: first stage, then each multi-token prediction layer.
        predicting = self.stage_map.predicting
        self._readers = self._first_device, *(self._loss_device,) * predicting
        microbatches = self._microbatches  # no reference to this object, which would be a cycle
        self._further_losses = FurtherLosses(predicting, lambda number: microbatches[number].shape)
        # Weight gradients of the vocabulary are not jobs of a layer, so register them here.
        for _ in range(self.num_microbatches if self.learns else 0):
            self.gradient_sync.deferred([self._table])
            self.gradient_sync.deferred([self._head])

    def handlers(self) -> Mapping[Kind, Handler]:
        """Return the handlers of the vocabulary passes by kind.

        LOOKED_UP and LOSS run on the collective queue, in parallel with other passes.
        """

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
    def around_passes(self) -> Iterator[None]:
        """Set these passes in the model; if a pass fails, close the collectives."""
        with running_step_of(unwrapped(self.first)).setting(running=self):
            try:
                yield
                self.collectives.drain()
                # Reading the faults waits for the device, so this is after all passes.
                self._faults.check()
            except BaseException:
                # Other ranks wait in a collective; they get an error instead of a timeout.
                self.collectives.close()
                raise

    def join(self, work: Pass) -> None:
        """Join the collective before LOOKUP, LOGITS or LOOKUP_WEIGHT that provides its input."""
        joins = {
            LOOKUP: self._read_tokens,
            LOGITS: self._read_hidden,
            LOOKUP_WEIGHT: self._read_embedding_gradient,
        }
        if work.kind is not LOOKUP_WEIGHT:
            # Run the pre-forward hooks of DDP, which wait for parameters: the forwards are skipped.
            for module in self._modules:
                for hook in module._forward_pre_hooks.values():
                    hook(module, ())
        joins[work.kind](work.microbatch)

    def look_up(self, microbatch: int) -> None:
        """Run LOOKUP."""
        state = self._microbatches[microbatch]
        table, tokens_by_reader = self._table.detach(), state.tokens.split(state.shape[0])
        parts = [
            look_up(table, reader_tokens, self._first_row) for reader_tokens in tokens_by_reader
        ]

        def add_up() -> tuple[Tensor, ...]:
            embeddings = []
            # Each sum is a collective, so all ranks start them in the same order.
            for device, part in zip(self._readers, parts, strict=True):
                summed = self.collectives.sum_to(device, part, "the embeddings' sum")
                embeddings += [summed] * (device == self._device)
            return tuple(embeddings)

        pending = self.collectives.begin(add_up, parts)
        if self._device in self._readers:
            state.lookup = pending

    def wait_for_embeddings(self, microbatch: int) -> None:
        """Run LOOKED_UP on the collective queue."""
        lookup = self._microbatches[microbatch].lookup
        assert lookup is not None
        lookup.wait()

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the embeddings for the running F: [b, s, h], or a part [s/t, b, h].

        Reduces over tensor-parallel ranks, as Megatron's embedding does. Embeddings of multi-token
        prediction, which the model requests layer by layer, follow those of the model. `tokens`,
        [b, s], must equal the tokens looked up before F.
        """
        state = self._microbatches[self.running]
        if state.lookup is not None:
            state.unused_embeddings, state.lookup = list(state.lookup.result()), None
        embeddings = state.unused_embeddings
        local_readers = [
            index for index, device in enumerate(self._readers) if device == self._device
        ]
        expected_tokens = state.tokens.split(state.shape[0])[local_readers[-len(embeddings)]]
        # Checked on the device and read after the passes, so that the host does not wait here.
        self._faults.add(unlike(tokens, expected_tokens), _OTHER_TOKENS)
        part = embeddings.pop(0)
        if self._rows.reduce_scatter_embeddings and self._tensor_ranks > 1:
            part = self._reduce_scatter(part.transpose(0, 1))
        elif self._tensor_ranks > 1:
            dist.all_reduce(part, group=self.tensor_group)
        if self.learns:
            state.used_embeddings.append(part.requires_grad_())
        return part

    def forward(self, stage: int, is_last: bool, number: int, step: ForwardStep) -> ForwardStep:
        """Return the replacement of the trainer's function in F of the first and last stage."""
        self.running = number
        state = self._microbatches[number]
        if stage == 0 and state.replayed_data is not None:
            replayed_data, state.replayed_data = state.replayed_data, None
            return lambda iterator, model: step(replayed_data, model)
        if stage == 0:
            args, options, loss_function = state.call
            del state.call
            return lambda iterator, model: (model(*args, **options), loss_function)
        return self._last_forward(number) if is_last else step

    def _last_forward(self, microbatch: int) -> ForwardStep:
        """Return a function that runs the last stage without its loss."""

        state = self._microbatches[microbatch]

        def forward(iterator: Any, model: Any) -> Any:
            with self._further_losses.forward(microbatch):
                result, logits = called_up_to_logits(
                    self.forward_step_func, iterator, model, lambda: state.labels is not None
                )
            hidden = state.last_hidden
            del state.last_hidden
            if result is None:
                self._last_calls.end_at_logits(microbatch)
            if logits is not None:
                self._faults.add(unlike(logits, hidden.transpose(0, 1)), _OTHER_LOGITS)
            if result is not None:
                output, state.loss_function = result
                return output, None
            if self.stage_map.predicting:
                raise UnsupportedError(
                    "multi-token prediction learns from labels, and the model was called without: "
                    "pass labels, or remove --pipeline-vocab-parallel"
                )
            return hidden, None

        return forward

    def before_logits(self, hidden: Tensor) -> Tensor:
        """Return the replacement of the logits for a hidden state of the running F."""
        replacement = self._further_losses.begin(self.running, hidden)
        if replacement is not None:
            return replacement
        viewless_hidden: Tensor = make_viewless_tensor(
            hidden, hidden.requires_grad, keep_graph=True
        )
        self._microbatches[self.running].last_hidden = viewless_hidden
        return viewless_hidden

    def keep_labels(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Store the labels, [b, s], for replaced logits; return the replacement of their losses."""
        losses = self._further_losses.keep_labels(self.running, labels, logits)
        if losses is not None:
            return losses
        state = self._microbatches[self.running]
        if logits is not state.last_hidden:
            raise UnsupportedError(_OTHER_LOGITS)
        state.labels = labels
        return logits

    def output(self, is_last: bool, number: int, output: Tensor) -> Tensor:
        """Store the last stage's output, [s, b, h] or a part of the sequence, with its graph."""
        state = self._microbatches[number]
        if is_last and self.learns and state.labels is not None:
            output_and_labels = self._further_losses.end(number, output, state.labels)
            state.head_input, state.labels = output_and_labels
        elif is_last:
            state.head_input = output.detach()
            self._further_losses.forget(number)
        return output

    def own_logits(self, microbatch: int) -> None:
        """Run LOGITS, and start its reductions."""
        state = self._microbatches[microbatch]
        hidden, tokens = state.head_input, state.tokens
        del state.head_input
        if not self.learns:
            del state.tokens
        if self._scatters:
            hidden = self._gather_sequence(hidden)
        if self._has_loss_of_logits:
            self._run_loss_of_logits(microbatch, hidden, tokens)
            return
        # Only a loss of logits reads the data again; otherwise do not keep the batch for it.
        if isinstance(self.second_reader, Reader):
            self.second_reader.pass_over()
        labels, state.labels = state.labels, None
        assert labels is not None
        flat, weight = labels.t().flatten(), self._head.detach()
        needs_best = len(labels) > state.shape[0]
        logits = Logits.of(weight, hidden.flatten(0, 1), flat, self._first_row, needs_best)
        # The input gradient is computed here, before the global maxima and sums are known, and
        # rescaled after the reduction. So B does not wait for another GEMM (arXiv 2411.05288,
        # Algorithm 2).
        product = logits.softmax @ weight if self.learns else None
        part = torch.stack(logits.statistics)
        parts = self._gather_tensor_ranks(part)
        vocabulary = weight.shape[0] * self._modules[0].tp_group.size()
        device = self._device

        def add_up() -> tuple[Tensor, ...]:
            gathered = self.collectives.gather(parts, f"the maxima and sums of S.{microbatch}")
            statistics = Statistics.whole(gathered.flatten(0, 1), flat, vocabulary)
            if product is None:
                return statistics
            input_gradient = logits.input_gradient(weight, product, statistics)
            self.collectives.sum_to(
                self._loss_device, input_gradient, f"the gradients of S.{microbatch}"
            )
            return (*statistics, input_gradient) if device == self._loss_device else statistics

        inputs = [flat, *logits.statistics, parts, *([] if product is None else [product])]
        state.pending_sums = self.collectives.begin(add_up, inputs)
        if self.learns:
            state.logits = logits
            self._track_tensors(logits.softmax, logits.hidden)
        # No later LOGITS pass sends this gradient.
        if microbatch == self.num_microbatches - 1 or not self.learns:
            self._broadcast_last_gradient(microbatch)

    def _run_loss_of_logits(self, microbatch: int, hidden: Tensor, tokens: Tensor) -> None:
        weight = self._head.detach()
        loss_of_logits = LossOfLogits(
            self.state,
            self.last,
            self.second_reader,
            self.forward_step_func,
            self._modules[0].tp_group,
            self.compute_loss,
            self._faults,
        )
        with self._last_calls.rest_of_call(microbatch):
            gradient = loss_of_logits.compute_gradient(hidden, weight, tokens)
        if not self.learns:
            return
        if gradient is None:  # the loss does not depend on the logits
            gradient = hidden.new_zeros((*hidden.shape[:2], len(weight)))
        flat = gradient.flatten(0, 1)
        product, device = flat @ weight, self._loss_device

        def add_up() -> tuple[Tensor, ...]:
            self.collectives.sum_to(device, product, f"the gradients of S.{microbatch}")
            return (product,)

        state = self._microbatches[microbatch]
        state.pending_sums = self.collectives.begin(add_up, [product])
        state.logit_gradient = flat, hidden.flatten(0, 1)
        self._track_tensors(*state.logit_gradient)

    def wait_for_sums(self, microbatch: int) -> None:
        """Run LOSS on the collective queue."""
        pending = self._microbatches[microbatch].pending_sums
        if pending is not None:  # otherwise another pass has read the result already
            pending.wait()

    def before_backward(self, work: Pass, is_last: bool, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of the last stage's output for its B."""
        if not is_last or work.kind is Kind.W:
            return gradient
        return self._output_gradient(work.microbatch)

    def _output_gradient(self, number: int) -> Tensor:
        state = self._microbatches[number]
        batch = state.shape[0]
        if self._has_loss_of_logits:
            assert state.pending_sums is not None
            (part,), state.pending_sums = state.pending_sums.result(), None
            return self._sum_over_tensor_ranks(part.view(-1, batch, part.shape[-1]))
        gradient = self._loss_gradient(number).t()
        part = self._sum_over_tensor_ranks(state.input_gradient.view(*gradient.shape, -1))
        del state.input_gradient
        if self._scatters:
            gradient = gradient.chunk(self._tensor_ranks)[self.tensor_group.rank()]
        output_gradient = (gradient.unsqueeze(-1) * part).to(part.dtype)
        parts: list[Tensor] = [part.contiguous() for part in output_gradient.split(batch, dim=1)]
        self._further_losses.keep_gradients(number, parts[1:])
        return parts[0]

    def own_head_weights(self, microbatch: int) -> None:
        """Run HEAD_WEIGHT."""
        state = self._microbatches[microbatch]
        if self._has_loss_of_logits:
            gradient, hidden = state.logit_gradient
            del state.logit_gradient
            accumulate_weight_grad(self._head, gradient, hidden, self._kernel())
            self.gradient_sync.added([self._head])
            return
        statistics, gradient = self._statistics_of(microbatch), self._loss_gradient(microbatch)
        logits = state.logits
        del state.logits
        logits.add_weight_gradient(self._head, statistics, gradient.t().flatten(), self._kernel())
        self.gradient_sync.added([self._head])

    def own_embedding_weights(self, microbatch: int) -> None:
        """Run LOOKUP_WEIGHT."""
        state = self._microbatches[microbatch]
        rows = Rows.of(state.tokens.flatten(), self._first_row, len(self._table))
        gradients = [gradient.flatten(0, 1) for gradient in state.embedding_gradients]
        del state.tokens, state.embedding_gradients
        add_rows(self._table, rows, torch.cat(gradients) if len(gradients) > 1 else gradients[0])
        self.gradient_sync.added([self._table])

    def _read_tokens(self, microbatch: int) -> None:
        state = self._microbatches[microbatch]
        if self._device == self._first_device:
            tokens = self._next_tokens(microbatch)
            state.shape = self._broadcast_shape(tokens.shape)
        else:
            state.shape = batch, sequence = self._broadcast_shape((0, 0))
            shape = (1 + self.stage_map.predicting) * batch, sequence
            tokens = self._empty(shape, torch.int64)
        state.tokens = self.collectives.from_one(self._first_device, tokens, "tokens")

    def _broadcast_shape(self, lookups: Sequence[int]) -> tuple[int, int]:
        """Return [b, s] of a microbatch; with variable lengths, the first stage broadcasts it."""
        if self.tokens_shape is not None:
            return self.tokens_shape
        shape = torch.tensor(tuple(lookups), device=self._table.device)
        shape = self.collectives.from_one(self._first_device, shape, "the shape of tokens")
        is_known = self._device == self._first_device  # avoids a wait of its host for the device
        batches, sequence = lookups if is_known else shape.tolist()
        return batches // (1 + self.stage_map.predicting), sequence

    def _next_tokens(self, microbatch: int) -> Tensor:
        """Make the trainer's function read a microbatch, and record its call of the model for F."""
        call = self._call_of_first_stage(microbatch)
        model = unwrapped(self.first)
        bound = inspect.signature(type(model).forward).bind(model, *call[0], **call[1])
        tokens: Tensor | None = bound.arguments.get("input_ids")
        if (
            tokens is None
            or tokens.dim() != 2
            or tuple(tokens.shape) != (self.tokens_shape or tuple(tokens.shape))
        ):
            shape = "none" if tokens is None else list(tokens.shape)
            raise UnsupportedError(
                "--pipeline-vocab-parallel requires microbatches of "
                f"{list(self.tokens_shape or 'bs')} tokens, and the model was called with {shape}. "
                "Pad them, or remove --pipeline-vocab-parallel"
            )
        sequences, packed = [tokens], bound.arguments.get("packed_seq_params")
        for _ in range(self.stage_map.predicting):
            rolled, *_ = roll_tensor(sequences[-1], -1, -1, self.context_group, packed)
            sequences.append(rolled)
        return torch.cat(sequences)

    def _call_of_first_stage(self, microbatch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run the trainer's function up to its call of the model, and store this call for F.

        If routers record or replay, F calls the function again with the same data, because the
        function sets the routers before its call of the model and reads them afterwards.
        """
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        blank = self._empty((), torch.float32)
        routers = routers_of(self.first)
        router_states, recorded = states_of(routers), RecordedIterator(self.iterator)

        def keep(*args: Any, **options: Any) -> Tensor:
            calls.append((args, options))
            if are_active(routers):
                raise ModelCalled
            return blank

        with Replaced() as replaced, self.state.setting(running_chunk=0):
            replaced.put(self.first, "forward", keep)
            iterator = recorded if routers else self.iterator
            try:
                _, loss_function = self.forward_step_func(iterator, self.first)
                self._microbatches[microbatch].call = (*calls[0], loss_function)
            except ModelCalled:
                restore(routers, router_states)
                self._microbatches[microbatch].replayed_data = recorded.replay()
        return calls[0]

    def _read_hidden(self, microbatch: int) -> None:
        """Receive the last stage's output and labels, and g of the previous microbatch."""
        description = f"the output of the last stage's F of microbatch {microbatch}"
        self._broadcast_loss_type(microbatch, description)
        state, shape = self._microbatches[microbatch], self._logits_shape(microbatch)
        if self._device == self._loss_device:
            hidden = state.head_input.contiguous()
        else:
            length = shape[1] // (self._tensor_ranks if self._scatters else 1)
            width = self._table.shape[1]
            hidden = self._empty((length, shape[0], width), self.config.pipeline_dtype)
        state.head_input = self.collectives.from_one(self._loss_device, hidden, description)
        if self._has_loss_of_logits:
            return
        previous = microbatch - 1 if self.learns else -1
        microbatches = [microbatch] if previous < 0 else [microbatch, previous]
        # One broadcast for both, flat because the two microbatches may differ in shape. float64
        # represents labels exactly.
        shapes = [self._logits_shape(number) for number in microbatches]
        sizes = [math.prod(shape) for shape in shapes]
        buffer = self._empty((sum(sizes),), torch.float64)
        labels, *gradients = map(Tensor.view, buffer.split(sizes), shapes)
        if self._device == self._loss_device:
            assert state.labels is not None
            labels.copy_(state.labels)
            for gradient in gradients:
                gradient.copy_(self._loss_gradient(previous))
        self.collectives.from_one(self._loss_device, buffer, description)
        state.labels = labels.long()
        for gradient in gradients:
            if self._microbatches[previous].gradient is None:
                self._microbatches[previous].gradient = gradient.float()

    def _logits_shape(self, microbatch: int) -> tuple[int, int]:
        """Return [b, s] including the sequences of multi-token prediction (training only)."""
        batch, sequence = self._microbatches[microbatch].shape
        return (1 + self.stage_map.predicting * self.learns) * batch, sequence

    def _broadcast_loss_type(self, microbatch: int, description: str) -> None:
        """Broadcast once per step whether the trainer computes its loss from logits."""
        has_labels = self._microbatches[microbatch].labels is not None
        if self._has_loss_of_logits is None:
            # Only the loss rank knows; all others receive its value.
            is_from_logits = self._device == self._loss_device and not has_labels
            flag = torch.tensor([is_from_logits], device=self._table.device)
            self._has_loss_of_logits = bool(
                self.collectives.from_one(self._loss_device, flag, description)
            )
        if self._device == self._loss_device and has_labels == self._has_loss_of_logits:
            raise UnsupportedError(
                "the model was called with labels in one microbatch of a step and without in "
                "another. Pass labels in all or in none, or remove "
                "--pipeline-vocab-parallel"
            )

    def _read_embedding_gradient(self, microbatch: int) -> None:
        description = f"the embeddings' gradient of microbatch {microbatch}"
        state, gradients = self._microbatches[microbatch], []
        embeddings, state.used_embeddings = state.used_embeddings, []
        for device in self._readers:
            if self._device == device:
                gradient = embeddings.pop(0).grad
                assert gradient is not None
                if self._rows.reduce_scatter_embeddings and self._tensor_ranks > 1:
                    gradient = self._gather_sequence(gradient).transpose(0, 1)
                gradient = gradient.contiguous()
            else:
                shape = (*state.shape, self._table.shape[1])
                gradient = self._empty(shape, self._table.dtype)
            gradients.append(self.collectives.from_one(device, gradient, description))
        state.embedding_gradients = gradients

    def _statistics_of(self, microbatch: int) -> Statistics:
        """Wait for the reductions of a microbatch, and return them."""
        state = self._microbatches[microbatch]
        if state.statistics is None:
            assert state.pending_sums is not None
            results, state.pending_sums = state.pending_sums.result(), None
            state.statistics = Statistics(*results[:_NUM_STATISTICS])
            for part in results[_NUM_STATISTICS:]:
                state.input_gradient = part
        return state.statistics

    def _loss_gradient(self, microbatch: int) -> Tensor:
        """Return g of a microbatch; the loss rank computes the loss at the first call."""
        state = self._microbatches[microbatch]
        if state.gradient is None and self._device == self._loss_device:
            self._compute_loss(microbatch)
        elif state.gradient is None:
            assert self._last_gradient is not None
            state.gradient = self._last_gradient.result()
        assert state.gradient is not None
        return state.gradient

    def _compute_loss(self, microbatch: int) -> None:
        state, statistics = self._microbatches[microbatch], self._statistics_of(microbatch)
        batches, loss_function = state.shape[0], state.loss_function
        state.loss_function = None
        losses = self._by_sequence(microbatch, statistics.losses)
        gradient = self.compute_loss(losses[:batches].contiguous(), loss_function)
        if gradient is not None:
            _, *further_losses = losses.split(batches)
            _, *best_rows = self._by_sequence(microbatch, statistics.best).split(batches)
            gradients = self._further_losses.record_losses(microbatch, further_losses, best_rows)
            state.gradient = torch.cat([gradient, *gradients])

    def _by_sequence(self, microbatch: int, flat: Tensor) -> Tensor:
        """Reshape values of all tokens to [heads x b, s]."""
        return flat.view(*self._logits_shape(microbatch)[::-1]).t()

    def _broadcast_last_gradient(self, microbatch: int) -> None:
        """Compute the loss of the last microbatch, and broadcast its gradient."""
        if self._device == self._loss_device:
            self._compute_loss(microbatch)
        state = self._microbatches[microbatch]
        if not self.learns:
            state.pending_sums = state.statistics = None
            return
        if self._device == self._loss_device:
            assert state.gradient is not None
            gradient = state.gradient
        else:
            gradient = self._empty(self._logits_shape(microbatch), torch.float32)
        send = partial(
            self.collectives.broadcast, self._loss_device, gradient, "the loss's gradient"
        )
        self._last_gradient = self.collectives.begin(send, [gradient])

    def _gather_tensor_ranks(self, part: Tensor) -> Tensor:
        """All-gather the parts, [t, ...], of the tensor-parallel ranks of this stage."""
        gathered = part.new_empty((self._tensor_ranks, *part.shape))
        if self._tensor_ranks == 1:
            return part.unsqueeze(0)
        dist.all_gather(list(gathered.unbind()), part, group=self.tensor_group)
        return gathered

    def _gather_sequence(self, part: Tensor) -> Tensor:
        """All-gather a sequence from the parts, [s/t, ...], of the tensor-parallel ranks."""
        return self._gather_tensor_ranks(part.contiguous()).flatten(0, 1)

    def _sum_over_tensor_ranks(self, part: Tensor) -> Tensor:
        """Sum over tensor-parallel ranks: [s, b, h], or this rank's part of the sequence."""
        if self._scatters:
            return self._reduce_scatter(part)
        if self._tensor_ranks > 1:
            dist.all_reduce(part, group=self.tensor_group)
        return part

    def _reduce_scatter(self, full_sequence: Tensor) -> Tensor:
        """Reduce-scatter over tensor-parallel ranks; return this rank's part [s/t, ...]."""
        parts = [part.contiguous() for part in full_sequence.chunk(self._tensor_ranks)]
        local_part = torch.empty_like(parts[0])
        dist.reduce_scatter(local_part, parts, group=self.tensor_group)
        return local_part

    def _kernel(self) -> WeightGradKernel:
        if not self.config.gradient_accumulation_fusion:
            return WeightGradKernel.MATMUL_ADD
        total = getattr(self._head, "main_grad", self._head)
        return fused_kernel(total.device.type, total.dtype, self._head.dtype)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._table.device)

    def _track_tensors(self, *tensors: Tensor) -> None:
        if self.state.tracker is not None:
            for tensor in tensors:
                self.state.tracker.add(tensor)


class VocabularySharing(StepFeature):
    """Shares the embedding and the output layer between all ranks."""

    def begin(self, context: StepContext) -> StepHook | None:
        """Return this rank's part in a step with vocabulary parallelism."""
        collectives = context.transport.collectives
        if not context.pipeline.choice.shards_output_layer or collectives is None:
            return None
        with refusing():
            check_model_options(context.config)
        return SharedVocabulary(context, collectives)

"""What a layer and the model's two ends take: time of F, B and W, and memory held.

Everything is per microbatch on one device, with tensor, sequence and context parallelism applied.
"""

from dataclasses import asdict, dataclass, replace

from megatron_vshape.core.model.costs import Piece
from megatron_vshape.core.model.layers import with_predicting
from megatron_vshape.sweep.files import Model, Recompute
from megatron_vshape.sweep.grid import Combination, widths_of
from megatron_vshape.sweep.machine import Machine


@dataclass(frozen=True, slots=True)
class Part(Piece):
    """A piece of a stage and how many parameters it has on a device."""

    parameters: float = 0.0

    def measured(self, piece: Piece) -> "Part":
        """Return the part with a piece's measured times and memory; its parameters stay."""
        return replace(self, **asdict(piece))


def model_flops(model: Model, sequence: int, batch: int) -> float:
    """Return the FLOPs of a step that MFU counts: no recompute, attention without its mask.

    Megatron's and PaLM's convention; a backward pass is two forward passes.
    """
    hidden = model.hidden_size
    heads, layers = 1 + model.mtp_layers, model.layers + model.mtp_layers
    per_token = 2.0 * layers * _layer_weights(model) + 2.0 * heads * hidden * model.vocabulary_size
    per_token += 4.0 * layers * sequence * hidden + 4.0 * model.mtp_layers * hidden**2
    return 3.0 * per_token * sequence * batch


def _products(model: Model, tensor: int) -> tuple[tuple[int, int], ...]:
    """Return the (inputs, outputs) of a layer's four linears on one device."""
    hidden, ffn = model.hidden_size, model.ffn
    key_value = 2 * hidden * model.groups // model.attention_heads
    return (
        (hidden, (hidden + key_value) // tensor),
        (hidden // tensor, hidden),
        (hidden, ffn * (2 if model.gated else 1) // tensor),
        (ffn // tensor, hidden),
    )


def _layer_weights(model: Model) -> int:
    return sum(inputs * outputs for inputs, outputs in _products(model, 1))


@dataclass(frozen=True, slots=True)
class Layers:
    """The pieces of a model under one combination; `split` says whether W is a pass of its own."""

    model: Model
    combination: Combination
    machine: Machine
    split: bool

    def layer_kernels(self) -> Part:
        """Return one transformer layer without its communication, and nothing recomputed."""
        assume, unit = self.machine.assume, self._unit()
        forward = self._products_us("forward") + self._attention_us(backward=False)
        forward += self.machine.traffic_us(assume.forward_bytes * unit)
        forward += assume.forward_kernels * assume.kernel_us
        backward = self._products_us("backward") + self._attention_us(backward=True)
        backward += self.machine.traffic_us(assume.backward_bytes * unit)
        backward += assume.backward_kernels * assume.kernel_us
        weight = self._products_us("weight") + 4 * assume.kernel_us
        kept = unit * (assume.kept_after_forward + (2 if self.model.dropout else 0))
        kept = kept * self._width() + self._kept_scores()
        weights = _layer_weights(self.model) / self.combination.tensor_parallel
        return Part(
            forward,
            backward,
            weight,
            kept,
            unit * assume.kept_after_backward * self._width(),
            parameters=weights,
        )

    def layer(self, kernels: Part) -> Part:
        """Return one transformer layer of these kernels, analytic or measured on one device."""
        return self._recomputed(self._communicating(kernels))

    def last(self, kernels: Part) -> Part:
        """Return the output layer and the loss of these kernels."""
        collective = self._collective_us()
        forward, backward = kernels.forward_us + collective, kernels.backward_us + collective
        return replace(kernels, forward_us=forward, backward_us=backward)

    def predicting(self, head: Part, layer: Part) -> Part:
        """Return the head with the model's layers of multi-token prediction.

        They have the output layer's parameters in common.
        """
        count, widths = self.model.mtp_layers, widths_of(self.model, self.combination.tokens)
        if not count:
            return head
        merging = 2 * self.model.hidden_size**2 / self.combination.tensor_parallel
        own = count * (layer.parameters + merging)
        made = with_predicting(head, layer, count, widths.merging_in_layers)
        return replace(made, parameters=head.parameters + own)

    def own_logits_bytes(self) -> float:
        """Return what a device holds of a microbatch of a vocabulary that all devices share.

        The probabilities of its rows, in the parameters' precision, and the hidden state.
        """
        it = self.combination
        rows = self.model.vocabulary_size / (it.tensor_parallel * it.pipeline_parallel)
        return self.model.parameter_bytes * it.tokens * rows + self.message_bytes()

    def _communicating(self, kernels: Part) -> Part:
        """Return a layer with what its kernels wait for of tensor and context parallelism."""
        assume, collective = self.machine.assume, self._collective_us()
        forward = kernels.forward_us + 4 * collective
        backward, weight = kernels.backward_us + 4 * collective, kernels.weight_us
        if self.split:
            # The gathered inputs are gathered again for W, while its products run.
            weight = max(weight + assume.collective_processors * 2 * collective, 2 * collective)
        else:
            # Two of four hide behind the other gradient's products, as far as those last.
            hidden = min(2 * collective, 0.5 * weight)
            backward -= (1 - assume.collective_processors) * hidden
        forward += self._ring_us(backward=False)
        backward += self._ring_us(backward=True)
        return replace(kernels, forward_us=forward, backward_us=backward, weight_us=weight)

    def _recomputed(self, part: Part) -> Part:
        """Return the part with its forward run again: its backward then runs whole."""
        if self.combination.recompute is Recompute.NONE:
            return part
        again = part.time_us - part.saved_us
        kept = 2 * self._unit() * self._width()
        return Part(part.forward_us, again, 0.0, kept, 0.0, parameters=part.parameters)

    def first(self) -> Part:
        """Return the embedding."""
        unit, us = self._unit(), self.machine.assume.kernel_us
        look_up = self.machine.traffic_us(4 * unit)
        vocabulary = self.model.vocabulary_size / self.combination.tensor_parallel
        weights = vocabulary * self.model.hidden_size
        return Part(look_up + 3 * us, 2 * look_up + 3 * us, us, unit, 0.0, parameters=weights)

    def last_kernels(self) -> Part:
        """Return the output layer and the loss without their communication."""
        tokens, hidden = self.combination.tokens, self.model.hidden_size
        vocabulary = self.model.vocabulary_size // self.combination.tensor_parallel
        machine, us = self.machine, self.machine.assume.kernel_us
        logits = float(tokens * vocabulary)
        operand, gradient = self.model.parameter_bytes, self.model.gradient_bytes
        # The loss reads bf16 logits, makes fp32 probabilities, and reads those three times.
        forward = machine.product_us(tokens, vocabulary, hidden, operand)
        forward += machine.traffic_us(20 * logits) + 8 * us
        backward = machine.product_us(tokens, hidden, vocabulary, operand)
        backward += machine.traffic_us(10 * logits) + 6 * us
        weight = machine.product_us(vocabulary, hidden, tokens, operand, 2 * gradient) + us
        inputs = 2 * self._unit()
        weights = 0.0 if self.model.tied_embeddings else vocabulary * hidden
        return Part(
            forward,
            backward,
            weight,
            inputs + 6 * logits,
            inputs + 2 * logits,
            parameters=float(weights),
        )

    def message_us(self) -> float:
        """Return the time of a message between neighbours."""
        it = self.combination
        stride = it.tensor_parallel * it.context_parallel * it.data_parallel
        return self.machine.message_us(self.message_bytes(), stride, it.pipeline_parallel)

    def message_bytes(self) -> float:
        """Return the size of a message."""
        return self.model.parameter_bytes * self._unit()

    def working_bytes(self) -> float:
        """Return what a layer's kernels need beside what is kept: gathered inputs, gradients."""
        gathered = 2 * 2 * self._unit() * self.combination.tensor_parallel
        wide = 4 * self.model.ffn / self.model.hidden_size * self._unit()
        return (gathered + wide) * self._width()

    def _unit(self) -> float:
        """Return tokens x hidden units on one device, sequence parallelism applied."""
        it = self.combination
        return it.tokens * self.model.hidden_size / it.tensor_parallel

    def _width(self) -> float:
        """Return how much wider than two bytes an activation is."""
        return self.model.parameter_bytes / 2

    def _products_us(self, which: str) -> float:
        """Return the time of the four linears forward, of their input or weight gradients."""
        tokens, machine = self.combination.tokens, self.machine
        operand, gradient = self.model.parameter_bytes, self.model.gradient_bytes
        total = 0.0
        for inputs, outputs in _products(self.model, self.combination.tensor_parallel):
            if which == "forward":
                total += machine.product_us(tokens, outputs, inputs, operand, operand)
            elif which == "backward":
                total += machine.product_us(tokens, inputs, outputs, operand, operand)
            else:
                total += machine.product_us(outputs, inputs, tokens, operand, 2 * gradient)
        return total

    def _attention_us(self, backward: bool) -> float:
        """Return the time of the attention itself, without its linears."""
        it, model, machine = self.combination, self.model, self.machine
        sequences = it.microbatch_size / it.context_parallel / it.tensor_parallel
        flops = 4.0 * it.sequence_length**2 * model.hidden_size * sequences
        if model.flash_attention:
            scale = machine.assume.attention_backward if backward else 1.0
            scale *= machine.assume.attention_dropout if model.dropout else 1.0
            return machine.attention_us(scale * flops / 2, it.sequence_length)
        traffic = machine.assume.unfused_score_bytes * self._width() * self._num_scores()
        head = model.hidden_size // model.attention_heads
        share = machine.assume.gemm_fraction * head / (head + machine.assume.depth_half)
        products = (2 if backward else 1) * flops / (machine.peak_flops_per_us * share)
        return machine.traffic_us(traffic) + products

    def _ring_us(self, backward: bool) -> float:
        """Return how long attention waits for keys and values of the context-parallel group.

        They go around a ring, in a backward pass with their gradients beside them.
        """
        it, model = self.combination, self.model
        groups = model.groups / model.attention_heads / it.tensor_parallel
        tokens = it.sequence_length * it.microbatch_size
        num_bytes = 2 * model.parameter_bytes * tokens * model.hidden_size * groups
        ring_us = self.machine.collective_us(num_bytes, it.context_parallel, it.tensor_parallel)
        rounds = (2 if backward else 1) * ring_us
        behind = (it.context_parallel - 1) / it.context_parallel * self._attention_us(backward)
        return max(0.0, rounds - self.machine.assume.context_hidden * behind)

    def _kept_scores(self) -> float:
        """Return the scores, probabilities and mask that attention without flash keeps."""
        if self.model.flash_attention:
            return 0.0
        return (4 + self.model.dropout) * self._width() * self._num_scores()

    def _num_scores(self) -> float:
        """Return how many scores attention computes on one device, the masked ones too."""
        it = self.combination
        sequences = it.microbatch_size / it.context_parallel / it.tensor_parallel
        return sequences * self.model.attention_heads * it.sequence_length**2

    def _collective_us(self) -> float:
        """Return one all-gather or reduce-scatter of a layer's activations among the TP group."""
        it = self.combination
        num_bytes = self.model.parameter_bytes * float(it.tokens * self.model.hidden_size)
        return self.machine.collective_us(num_bytes, it.tensor_parallel)

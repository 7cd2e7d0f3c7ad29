"""Table of pass kinds: all properties of passes, one row per kind, and the dependencies of passes.

F, B, W and BW are its first rows, and no other module lists kinds: the simulator, the proofs, the
planner, the lowering, the runner, figures, traces and files read this table. `define` adds a row.

A device has several resources. Passes of one resource run one at a time, in the order of the
device's row. Passes of different resources run concurrently, and wait for each other only if one
reads the result of the other. The memory of a device depends on the passes of its processor alone,
and so not on the speed of copies: a kind of another resource allocates nothing. Instead, a pass of
the processor that reads its result, possibly with zero length, frees the copied memory.

With vocabulary parallelism, some work belongs to no stage but has a part on every device. Such a
kind has `of` = `DEVICE`: each device has one pass per microbatch, with the number of any of its
stages. If all devices read the result of one stage, or one device reads the results of all, the
result travels by a collective, not by a P2P message. Every device must reach the collectives in the
same order (`program.lowering` proves this).
"""

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, reduce
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from operator import or_
from typing import ClassVar, NamedTuple, Self

from megatron_vshape.core.model.amounts import DUMMY_BYTES, NO_AMOUNT, STATE_BYTES, Amount, Measure


class ScheduleError(ValueError):
    """Invalid schedule, costs or option; the message contains the reason."""


PROCESSOR = "processor"
"""The resource that computes. Kinds name the other resources."""


FIRST, LAST, EVERY, DEVICE = "first", "last", "every", "device"
"""Stages: the first, the last, all, or any one per device."""


class Read(NamedTuple):
    """A result that a pass reads, of the same microbatch and of the stage `step` after its own.

    If there is no such stage, the pass reads nothing. `at` selects the FIRST stage, the LAST, or
    EVERY stage with such a pass. `later` selects the microbatch that comes n after the pass's own.
    This constrains the order of the device's row, not the time: the device runs that pass before,
    so nothing waits for it.
    """

    kind: str
    step: int = 0
    at: str = ""
    later: int = 0

    def stages(self, reader_stage: int, num_stages: int) -> range:
        """Return the stages whose results a pass of `reader_stage` reads."""
        if self.at == EVERY:
            return range(num_stages)
        stage = {FIRST: 0, LAST: num_stages - 1}.get(self.at, reader_stage + self.step)
        return range(stage, stage + 1) if 0 <= stage < num_stages else range(0)


@dataclass(frozen=True, eq=False, repr=False)
class Kind(str):
    """Kind of a pass: its name, as `F` in `F3.12`, and its row of the table.

    `reads` are in the order in which the results become available. If another stage reads the
    result of a kind, it is sent there. A kind that `does` others combines one pass of each, in
    order, and satisfies dependencies on any of them.

    A kind has these amounts, all optional:

    * time: computation time (default: none, or the sum of `does`).
    * collective: time of collectives with other ranks of the stage.
    * allocated: memory allocated at the start.
    * retained: memory retained from the end on.
    * freed: memory freed at the end.
    * offloaded: memory moved off the device, from the pass until the backward.
    * workspace: memory during the pass; for a kind that `does` others, the maximum of theirs unless
      the costs specify it.
    """

    F: ClassVar["Kind"]
    B: ClassVar["Kind"]
    W: ClassVar["Kind"]
    BW: ClassVar["Kind"]

    name: str
    _: KW_ONLY
    label: str  # in a legend: "input gradient"
    method: str  # of a stage of the model, which the runner calls
    words: str = ""  # in a sentence: "the backward pass for the inputs"; default: "the " and label
    reads: tuple[Read, ...] = ()  # results of the same microbatch,
    follows: tuple[Read, ...] = ()  # and of others, of kinds that may be defined later
    does: tuple["Kind", ...] = ()  # simple kinds; for a simple kind, itself
    before: tuple[str, ...] = ()  # kinds of the same stage and microbatch that wait if it exists
    descends: bool = False  # whether passes of one microbatch and stage run from last to first
    everywhere: bool = False  # whether it is mandatory for every stage and microbatch
    of: str = ""  # FIRST, LAST or DEVICE: where each microbatch has one pass, if used at all
    is_collective: bool = False  # whether no device ends such a pass before all have reached theirs
    resource: str = PROCESSOR
    time: Amount = NO_AMOUNT
    collective: Amount = NO_AMOUNT
    allocated: Amount = NO_AMOUNT
    retained: Amount = NO_AMOUNT
    freed: Amount = NO_AMOUNT
    offloaded: Amount = NO_AMOUNT
    workspace: Amount = NO_AMOUNT
    colour: str = "#6b6b6b"  # of chunk 0, `#rrggbb`
    terminal: tuple[int, int] = (241, 250)  # nearest of 256 colors; upper and lower case

    def __new__(cls, name: str, **_: object) -> Self:
        """Make the text of the kind."""
        return super().__new__(cls, name)

    def __post_init__(self) -> None:
        """Set the defaults that depend on other fields."""
        object.__setattr__(self, "words", self.words or f"the {self.label}")
        # A simple kind includes itself, so that callers treat BW and B in the same way.
        object.__setattr__(self, "does", self.does or (self,))

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Unpickle to the row of this name, because kinds are compared by identity."""
        return find_kind, (str(self),)

    @cached_property
    def receives(self) -> bool:
        """Return whether a pass reads a result of another stage."""
        return any(read.step for read in self.reads)

    @property
    def amounts(self) -> Iterator[Amount]:
        """Yield the amounts of time and memory of the kind."""
        memory = self.allocated, self.retained, self.freed, self.offloaded, self.workspace
        return filter(None, (self.time, self.collective, *memory))

    @property
    def is_execution_numbered(self) -> bool:
        """Return whether passes have their number in execution order, not that of their microbatch.

        They have if the kind descends, or reads a kind that does.
        """
        return any(
            part.descends or any(find_kind(read.kind).descends for read in part.reads)
            for part in self.does
        )

    def needs(self, stage: int, num_stages: int) -> Iterator[tuple["Kind", int]]:
        """Yield the kinds and stages whose results a pass of `stage` reads, without optional ones.

        All are of the pass's microbatch. `NeedTable` adds dependencies on optional passes.
        """
        for read in self.reads:
            for source_stage in read.stages(stage, num_stages):
                yield find_kind(read.kind), source_stage

    @property
    def sends(self) -> bool:
        """Return whether a pass of another stage reads the result."""
        return any(read.kind in self.does and read.step for kind in KINDS for read in kind.reads)


_ROWS: dict[str, Kind] = {}

KINDS = _ROWS.values()
"""All rows in the order of their definition."""


def define(kind: Kind) -> Kind:
    """Add a row to the table and return its kind.

    Raises:
        ScheduleError: the name exists or is not in capital letters, a referenced kind does not
            exist, or a kind of another resource allocates memory.
    """
    _check_row(kind)
    _ROWS[kind] = kind
    return kind


def _check_row(kind: Kind) -> None:
    """Raise ScheduleError unless the kind is a valid new row of the table."""
    if kind in _ROWS or not (kind.isascii() and kind.isalpha() and kind.isupper()):
        raise ScheduleError(f"{str(kind)!r:.40} is not a new name in capital letters; use another")
    # `follows` are not checked: S follows C, whose row comes later in the table.
    for name in (*(read.kind for read in kind.reads), *kind.before):
        if name != kind and name not in _ROWS:
            raise ScheduleError(f"{kind} names {name!r:.40}, which is no kind: {', '.join(_ROWS)}")
    # Peaks are computed from the row order alone. With memory on a concurrent resource, they would
    # depend on measured copy times.
    memory = kind.allocated or kind.retained or kind.freed or kind.workspace
    if kind.resource != PROCESSOR and memory:
        raise ScheduleError(
            f"{kind} runs on {kind.resource} and has the memory {memory}: only kinds that run on "
            f"the {PROCESSOR} can have memory. Remove {memory}"
        )


def remove(kind: Kind) -> None:
    """Remove an added row from the table; no schedule may use it any more."""
    del _ROWS[kind]


def find_kind(name: str) -> Kind:
    """Return the kind of this name; raises ScheduleError if there is none."""
    if name not in _ROWS:
        raise ScheduleError(f"there is no kind {name!r:.40}; the kinds are {', '.join(_ROWS)}")
    return _ROWS[name]


# Trainers read batches sequentially on the first and the last stage, and Transformer Engine's first
# full backward of a step sets the gradients that later ones add to. So F and B of every stage run
# in microbatch order. The colors are distinguishable with red-green color blindness, and dark
# enough for white text.
Kind.F = Kind(
    "F",
    label="forward",
    words="the forward pass",
    method="forward",
    reads=(Read("F", -1),),
    follows=(Read("F", later=-1),),
    everywhere=True,
    time=Amount("forward_us", Measure.TIME),
    collective=Amount("forward_exchange_us", Measure.COLLECTIVE),
    allocated=Amount("held_after_forward_bytes", Measure.ACTIVATION),
    workspace=Amount("forward_work_bytes", Measure.WORKSPACE),
    colour="#1f5fa8",
    terminal=(25, 111),
)
Kind.B = Kind(
    "B",
    label="input gradient",
    words="the backward pass for the inputs",
    method="backward_inputs",
    reads=(Read("F"), Read("B", +1)),
    follows=(Read("B", later=-1),),
    descends=True,  # later parts of a microbatch read the keys and values of earlier parts
    everywhere=True,
    time=Amount("backward_us", Measure.TIME),
    collective=Amount("backward_exchange_us", Measure.COLLECTIVE),
    retained=Amount("held_after_backward_bytes", Measure.ACTIVATION),
    freed=Kind.F.allocated,
    workspace=Amount("backward_work_bytes", Measure.WORKSPACE),
    colour="#c4540a",
    terminal=(166, 216),
)
Kind.W = Kind(
    "W",
    label="weight gradient",
    words="the backward pass for the weights",
    method="backward_weights",
    reads=(Read("B"),),
    everywhere=True,
    time=Amount("weight_us", Measure.TIME),
    freed=Kind.B.retained,
    workspace=Amount("weight_work_bytes", Measure.WORKSPACE),
    colour="#16806a",
    terminal=(29, 115),
)
Kind.BW = Kind(
    "BW",
    label="full backward",
    words="the full backward pass",
    method="backward",
    # Without B's `follows`: rules for the row use the parts in `does`.
    reads=Kind.B.reads,
    does=(Kind.B, Kind.W),
    time=Amount("whole_backward_us", Measure.TIME),
    collective=Amount("whole_exchange_us", Measure.COLLECTIVE),
    # F's activations stay until the end of W, so a BW never has B's smaller retained part.
    freed=Kind.F.allocated,
    workspace=Amount("whole_work_bytes", Measure.WORKSPACE),
)

# Offloading to host memory (arXiv 2503.01328): an offloaded microbatch has all four kinds. The
# copies run concurrently with the processor. The device's memory follows from the two markers in
# its row, so a late copy stalls the device but never increases memory.
TO_HOST, FROM_HOST = "link to the host", "link from the host"

COPY_OUT = Kind(
    "D",
    label="copy to the host",
    method="copy_out",
    reads=(Read("F"),),
    resource=TO_HOST,
    time=Amount("copy_out_us", Measure.COPY),
    offloaded=Amount("offloaded_bytes", Measure.ACTIVATION),
    colour="#6b4fa0",
    terminal=(61, 146),
)
RELEASE = Kind(
    "L",
    label="release",
    words="the release of offloaded activations",
    method="release",
    reads=(Read("D"),),
    freed=COPY_OUT.offloaded,
    colour="#4d4d4d",
    terminal=(239, 248),
)
RELOAD = Kind(
    "R",
    label="room for a reload",
    words="the allocation for reloaded activations",
    method="make_room",
    reads=(Read("L"),),
    descends=True,  # as B does, for which it comes back
    allocated=COPY_OUT.offloaded,
    colour="#4d4d4d",
    terminal=(239, 248),
)
COPY_BACK = Kind(
    "H",
    label="copy from the host",
    method="copy_back",
    reads=(Read("R"),),
    descends=True,
    before=("B",),
    resource=FROM_HOST,
    time=Amount("copy_back_us", Measure.COPY),
    colour="#8a3b78",
    terminal=(96, 182),
)

OFFLOAD = (COPY_OUT, RELEASE, RELOAD, COPY_BACK)
"""Kinds of an offloaded stage and microbatch."""


# Vocabulary parallelism (arXiv 2411.05288, Algorithm 2): every device has rows of the embedding and
# of the output layer. The last stage's F ends before the logits. Each device computes its part of
# the logits and of the input gradient, which are combined before that stage's B. The weight
# gradient additionally requires only the gradient of the loss, which arrives with the input of the
# next microbatch's S. All of them run in microbatch order.
COLLECTIVES = "collectives"

LOOKUP = Kind(
    "I",
    label="embedding of its tokens",
    words="the shared embedding",
    method="look_up",
    follows=(Read("I", later=-1),),
    is_collective=True,
    of=DEVICE,
    time=Amount("lookup_us", Measure.TIME),
    workspace=Amount("lookup_work_bytes", Measure.WORKSPACE),
    colour="#7a6a1f",
    terminal=(101, 186),
)
LOOKED_UP = Kind(
    "E",
    label="sum of embeddings",
    method="sum_embeddings",
    reads=(Read("I", at=EVERY),),
    follows=(Read("E", later=-1),),
    before=("F",),
    of=FIRST,
    resource=COLLECTIVES,
    time=Amount("lookup_sum_us", Measure.TIME),
    colour="#7a6a1f",
    terminal=(101, 186),
)
LOGITS = Kind(
    "S",
    label="its part of the output layer",
    words="the output layer and softmax of vocabulary parallelism",
    method="own_logits",
    is_collective=True,
    # The broadcast of S also carries the previous microbatch's gradient of the loss.
    reads=(Read("F", at=LAST),),
    follows=(Read("S", later=-1), Read("C", at=LAST, later=-1)),
    of=DEVICE,
    time=Amount("logits_us", Measure.TIME),
    allocated=Amount("logits_bytes", Measure.ACTIVATION),
    workspace=Amount("logits_work_bytes", Measure.WORKSPACE),
    colour="#a02c5a",
    terminal=(125, 205),
)
LOSS = Kind(
    "C",
    label="sum over the vocabulary",
    method="sum_vocabulary",
    reads=(Read("S", at=EVERY),),
    follows=(Read("C", later=-1),),
    before=("B",),
    of=LAST,
    resource=COLLECTIVES,
    time=Amount("logits_sum_us", Measure.TIME),
    colour="#a02c5a",
    terminal=(125, 205),
)
HEAD_WEIGHT = Kind(
    "T",
    label="weight gradient of the output layer",
    words="the weight gradient of the shared output layer",
    method="own_head_weights",
    reads=(Read("S"), Read("C", at=LAST)),
    follows=(Read("S", later=+1), Read("T", later=-1)),
    of=DEVICE,
    time=Amount("head_weight_us", Measure.TIME),
    freed=LOGITS.allocated,
    workspace=Amount("head_weight_work_bytes", Measure.WORKSPACE),
    colour="#3d7d2f",
    terminal=(64, 150),
)
LOOKUP_WEIGHT = Kind(
    "J",
    label="gradient of the embedding",
    words="the gradient of the shared embedding",
    method="own_embedding_weights",
    is_collective=True,
    reads=(Read("B", at=FIRST),),
    follows=(Read("J", later=-1),),
    of=DEVICE,
    time=Amount("lookup_weight_us", Measure.TIME),
    workspace=Amount("lookup_weight_work_bytes", Measure.WORKSPACE),
    colour="#4a6b8a",
    terminal=(67, 110),
)

VOCABULARY = (LOOKUP, LOOKED_UP, LOGITS, LOSS, HEAD_WEIGHT, LOOKUP_WEIGHT)
"""Kinds of vocabulary parallelism."""

VOCABULARY_AMOUNTS = frozenset({LOGITS.allocated, *(kind.time for kind in VOCABULARY)})
"""Amounts that all costs with vocabulary parallelism have."""

ALL_OR_NONE = (OFFLOAD, VOCABULARY)
"""Groups of kinds: a microbatch has all of a group (on its stage or on every device), or none."""

MOVING = tuple(k for group in ALL_OR_NONE if any(kind.offloaded for kind in group) for k in group)
"""Kinds of the groups that move memory off a device."""

MOVING_NAME = "offloading"
"""Name of these passes in tables."""


def simple_kinds(kinds: Iterable[Kind]) -> tuple[Kind, ...]:
    """Return the simple kinds of these kinds, in the table's order."""
    # Table order makes the part numbers of two schedules with the same kinds equal.
    simple = {part for kind in kinds for part in kind.does}
    return tuple(kind for kind in KINDS if kind in simple)


PAIR_SIGN = "&"
"""Separator of the two passes of an overlapped F&B pair, in text: `F0.3&B7.1`."""

PARTS = (Kind.F, Kind.B, Kind.W)
"""Simple kinds with one pass for every stage and microbatch."""

for _kind in (*PARTS, Kind.BW, *OFFLOAD, *VOCABULARY):
    define(_kind)

TIMES = tuple(kind.time for kind in PARTS)
HELD = (Kind.F.allocated, Kind.B.retained)
COLLECTIVE_TIMES = tuple(kind.collective for kind in (Kind.F, Kind.B, Kind.BW))
WORKSPACES = tuple(kind.workspace for kind in (*PARTS, Kind.BW))
REQUIRED_AMOUNTS = (*TIMES, *HELD)
"""Amounts that all costs have."""

OPTIONAL_AMOUNTS = (Kind.BW.time, *COLLECTIVE_TIMES, STATE_BYTES, *WORKSPACES, DUMMY_BYTES)
"""Optional amounts of F, B, W and BW, in the order of costs files."""

BASIC_AMOUNTS = (*REQUIRED_AMOUNTS, *OPTIONAL_AMOUNTS)
"""All amounts of F, B, W and BW."""


def amounts_of(kinds: Iterable[Kind]) -> list[Amount]:
    """Return the amounts of these kinds: those of F, B, W and BW first, then in table order."""
    of_kinds = chain.from_iterable(kind.amounts for kind in kinds)
    return list(dict.fromkeys((*BASIC_AMOUNTS, *of_kinds)))


def other_amounts(kinds: Iterable[Kind]) -> list[Amount]:
    """Return the amounts of these kinds beyond F, B, W and BW, in the table's order."""
    return amounts_of(kinds)[len(BASIC_AMOUNTS) :]  # which are first for any kinds


def find_amount(name: str) -> Amount:
    """Return the amount of this name in costs files; raises ScheduleError if there is none."""
    for amount in amounts_of(KINDS):
        if amount.name == name:
            return amount
    raise ScheduleError(f"no kind of pass has {name!r:.40}")


class NeedTable:
    """Dependencies of passes by number, for loops over 10^5 passes.

    `parts` has the simple kinds, and a part is an index of it. `needs[kind][stage]` has the (part,
    stage) pairs that a pass reads, of the same microbatch. A microbatch without a pass of a part in
    `optional_parts` does not wait for it.
    """

    def __init__(self, num_stages: int, kinds: Iterable[Kind] = PARTS) -> None:
        """Build the table for all kinds of a schedule; it always includes PARTS."""
        self.parts = simple_kinds((*PARTS, *kinds))
        self.parts_of = {
            kind: tuple(map(self.parts.index, kind.does))
            for kind in KINDS
            if set(kind.does).issubset(self.parts)
        }
        self.optional_parts = [
            index for index, part in enumerate(self.parts) if not part.everywhere
        ]
        self.needs = {
            kind: [self._needs(kind, stage, num_stages) for stage in range(num_stages)]
            for kind in self.parts_of
        }

    def _needs(self, kind: Kind, stage: int, num_stages: int) -> tuple[tuple[int, int], ...]:
        mandatory_needs = [
            (self.parts.index(part), need_stage)
            for part, need_stage in kind.needs(stage, num_stages)
        ]
        # Optional passes, such as a reload, precede the kinds in their `before`.
        single_stages = {FIRST: 0, LAST: num_stages - 1}
        # `single_stages` restricts kinds with a single stage: C precedes B on the last stage alone.
        optional_needs = [
            (index, stage)
            for index in self.optional_parts
            if not set(self.parts[index].before).isdisjoint(kind.does)
            and stage == single_stages.get(self.parts[index].of, stage)
        ]
        return (*mandatory_needs, *optional_needs)

    def topological_order(self) -> list[tuple[int, int]]:
        """Return every (part, stage) in topological order.

        Raises:
            ScheduleError: passes of one microbatch depend on each other in a cycle.
        """
        reads = {
            (index, stage): needs
            for index, part in enumerate(self.parts)
            for stage, needs in enumerate(self.needs[part])
        }
        try:
            return list(TopologicalSorter(reads).static_order())
        except CycleError as error:
            cycle = ", ".join(f"{self.parts[index]}{stage}" for index, stage in error.args[1])
            raise ScheduleError(f"passes wait for each other in a circle: {cycle}") from None

    def direct_needs(self) -> dict[Kind, list[tuple[tuple[int, int], ...]]]:
        """Return `needs` without those that another need of the same pass implies.

        Waiting for the rest implies waiting for all, whichever optional passes a microbatch omits.
        """
        # `bits` has one bit per part and stage, `implied` the union of all that it waits for.
        bits, implied = dict[tuple[int, int], int](), dict[tuple[int, int], int]()  # sets, as bits

        def implied_bits(needs: tuple[tuple[int, int], ...]) -> int:
            """Return the parts that these passes imply, optional parts excluded."""
            certain = (
                implied[requirement]
                for requirement in needs
                if requirement[0] not in self.optional_parts
            )
            return reduce(or_, certain, 0)

        for number, (index, stage) in enumerate(self.topological_order()):
            needs = self.needs[self.parts[index]][stage]
            bits[index, stage] = 1 << number
            # A wait through an optional pass is not certain: the microbatch may omit that pass.
            certain_bits = (
                bits[dependency] for dependency in needs if dependency[0] not in self.optional_parts
            )
            implied[index, stage] = reduce(or_, certain_bits, implied_bits(needs))

        def direct(needs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
            return tuple(
                dependency for dependency in needs if not bits[dependency] & implied_bits(needs)
            )

        return {kind: list(map(direct, by_stage)) for kind, by_stage in self.needs.items()}

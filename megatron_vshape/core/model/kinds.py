"""The table of kinds: all that the package knows of what passes do, a row for each kind.

F, B, W and BW are its first rows, and nothing else lists kinds: the simulator, the proofs, the
planner, the lowering, the runner, pictures, traces and files read this table. `define` adds a row.

A device has several resources. Passes of one resource run one at a time, in the order in which
they stand in the device's row; those of two resources run side by side, and wait for each other
only where one reads what the other makes. What a device holds follows from its processor's passes
alone, so that it does not depend on how fast a copy is: a kind of another resource holds nothing,
and a pass of the processor that reads it, which may take no time, lets go of what was copied.

Some work is no stage's: a vocabulary that is shared out has a part on every device. Such a kind is
of the `DEVICE`: each has one pass for every microbatch, written with the number of any stage of it.
What all of them read of one stage, or one reads of all of them, comes by a collective that all
devices join in that pass; it is no message, and every device has to come to it in the same order
(`program.lowering` proves that it does).
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import ClassVar, NamedTuple


class ScheduleError(ValueError):
    """Invalid schedule, costs or option; the message contains the reason."""


PROCESSOR = "processor"
"""The resource that computes. Others have whatever name their kinds give them."""


FIRST, LAST, EVERY, DEVICE = "first", "last", "every", "device"
"""Which stages: the first, the last, all, or any one of each device."""


class Read(NamedTuple):
    """A result that a pass reads: of the same microbatch, of the stage `step` after its own.

    Where there is no such stage, there is nothing to read. With `at` it is that of the FIRST stage,
    of the LAST, or of EVERY one that has such a pass. With `later` it is of the microbatch that
    comes so many after its own. That is a law of the device's row and not of the clock: whoever
    runs the row comes to that pass before, so nothing is waited for.
    """

    kind: str
    step: int = 0
    at: str = ""
    later: int = 0

    def stages(self, own: int, num_stages: int) -> range:
        """Return the stages that a pass of the stage `own` reads of."""
        if self.at == EVERY:
            return range(num_stages)
        stage = {FIRST: 0, LAST: num_stages - 1}.get(self.at, own + self.step)
        return range(stage, stage + 1) if 0 <= stage < num_stages else range(0)


class Kind(str):
    """What a pass does: its name, `F` in `F3.12`, and its row of the table.

    `reads` are in the order in which the results come to be, so that the last is the latest. A
    kind of which others read results of another stage sends them there. A kind that `does` others
    does what one pass of each does, one after the other, and is waited for as they are.

    Amounts are named by what `Costs` call them, one value per stage: a pass computes for `time`, by
    default no time, or as long as what it `does`, and for `exchange` waits for other ranks of its
    stage; it holds `takes` from its start on and `keeps` from its end on, and lets go of `frees` at
    its end. While it runs it holds `works` beyond all that; a kind that `does` others, where costs
    do not say, the most of theirs.
    """

    F: ClassVar["Kind"]
    B: ClassVar["Kind"]
    W: ClassVar["Kind"]
    BW: ClassVar["Kind"]

    label: str  # in a legend: "input gradient"
    words: str  # in a sentence: "the backward pass for the inputs"
    method: str  # of a stage of the model, which the runner calls
    reads: tuple[Read, ...]  # of its own microbatch,
    follows: tuple[Read, ...]  # and of others, whose rows may stand below
    receives: bool  # whether it reads a result of another stage
    does: tuple["Kind", ...]  # simple kinds; of a simple kind itself
    before: tuple[str, ...]  # kinds of its stage and microbatch that wait for it where it is
    descends: bool  # whether a stage has it of a microbatch's last slice first
    everywhere: bool  # whether every stage and microbatch must have it
    of: str  # FIRST, LAST or DEVICE: where a schedule that has it has one for every microbatch
    joins: bool  # whether no device leaves such a pass before all have come to theirs
    resource: str
    time: str
    exchange: str
    takes: str
    keeps: str
    frees: str
    works: str
    colour: str  # of chunk 0, `#rrggbb`
    terminal: tuple[int, int]  # the like among a terminal's 256 colours, upper and lower case

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Return how another process finds the same row, which is then compared by identity."""
        return find_kind, (str(self),)

    @property
    def by_rank(self) -> bool:
        """Return whether a microbatch's last slice comes first: of what descends or reads that."""
        return any(
            each.descends or any(find_kind(read.kind).descends for read in each.reads)
            for each in self.does
        )

    @property
    def sends(self) -> bool:
        """Return whether a pass of another stage reads the result."""
        return any(read.kind in self.does and read.step for kind in KINDS for read in kind.reads)


_ROWS: dict[str, Kind] = {}

KINDS = _ROWS.values()
"""All rows, in the order in which they were defined."""


def define(
    name: str,
    *,
    label: str,
    method: str,
    words: str = "",
    reads: Iterable[Read] = (),
    does: Sequence[Kind] = (),
    before: Iterable[str] = (),
    descends: bool = False,
    everywhere: bool = False,
    of: str = "",
    joins: bool = False,
    resource: str = PROCESSOR,
    time: str = "",
    exchange: str = "",
    takes: str = "",
    keeps: str = "",
    frees: str = "",
    works: str = "",
    colour: str = "#6b6b6b",
    terminal: tuple[int, int] = (241, 250),
) -> Kind:
    """Add a row to the table and return its kind; `Kind` says what each entry means.

    Raises:
        ScheduleError: the name is taken or is no capital letters, a kind it names is none, or one
            of another resource holds something.
    """
    kind = Kind(name)
    if name in _ROWS or not (name.isascii() and name.isalpha() and name.isupper()):
        raise ScheduleError(f"a kind cannot be called {name!r:.40}: new capital letters are wanted")
    every, kind.before = tuple(reads), tuple(before)
    kind.reads = tuple(read for read in every if not read.later)
    kind.follows = tuple(read for read in every if read.later)
    for other in (*(read.kind for read in kind.reads), *kind.before):
        if other != name and other not in _ROWS:
            raise ScheduleError(f"{name} names {other!r:.40}, which is no kind: {', '.join(_ROWS)}")
    if resource != PROCESSOR and (held := takes or keeps or frees or works):
        raise ScheduleError(
            f"{name} runs on {resource} and holds {held}; only a kind that runs "
            f"on the {PROCESSOR} may hold something or let go of it"
        )
    kind.label, kind.words, kind.method = label, words or f"the {label}", method
    kind.receives = any(read.step for read in kind.reads)
    kind.does = tuple(does) or (kind,)
    kind.everywhere, kind.of, kind.joins, kind.resource = everywhere, of, joins, resource
    kind.descends = descends
    kind.time, kind.exchange = time, exchange
    kind.takes, kind.keeps, kind.frees, kind.works = takes, keeps, frees, works
    kind.colour, kind.terminal = colour, terminal
    _ROWS[name] = kind
    return kind


def remove(kind: Kind) -> None:
    """Take a row that was added out of the table; no schedule may have it any more."""
    del _ROWS[kind]


def find_kind(name: str) -> Kind:
    """Return the kind of this name; raises ScheduleError where there is none."""
    if name not in _ROWS:
        raise ScheduleError(f"there is no kind {name!r:.40}; the kinds are {', '.join(_ROWS)}")
    return _ROWS[name]


# A trainer reads the batches one after the other, on the first stage and on the last, and
# Transformer Engine's first whole backward of a step sets the gradients that others add to: so F
# and B of every stage run microbatch by microbatch. Colours are told apart by people who see red
# and green alike, and dark enough for white text.
Kind.F = define(
    "F",
    label="forward",
    words="the forward pass",
    method="forward",
    reads=[Read("F", -1), Read("F", later=-1)],
    everywhere=True,
    time="forward_us",
    exchange="forward_exchange_us",
    takes="held_after_forward_bytes",
    works="forward_work_bytes",
    colour="#1f5fa8",
    terminal=(25, 111),
)
Kind.B = define(
    "B",
    label="input gradient",
    words="the backward pass for the inputs",
    method="backward_inputs",
    reads=[Read("F"), Read("B", +1), Read("B", later=-1)],
    descends=True,  # a slice owes those before it the gradients of their keys and values
    everywhere=True,
    time="backward_us",
    exchange="backward_exchange_us",
    keeps="held_after_backward_bytes",
    frees="held_after_forward_bytes",
    works="backward_work_bytes",
    colour="#c4540a",
    terminal=(166, 216),
)
Kind.W = define(
    "W",
    label="weight gradient",
    words="the backward pass for the weights",
    method="backward_weights",
    reads=[Read("B")],
    everywhere=True,
    time="weight_us",
    frees="held_after_backward_bytes",
    works="weight_work_bytes",
    colour="#16806a",
    terminal=(29, 115),
)
Kind.BW = define(
    "BW",
    label="whole backward",
    words="the whole backward pass",
    method="backward",
    reads=Kind.B.reads,
    does=(Kind.B, Kind.W),
    time="whole_backward_us",
    exchange="whole_exchange_us",
    frees="held_after_forward_bytes",
    works="whole_work_bytes",
)

# What waits in host memory (arXiv 2503.01328): a microbatch that does so has all four. The copies
# run beside the processor; what the device holds follows from the two markers in its row, so a late
# copy stalls and never takes more memory.
TO_HOST, FROM_HOST = "link to the host", "link from the host"

COPY_OUT = define(
    "D",
    label="copy to the host",
    method="copy_out",
    reads=[Read("F")],
    resource=TO_HOST,
    time="copy_out_us",
    colour="#6b4fa0",
    terminal=(61, 146),
)
RELEASE = define(
    "L",
    label="release",
    words="the release of offloaded activations",
    method="release",
    reads=[Read("D")],
    frees="offloaded_bytes",
    colour="#4d4d4d",
    terminal=(239, 248),
)
RELOAD = define(
    "R",
    label="room for a reload",
    words="the allocation for reloaded activations",
    method="make_room",
    reads=[Read("L")],
    descends=True,  # as B does, for which it comes back
    takes="offloaded_bytes",
    colour="#4d4d4d",
    terminal=(239, 248),
)
COPY_BACK = define(
    "H",
    label="copy from the host",
    method="copy_back",
    reads=[Read("R")],
    descends=True,
    before=["B"],
    resource=FROM_HOST,
    time="copy_back_us",
    colour="#8a3b78",
    terminal=(96, 182),
)

OFFLOAD = (COPY_OUT, RELEASE, RELOAD, COPY_BACK)
"""The kinds of a stage and microbatch whose activations wait in host memory."""


def resource_of(kind: Kind, half_duplex: bool) -> str:
    """Return where passes of this kind run, if the link to the host may go one way at a time."""
    return TO_HOST if half_duplex and kind.resource == FROM_HOST else kind.resource


# A vocabulary that is shared out (arXiv 2411.05288, its Algorithm 2): every device has rows of the
# embedding and of the output layer. The last stage's F ends where logits would begin; each device
# makes its part of these, and the part of the input's gradient, which are put together before that
# stage's B. The weight's gradient needs nothing more of others but the loss's own gradient, which
# comes with what the next microbatch's S reads. All of them run microbatch by microbatch.
COLLECTIVES = "collectives"

LOOKUP = define(
    "I",
    label="embedding of its tokens",
    method="look_up",
    reads=[Read("I", later=-1)],
    joins=True,
    of=DEVICE,
    time="lookup_us",
    works="lookup_work_bytes",
    colour="#7a6a1f",
    terminal=(101, 186),
)
LOOKED_UP = define(
    "E",
    label="sum of embeddings",
    method="sum_embeddings",
    reads=[Read("I", at=EVERY), Read("E", later=-1)],
    before=["F"],
    of=FIRST,
    resource=COLLECTIVES,
    time="lookup_sum_us",
    colour="#7a6a1f",
    terminal=(101, 186),
)
LOGITS = define(
    "S",
    label="its part of the output layer",
    method="own_logits",
    joins=True,
    reads=[Read("F", at=LAST), Read("S", later=-1), Read("C", at=LAST, later=-1)],
    of=DEVICE,
    time="logits_us",
    takes="logits_bytes",
    works="logits_work_bytes",
    colour="#a02c5a",
    terminal=(125, 205),
)
LOSS = define(
    "C",
    label="sum over the vocabulary",
    method="sum_vocabulary",
    reads=[Read("S", at=EVERY), Read("C", later=-1)],
    before=["B"],
    of=LAST,
    resource=COLLECTIVES,
    time="logits_sum_us",
    colour="#a02c5a",
    terminal=(125, 205),
)
HEAD_WEIGHT = define(
    "T",
    label="weight gradient of the output layer",
    method="own_head_weights",
    reads=[Read("S"), Read("C", at=LAST), Read("S", later=+1), Read("T", later=-1)],
    of=DEVICE,
    time="head_weight_us",
    frees="logits_bytes",
    works="head_weight_work_bytes",
    colour="#3d7d2f",
    terminal=(64, 150),
)
LOOKUP_WEIGHT = define(
    "J",
    label="gradient of the embedding",
    method="own_embedding_weights",
    joins=True,
    reads=[Read("B", at=FIRST), Read("J", later=-1)],
    of=DEVICE,
    time="lookup_weight_us",
    works="lookup_weight_work_bytes",
    colour="#4a6b8a",
    terminal=(67, 110),
)

VOCABULARY = (LOOKUP, LOOKED_UP, LOGITS, LOSS, HEAD_WEIGHT, LOOKUP_WEIGHT)
"""The kinds of a vocabulary that is shared out over all devices."""

ALL_OR_NONE = (OFFLOAD, VOCABULARY)
"""Kinds of which a microbatch has all, on its stage or on every device, or none."""


def simple_kinds(kinds: Iterable[Kind]) -> tuple[Kind, ...]:
    """Return the simple kinds among these and in what they do, in the table's order."""
    simple = {part for kind in kinds for part in kind.does}
    return tuple(kind for kind in KINDS if kind in simple)


BESIDE = "&"
"""Between the two passes of a joint pass, in text: `F0.3&B7.1`."""

PARTS = (Kind.F, Kind.B, Kind.W)
"""The simple kinds of which every stage and microbatch has one pass, whatever else it has."""

TIMES = tuple(kind.time for kind in PARTS)
HELD = (Kind.F.takes, Kind.B.keeps)
EXCHANGES = tuple(kind.exchange for kind in (Kind.F, Kind.B, Kind.BW))
STATE = "state_bytes"
DUMMY = "dummy_bytes"
WORKS = tuple(kind.works for kind in (*PARTS, Kind.BW))
KNOWN_ALONE = (Kind.BW.time, *EXCHANGES, STATE, *WORKS, DUMMY)
"""Names of amounts: of those that all costs have, and of those of F, B, W and BW that may be known.

A stage has its state between steps: weights, gradients, the optimizer's. Under Megatron's own
schedules it has a dummy gradient besides, as large as the output layer.
"""


def amount_names(kinds: Iterable[Kind]) -> list[str]:
    """Return the names of what these kinds' passes take and hold, behind those of F, B, W, BW."""
    rows = ((k.time, k.exchange, k.takes, k.keeps, k.frees, k.works) for k in kinds)
    names = (*TIMES, *HELD, *KNOWN_ALONE, *chain.from_iterable(rows))
    return [name for name in dict.fromkeys(names) if name]


def other_amounts(kinds: Iterable[Kind]) -> list[str]:
    """Return those of these kinds beyond F, B, W and BW, in the table's order."""
    return amount_names(kinds)[len(TIMES) + len(HELD) + len(KNOWN_ALONE) :]

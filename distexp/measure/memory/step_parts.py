"""What the GPU memory of one step is made of, from the allocations and frees that torch recorded.

The parts and rules are those of a prediction, see ``distexp.plan.replay.PARTS``. It imports no torch.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from distexp.runs.step_files import BACKWARD, FORWARD, OPTIMIZER, PHASES

PARTS = ("parameters", "gradients", "optimizer_states", "activations", "logits", "communication", "temporaries")
"""What a block of memory is for, as in ``predicted.parts`` of a record."""

END = "end"  # what follows the phases of a step

COMMUNICATION = "communication"
MIN_BLOCK = 512  # bytes to which torch's allocator rounds a request
MIN_ODD_FACTOR = 64  # a vocabulary must have such an odd factor, so that a size that it divides belongs to logits

GENERIC = re.compile(
    r"/torch/(?!distributed/(fsdp|algorithms|distributed_c10d|_functional_collectives))|/deepspeed/utils/"
)
"""Files that do not show what a tensor is for, such as torch without its code for communication."""

COLLECTIVE_FILES = re.compile(
    r"/torch/distributed/|/distexp/strategies/ddp_reduction\.py|/deepspeed/(runtime/(zero|comm)|comm)/"
)
COMPUTING_FILES = re.compile(r"/deepspeed/runtime/zero/linear\.py")  # code of ZeRO that computes layers
COMPUTING_FUNCTIONS = re.compile(r"norm|overflow|inf_or_nan")  # norms and checks of gradients in ZeRO

ZERO_FILES = re.compile(r"/deepspeed/runtime/zero/stage")
ZERO_GRADIENTS = re.compile(r"step|_prepare_fp32_grad_for_sub_group")  # functions that copy the gradients to fp32

REDUCING_FUNCTIONS = re.compile(r"reduce|all_gather")
ENGINE_FILE = re.compile(r"/deepspeed/runtime/engine\.py")
CHECKPOINT_FILE = re.compile(r"/torch/utils/checkpoint\.py")  # code that computes a forward pass again


@dataclass(frozen=True)
class Frame:
    """One call on the stack of an allocation."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Change:
    """An allocation or a free. The size is the requested one, and the frames start at the innermost call."""

    address: int
    size: int
    is_free: bool = False
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Mark:
    """The start of a phase: the last allocation at this address. Its gradients are those that exist then."""

    address: int
    phase: str
    gradients: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RecordedStep:
    """The memory of one step."""

    start: Mapping[int, int]  # bytes of each block that exists before the step, by address
    known: Mapping[int, str]  # part of some of these blocks
    changes: Sequence[Change]  # allocations and frees in order
    marks: Sequence[Mark]  # starts of phases in order; the last one has the phase ``end``
    vocabulary: int | None = None  # size of the vocabulary; None for image models
    weight_sizes: frozenset[int] = frozenset()  # numbers of elements of the weights, which are no logits

    @property
    def knows_logits(self) -> bool:
        """Return whether the size of a block shows that it has logits."""
        odd = self.vocabulary // (self.vocabulary & -self.vocabulary) if self.vocabulary else 0
        return odd >= MIN_ODD_FACTOR


@dataclass(eq=False)
class _Block:
    """A block of memory, and what is known about its purpose."""

    size: int
    part: str | None = None
    kept: bool = False  # at the end of the forward pass that allocated it
    by_autograd: bool = False  # whether the backward pass allocated it, and no Python code of it


@dataclass
class _Follower:
    """Follows the changes of a step, and decides on the part of each block."""

    step: RecordedStep
    phase: str = ""
    log: list[tuple[str, _Block, int]] = field(default_factory=list)  # phase, block, and 1 or -1
    alive: dict[int, _Block] = field(default_factory=dict)
    computed: dict[int, _Block] = field(default_factory=dict)  # by the forward pass that runs now

    def follow(self) -> None:
        """Fill the log."""
        for address, size in self.step.start.items():
            self._add(address, _Block(size, self.step.known.get(address)))
        # Marks keep their memory, so the last allocation at an address is the mark.
        last = {change.address: position for position, change in enumerate(self.step.changes) if not change.is_free}
        starts = {last[mark.address]: mark for mark in self.step.marks if mark.address in last}
        for position, change in enumerate(self.step.changes):
            if position in starts:  # Before its allocation, because the peak of the phase that ends was read before it.
                self._enter(starts[position])
            if change.is_free:
                self._free(change.address)
            else:
                self._allocate(change)
            if position in starts:
                self.alive[change.address].part = "temporaries"

    def _add(self, address: int, block: _Block) -> None:
        self.alive[address] = block
        self.log.append((self.phase, block, 1))

    def _free(self, address: int) -> None:
        self.computed.pop(address, None)
        if (block := self.alive.pop(address, None)) is not None:
            self.log.append((self.phase, block, -1))

    def _allocate(self, change: Change) -> None:
        self._free(change.address)
        recomputes = self.phase == BACKWARD and any(CHECKPOINT_FILE.search(frame.file) for frame in change.frames)
        in_forward = self.phase == FORWARD or recomputes
        if not in_forward:
            self._end_forward()
        by_autograd = self.phase == BACKWARD and not any(specific_frames(change.frames))
        block = _Block(round_size(change.size), _part_of(change, self.phase, self.step), by_autograd=by_autograd)
        self._add(change.address, block)
        if in_forward:
            self.computed[change.address] = block

    def _end_forward(self) -> None:
        for block in self.computed.values():
            block.kept = True
        self.computed = {}

    def _enter(self, mark: Mark) -> None:
        self._end_forward()
        if self.phase == BACKWARD:
            for left in self.alive.values():  # by autograd, after a micro-batch
                if left.by_autograd and left.part is None:
                    left.part = "gradients"
        self.phase = mark.phase
        for address in mark.gradients & self.alive.keys():
            if self.alive[address].part in (None, COMMUNICATION):
                self.alive[address].part = "gradients"


def phase_peaks(step: RecordedStep) -> dict[str, Counter[str]]:
    """Return the bytes by part at the peak of each phase that the step has."""
    follower = _Follower(step)
    follower.follow()
    used: Counter[str] = Counter()
    total, phase = 0, ""
    peaks: dict[str, Counter[str]] = {}
    for phase_now, block, sign in follower.log:
        if phase_now != phase and phase_now in PHASES and total > _total(peaks, phase_now):
            peaks[phase_now] = used.copy()  # what the phase starts with
        phase = phase_now
        used[block.part or ("activations" if block.kept else "temporaries")] += sign * block.size
        total += sign * block.size
        if phase in PHASES and total > _total(peaks, phase):
            peaks[phase] = used.copy()
    return {phase: peaks[phase] for phase in PHASES if phase in peaks}


def _total(peaks: Mapping[str, Counter[str]], phase: str) -> int:
    return peaks[phase].total() if phase in peaks else -1


def _part_of(change: Change, phase: str, step: RecordedStep) -> str | None:
    if phase in (FORWARD, BACKWARD) and is_communication(change.frames):
        return COMMUNICATION
    frame = next(specific_frames(change.frames), None) if phase == OPTIMIZER else None
    if frame is not None and ZERO_FILES.search(frame.file) and ZERO_GRADIENTS.fullmatch(frame.function):
        return "gradients"
    return "logits" if is_logits(change.size, step) else None


def round_size(size: int) -> int:
    """Return the size of the block of torch's allocator for a request."""
    return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)


def is_logits(size: int, step: RecordedStep) -> bool:
    """Return whether a size is a multiple of the vocabulary, in 2 or 4 bytes, and not that of a weight."""
    if not step.knows_logits or step.vocabulary is None:
        return False
    is_weight = any(size % item == 0 and size // item in step.weight_sizes for item in (2, 4))
    return not is_weight and size > 0 and size % (2 * step.vocabulary) == 0


def is_communication(frames: Sequence[Frame]) -> bool:
    """Return whether a collective's code allocated a block: the innermost call outside of torch's general code."""
    frame = next(specific_frames(frames), None)
    if frame is None or COMPUTING_FILES.search(frame.file):
        return False
    if ENGINE_FILE.search(frame.file):
        return bool(REDUCING_FUNCTIONS.search(frame.function))
    return bool(COLLECTIVE_FILES.search(frame.file)) and not COMPUTING_FUNCTIONS.search(frame.function)


def specific_frames(frames: Sequence[Frame]) -> Iterator[Frame]:
    """Yield the calls outside of torch's general code, the innermost one first."""
    return (frame for frame in frames if not GENERIC.search(frame.file))

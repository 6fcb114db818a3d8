"""The largest micro-batch that fits, and the smallest change that makes a training fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from distexp.config import Config, model_checks
from distexp.config.overrides import key_of
from distexp.plan.estimate import Estimate
from distexp.plan.verdict import FITS, TOO_CLOSE, verdict_of
from distexp.statistics.noise import MemoryLine
from distexp.strategies.base import load_strategy

MICRO_BATCH = "train.micro_batch_size"


@dataclass(frozen=True)
class ConfigChange:
    """Overrides that make a training smaller, with the estimate for them."""

    overrides: tuple[str, ...]
    estimate: Estimate


@dataclass
class Search:
    """Search among variants of one configuration, for the memory of a GPU.

    Without ``train.global_batch_size``, another micro-batch keeps the number of micro-batches per step. With it, the
    global batch stays the same, so that only its divisors are sizes.
    """

    config: Config
    compose: Compose
    estimate: EstimateAll
    memory_mib: float
    _most: dict[int, float] = field(default_factory=dict)  # most MiB of each size
    _invalid: dict[int, str] = field(default_factory=dict)  # why a size is invalid
    _not_certain: set[int] = field(default_factory=set)

    def changes(self, largest: LargestMicroBatch) -> list[ConfigChange]:
        """Return the changes that reduce the memory, the smallest first; the last is all of them without offloading."""
        return self._estimate(list(candidate_overrides(self.config, largest)))

    def first_change(self, at_a_time: int, has_time: Callable[[], bool]) -> tuple[ConfigChange | None, int]:
        """Return the smallest change that fits, or None; and how many changes there was no time for."""
        candidates = list(candidate_overrides(self.config))
        for start in range(0, len(candidates), at_a_time):
            if not has_time():
                return None, len(candidates) - start
            for change in self._estimate(candidates[start : start + at_a_time]):
                if verdict_of(change.estimate, self.memory_mib) == FITS:
                    return change, 0
        return None, 0

    def variant(self, override: str) -> ConfigChange | None:
        """Return one variant with its estimate; None if it is invalid or cannot be traced."""
        return next(iter(self._estimate([(override,)])), None)

    def _estimate(self, candidates: Sequence[tuple[str, ...]]) -> list[ConfigChange]:
        """Return the changes that are valid and can be traced."""
        found = [(overrides, self.compose(overrides)) for overrides in candidates]
        composed = [(overrides, config) for overrides, config in found if not isinstance(config, str)]
        outcomes = self.estimate([config for _, config in composed])
        return [
            ConfigChange(overrides, outcome)
            for (overrides, _), outcome in zip(composed, outcomes, strict=True)
            if isinstance(outcome, Estimate) and outcome.traced
        ]

    def largest_micro_batch(self, known: Estimate) -> LargestMicroBatch:
        """Return the largest micro-batch that fits, with the estimate of the configuration at hand."""
        sizes: Sequence[int] = range(1, LARGEST_MICRO_BATCH + 1)
        first = self.config.train.micro_batch
        self._remember(first, known, known.most_mib or 0.0)
        if self.config.train.global_batch_size is not None:
            sizes = model_checks.divisors(model_checks.samples_per_worker(self.config))
            # A step of a single micro-batch may need less memory than one of several, which adds up whole gradients.
            if self._fit([sizes[-1]]):
                return LargestMicroBatch(sizes[-1], invalid="it is the whole global batch of a worker")
        position = sizes.index(first)
        low, high = (position, len(sizes)) if self._fit([first]) else (-1, position)
        for _ in range(MAX_ROUNDS):
            positions = self._next_positions(sizes, low, high)
            if not positions:
                break
            fitting = self._fit([sizes[index] for index in positions])
            low = max([low, *(index for index in positions if sizes[index] in fitting)])
            high = min([high, *(index for index in positions if sizes[index] not in fitting)])
            high = self._first_invalid(sizes, low, high)
        is_exact = high - low == 1 or low == len(sizes) - 1
        reason = self._invalid.get(sizes[high], "") if high < len(sizes) else ""
        if low < 0:
            return LargestMicroBatch(None, is_exact, reason, one_may_fit=1 in self._not_certain)
        return LargestMicroBatch(sizes[low], is_exact, reason)

    def _first_invalid(self, sizes: Sequence[int], low: int, high: int) -> int:
        """Return the first position whose size is invalid, if that of ``high`` is; else ``high``."""
        if high == len(sizes) or sizes[high] in self._most:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            found = self.compose([f"{MICRO_BATCH}={sizes[middle]}"])
            if isinstance(found, str):
                high, self._invalid[sizes[middle]] = middle, found
            else:
                low = middle
        return high

    def _fit(self, sizes: Sequence[int]) -> list[int]:
        """Return those of some sizes that fit, up to the first that does not."""
        self._estimate_sizes([size for size in sizes if size not in self._most and size not in self._invalid])
        fitting = []
        for size in sizes:
            if size in self._invalid or self._most[size] > self.memory_mib:
                break
            fitting.append(size)
        return fitting

    def _estimate_sizes(self, sizes: Sequence[int]) -> None:
        composed = {size: self.compose([f"{MICRO_BATCH}={size}"]) for size in sizes}
        self._invalid |= {size: found for size, found in composed.items() if isinstance(found, str)}
        valid = {size: found for size, found in composed.items() if not isinstance(found, str)}
        for size, outcome in zip(valid, self.estimate(list(valid.values())), strict=True):
            if isinstance(outcome, Estimate) and outcome.most_mib is not None:
                self._remember(size, outcome, outcome.most_mib)
            else:
                self._invalid[size] = "the memory of a larger one could not be predicted"

    def _remember(self, size: int, estimate: Estimate, most_mib: float) -> None:
        self._most[size] = most_mib
        if verdict_of(estimate, self.memory_mib) == TOO_CLOSE:
            self._not_certain.add(size)

    def _next_positions(self, sizes: Sequence[int], low: int, high: int) -> list[int]:
        """Return up to two positions between one that fits and one that does not."""
        if high - low <= 1:
            return []
        sized = self._proposal(sizes[low] if low >= 0 else 0, sizes[high] if high < len(sizes) else None)
        wanted = [bisect_right(sizes, size) - 1 for size in sized] or [(low + high) // 2]
        return sorted({min(max(position, low + 1), high - 1) for position in wanted})

    def _proposal(self, low: int, high: int | None) -> tuple[int, ...]:
        """Return two sizes to estimate between one that fits, or 0, and one that does not, or None; or return none."""
        # The whole global batch is not on the line of the other sizes, see ``largest_micro_batch``.
        whole = None if self.config.train.global_batch_size is None else model_checks.samples_per_worker(self.config)
        on_line = [(size, mib) for size, mib in self._most.items() if size != whole]
        distance = {size: abs(size - low) + abs(size - (low if high is None else high)) for size, _ in on_line}
        known = sorted(sorted(on_line, key=lambda point: distance[point[0]])[:2])
        if len(known) < 2:
            return (1, (high or 2) // 2) if low == 0 else (2 * low, 4 * low)
        line = MemoryLine.through(*known)
        if line.mib_per_sample <= 0:
            return (2 * low, 4 * low) if high is None else ()
        size = line.largest_size(self.memory_mib)
        return size, size + 1


def candidate_overrides(config: Config, largest: LargestMicroBatch | None = None) -> Iterator[tuple[str, ...]]:
    """Yield the overrides of each change, the smallest change first. The training stays the same.

    Only another micro-batch of a model with batch norms is another training. It comes last. If the largest micro-batch
    that fits is not known, half of the micro-batch and one sample are tried.
    """
    train = config.train
    has_all_logits = config.model.traits.is_causal and train.logits == "all" and train.loss == "full"
    logits = ("train.logits=targets",) if has_all_logits else ()
    checkpointing = (
        () if train.activation_checkpointing in (True, "offload") else ("train.activation_checkpointing=true",)
    )
    pair = (*logits, *checkpointing) if logits and checkpointing else ()
    sizes = list(_micro_batch_changes(config, largest))
    same = [] if model_checks.depends_on_micro_batch(config) else sizes
    light = [each for each in (logits, *same, checkpointing) if each]
    yield from light
    if pair:
        yield pair
    strategy = load_strategy(config)
    smaller = strategy.smaller_states(config, workers=config.cluster.world_size)
    if smaller:
        yield smaller
    if not config.offload.enabled:
        yield strategy.offload_overrides(config)
    together = [*light, *([smaller] if smaller else [])]
    merged = tuple({key_of(text): text for change in together for text in change}.values())
    if len(together) > 1 and merged != pair:
        yield merged
    if not same:
        yield from sizes


@dataclass(frozen=True)
class AvoidablePart:
    """A part of the memory that a change of the configuration avoids."""

    part: str  # name in ``Estimate.parts``
    share: float  # of the part, which the change saves about; half of it if the change costs time
    reason: str  # what the part is, as the end of a sentence
    overrides: tuple[str, ...]


LEAST_SAVED = 0.05  # share of the memory from which a change is named


def avoidable_parts(config: Config) -> Iterator[AvoidablePart]:
    """Yield what may be avoided, the part first that is usually the largest. Offloading, which is slow, comes last."""
    train, strategy, workers = config.train, load_strategy(config), config.cluster.world_size
    steps, others = train.gradient_accumulation_steps, 1 - 1 / workers
    is_sharded = strategy.keeps_states_whole(config) is False
    if strategy.accumulates_whole_gradients and is_sharded and steps > 1:
        fixed = train.global_batch_size is not None
        change = f"{MICRO_BATCH}={train.micro_batch * steps}" if fixed else "train.gradient_accumulation_steps=1"
        reason = f"gradients kept whole over {steps} accumulation steps"
        yield AvoidablePart("gradients", others, reason, (change,))
    if config.model.traits.is_causal and train.logits == "all" and train.loss == "full":
        for text in ("train.loss=chunked", "train.logits=targets"):
            yield AvoidablePart("logits", 0.9, "logits of all tokens", (text,))
    if train.activation_checkpointing not in (True, "offload"):
        computes_again = ("train.activation_checkpointing=true",)
        yield AvoidablePart("activations", 0.4, "activations stored for the backward pass", computes_again)
    if not is_sharded and (smaller := strategy.smaller_states(config, workers=workers)):
        yield AvoidablePart("optimizer_states", others, "optimizer states that each worker keeps whole", smaller)
    if not config.offload.enabled and config.cluster.device == "cuda":
        reason = "optimizer states on the GPU, and offloading is slow"
        yield AvoidablePart("optimizer_states", 0.1, reason, strategy.offload_overrides(config))


def largest_avoidable(config: Config, estimate: Estimate) -> list[AvoidablePart]:
    """Return the parts that may be avoided, the one first whose change saves most."""
    total = sum(estimate.parts.values())
    saved = {each: each.share * estimate.parts.get(each.part, 0.0) for each in avoidable_parts(config)}
    large = [each for each, mib in saved.items() if mib >= LEAST_SAVED * total]
    return sorted(large, key=lambda each: saved[each], reverse=True)


def saves_enough(estimate: Estimate, variant: Estimate) -> bool:
    """Return whether a variant needs clearly less memory."""
    needed, left = estimate.required_mib, variant.required_mib
    return needed is not None and left is not None and left <= (1 - LEAST_SAVED) * needed


def _micro_batch_changes(config: Config, largest: LargestMicroBatch | None) -> Iterator[tuple[str, ...]]:
    """Yield other micro-batches, with the accumulation that keeps the global batch."""
    train = config.train
    samples = train.micro_batch * train.gradient_accumulation_steps
    whole = [samples] if load_strategy(config).accumulates_whole_gradients else []
    if largest is None:  # half of the micro-batch and one sample, if the global batch can stay the same
        smaller = [train.micro_batch // 2, 1] if train.micro_batch % 2 == 0 else [1]
    else:
        smaller = [max(model_checks.divisors(samples, largest.size or 1))]
        if train.gradient_accumulation_steps == 1:
            # The first accumulation keeps gradients between micro-batches. Then the size may be too large.
            smaller.append(1)
    for size in dict.fromkeys((*whole, *smaller)):
        if size != train.micro_batch:
            # A global batch size sets the accumulation.
            more = (
                () if train.global_batch_size is not None else (f"train.gradient_accumulation_steps={samples // size}",)
            )
            yield (f"{MICRO_BATCH}={size}", *more)


LARGEST_MICRO_BATCH = 1 << 20
MAX_ROUNDS = 5  # Most rounds of a search. In each, two sizes are estimated at the same time.
MAX_SIZES = 2 * MAX_ROUNDS + 1  # most sizes that a search estimates: those of the rounds, and the whole global batch

EstimateAll = Callable[[Sequence[Config]], Sequence[Estimate | str]]
Compose = Callable[[Sequence[str]], Config | str]
"""Function that returns the configuration of a cell with further overrides, or why it is invalid."""


@dataclass(frozen=True)
class LargestMicroBatch:
    """Result of a search."""

    size: int | None  # the largest micro-batch that fits; None if not even one sample is certain to fit
    is_exact: bool = True  # whether all larger ones are known not to fit
    invalid: str = ""  # why a larger one is invalid; empty if its memory is the limit
    one_may_fit: bool = False  # whether no size is certain to fit, but one sample may

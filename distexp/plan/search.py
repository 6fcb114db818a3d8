"""The largest micro-batch that fits, and the smallest change that makes a training fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from distexp.config import Config
from distexp.config.batch_sizes import depends_on_micro_batch, divisors
from distexp.config.override_text import key_of
from distexp.plan.estimate import Estimate
from distexp.plan.micro_batches import MICRO_BATCH, Compose, EstimateAll, LargestMicroBatch, MicroBatchSizes
from distexp.plan.verdict import FITS, verdict_of
from distexp.strategies.base import load_strategy

ACCUMULATION = "train.gradient_accumulation_steps"


@dataclass(frozen=True)
class ConfigChange:
    """Overrides that make a training smaller, with the estimate for them."""

    overrides: tuple[str, ...]
    estimate: Estimate

    def fits(self, memory_mib: float) -> bool:
        """Return whether the changed training fits."""
        return verdict_of(self.estimate, memory_mib) == FITS


@dataclass(frozen=True)
class Search:
    """Search among variants of one configuration.

    Attributes:
        config: The configuration.
        compose: Composes a variant.
        estimate: Estimates several variants at a time.
        memory_mib: Memory of the GPU.
    """

    config: Config
    compose: Compose
    estimate: EstimateAll
    memory_mib: float

    def largest_micro_batch(self, known: Estimate) -> LargestMicroBatch:
        """Return the largest micro-batch that fits, with the estimate of the configuration at hand."""
        return MicroBatchSizes(self.config, self.compose, self.estimate, self.memory_mib).largest(known)

    def changes(self, largest: LargestMicroBatch) -> list[ConfigChange]:
        """Return the changes that reduce the memory, the smallest change first. Each has its estimate.

        The last one is all of them together, without offloading.

        Args:
            largest: The largest micro-batch that fits.
        """
        return self._estimate(list(candidate_overrides(self.config, largest)))

    def first_change(self, at_a_time: int, has_time: Callable[[], bool]) -> tuple[ConfigChange | None, int]:
        """Return the smallest change that fits, and how many changes there was no time for; None if none fits.

        Args:
            at_a_time: Number of changes to estimate before the next ones. Those after the first that fits are not.
            has_time: Whether there is time for the next ones.
        """
        candidates = list(candidate_overrides(self.config))
        for start in range(0, len(candidates), at_a_time):
            if not has_time():
                return None, len(candidates) - start
            fitting = (change for change in self._estimate(candidates[start : start + at_a_time]) if self._fits(change))
            if (found := next(fitting, None)) is not None:
                return found, 0
        return None, 0

    def variant(self, override: str) -> ConfigChange | None:
        """Return one variant with its estimate; None if it is invalid or cannot be traced."""
        return next(iter(self._estimate([(override,)])), None)

    def _fits(self, change: ConfigChange) -> bool:
        return change.fits(self.memory_mib)

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


def candidate_overrides(config: Config, largest: LargestMicroBatch | None = None) -> Iterator[tuple[str, ...]]:
    """Yield the overrides of each change, the smallest change first. The training stays the same.

    Only another micro-batch of a model with batch norms is another training. It comes last.

    Args:
        config: The configuration.
        largest: The largest micro-batch that fits. Without it, half of the micro-batch and one sample are tried.
    """
    logits, checkpointing = _logits_change(config), _checkpointing_change(config)
    pair = (*logits, *checkpointing) if logits and checkpointing else ()
    sizes = list(_micro_batch_changes(config, largest))
    same = [] if depends_on_micro_batch(config) else sizes
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
    merged = tuple(last_of_each_key([text for change in together for text in change]))
    if len(together) > 1 and merged != pair:
        yield merged
    if not same:
        yield from sizes


def _logits_change(config: Config) -> tuple[str, ...]:
    train = config.train
    is_possible = config.model.task == "causal_lm" and train.logits == "all" and train.loss == "full"
    return ("train.logits=targets",) if is_possible else ()


def _checkpointing_change(config: Config) -> tuple[str, ...]:
    return () if config.train.activation_checkpointing else ("train.activation_checkpointing=true",)


def _micro_batch_changes(config: Config, largest: LargestMicroBatch | None) -> Iterator[tuple[str, ...]]:
    """Yield other micro-batches, with the accumulation that keeps the global batch."""
    train = config.train
    samples = train.micro_batch * train.gradient_accumulation_steps
    whole = [samples] if load_strategy(config).accumulates_whole_gradients else []
    smaller = _half_and_one(train.micro_batch) if largest is None else _fitting_divisors(config, largest)
    for size in dict.fromkeys((*whole, *smaller)):
        if size != train.micro_batch:
            # A global batch size sets the accumulation.
            more = () if train.global_batch_size is not None else (f"{ACCUMULATION}={samples // size}",)
            yield (f"{MICRO_BATCH}={size}", *more)


def _half_and_one(size: int) -> list[int]:
    """Return half of a micro-batch and one sample, if the global batch can stay the same."""
    return [size // 2, 1] if size % 2 == 0 else [1]


def _fitting_divisors(config: Config, largest: LargestMicroBatch) -> list[int]:
    """Return the largest micro-batch that fits and keeps the global batch; also 1 if the run does not accumulate."""
    steps = config.train.gradient_accumulation_steps
    samples = config.train.micro_batch * steps
    size = max(divisors(samples, largest.size or 1))
    # The first accumulation keeps gradients between micro-batches. Then the size may be too large.
    return [size, 1] if steps == 1 else [size]


def last_of_each_key(overrides: Sequence[str]) -> list[str]:
    """Return the overrides without those whose key comes again."""
    return list({key_of(text): text for text in overrides}.values())

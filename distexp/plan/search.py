"""The largest micro-batch that fits, and the smallest change that makes a training fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from distexp.config import Config
from distexp.plan.estimate import Estimate
from distexp.plan.verdict import ERROR_BOUND, FITS, verdict_of

LARGEST_MICRO_BATCH = 1 << 20
MOST_TRIES = 6
MICRO_BATCH = "train.micro_batch_size"
ACCUMULATION = "train.gradient_accumulation_steps"

EstimateAll = Callable[[Sequence[Config]], Sequence[Estimate | str]]
Compose = Callable[[Sequence[str]], Config | None]
"""Function that returns the configuration of a cell with further overrides; None if it is invalid."""


@dataclass(frozen=True)
class Change:
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

    def largest_micro_batch(self, known: Estimate) -> int | None:
        """Return the largest micro-batch that fits; None if not even one sample fits.

        The memory is nearly linear in the micro-batch. So two estimates propose a size, and a further one checks it.

        Args:
            known: Estimate of the configuration.
        """
        first = self.config.train.micro_batch
        needed = {first: known.needed_mib}
        low, high = (first, LARGEST_MICRO_BATCH) if self._fits(known) else (0, first)
        size = 2 * first if low else first // 2
        for _ in range(MOST_TRIES):
            if not low < size < high:
                break
            estimate = self._estimate(size)
            low, high = (size, high) if estimate is not None and self._fits(estimate) else (low, size)
            if estimate is None:
                size = (low + high) // 2
                continue
            needed[size] = estimate.needed_mib
            size = min(self._proposal(needed), high - 1)
        return low or None

    def _fits(self, estimate: Estimate) -> bool:
        return verdict_of(estimate, self.memory_mib) == FITS

    def _proposal(self, needed: dict[int, float | None]) -> int:
        """Return the size at which the line through the two largest known sizes reaches the memory."""
        known = sorted((size, mib) for size, mib in needed.items() if mib is not None)
        (small, less), (large, more) = known[-2:]
        slope = (more - less) / (large - small)
        if slope <= 0:
            return 2 * large
        return int(small + (self.memory_mib / (1 + ERROR_BOUND) - less) / slope)

    def _estimate(self, size: int) -> Estimate | None:
        """Return the estimate for a micro-batch; None if it is invalid, for example more than all samples."""
        config = self.compose([f"{MICRO_BATCH}={size}"])
        if config is None:
            return None
        (outcome,) = self.estimate([config])
        return outcome if isinstance(outcome, Estimate) and outcome.traced else None

    def changes(self) -> list[Change]:
        """Return the changes that reduce the memory, the smallest change first. Each has its estimate.

        The last one is all of them together, without offloading.
        """
        candidates = list(candidate_overrides(self.config))
        composed = [(overrides, config) for overrides in candidates if (config := self.compose(overrides)) is not None]
        outcomes = self.estimate([config for _, config in composed])
        return [
            Change(overrides, outcome)
            for (overrides, _), outcome in zip(composed, outcomes, strict=True)
            if isinstance(outcome, Estimate) and outcome.traced
        ]


def candidate_overrides(config: Config) -> Iterator[tuple[str, ...]]:
    """Yield the overrides of each change, the smallest change first: the training stays the same in all of them."""
    light = list(_light_changes(config))
    yield from light
    sharding = _sharding_change(config)
    if sharding is not None:
        yield sharding
    if not config.offload.enabled:
        yield ("offload=true",) if config.strategy.name in ("fsdp", "deepspeed") else ("zero_stage=2", "offload=true")
    together = [*light, *([sharding] if sharding else [])]
    if len(together) > 1:
        yield tuple(_last_of_each_key([text for change in together for text in change]))


def _light_changes(config: Config) -> Iterator[tuple[str, ...]]:
    """Yield the changes that keep the strategy."""
    train = config.train
    if config.model.task == "causal_lm" and train.logits == "all" and train.loss == "full":
        yield ("train.logits=targets",)
    if train.micro_batch > 1:
        for size in _smaller_sizes(train.micro_batch):
            steps = train.gradient_accumulation_steps * train.micro_batch // size
            yield (f"{MICRO_BATCH}={size}", f"{ACCUMULATION}={steps}")
    if not train.activation_checkpointing:
        yield ("train.activation_checkpointing=true",)


def _smaller_sizes(size: int) -> list[int]:
    """Return half of a micro-batch and one sample, if the global batch can stay the same."""
    return [smaller for smaller in dict.fromkeys((size // 2, 1)) if size % smaller == 0]


def _sharding_change(config: Config) -> tuple[str, ...] | None:
    if config.strategy.name == "deepspeed":
        return ("zero_stage=3",) if (config.deepspeed.zero_stage or 0) < 3 else None
    if config.cluster.world_size == 1 or (config.fsdp.sharding == "full_shard" and config.strategy.name == "fsdp"):
        return None
    return ("sharding=full_shard",)


def _last_of_each_key(overrides: Sequence[str]) -> list[str]:
    return list({text.partition("=")[0]: text for text in overrides}.values())

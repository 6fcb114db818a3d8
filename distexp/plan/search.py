"""The largest micro-batch that fits, and the smallest change that makes a training fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from distexp.config import Config
from distexp.plan.estimate import Estimate
from distexp.plan.micro_batches import MICRO_BATCH, Compose, EstimateAll, LargestMicroBatch, MicroBatchSizes
from distexp.plan.verdict import FITS, verdict_of

ACCUMULATION = "train.gradient_accumulation_steps"


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

    def largest_micro_batch(self, known: Estimate) -> LargestMicroBatch:
        """Return the largest micro-batch that fits, with the estimate of the configuration at hand."""
        return MicroBatchSizes(self.config, self.compose, self.estimate, self.memory_mib).largest(known)

    def changes(self) -> list[Change]:
        """Return the changes that reduce the memory, the smallest change first. Each has its estimate.

        The last one is all of them together, without offloading.
        """
        return self._estimate(list(candidate_overrides(self.config)))

    def first_change(self, at_a_time: int, has_time: Callable[[], bool]) -> tuple[Change | None, int]:
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

    def _fits(self, change: Change) -> bool:
        return change.fits(self.memory_mib)

    def _estimate(self, candidates: Sequence[tuple[str, ...]]) -> list[Change]:
        """Return the changes that are valid and can be traced."""
        found = [(overrides, self.compose(overrides)) for overrides in candidates]
        composed = [(overrides, config) for overrides, config in found if not isinstance(config, str)]
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
        yield tuple(last_of_each_key([text for change in together for text in change]))


def _light_changes(config: Config) -> Iterator[tuple[str, ...]]:
    """Yield the changes that keep the strategy."""
    train = config.train
    if config.model.task == "causal_lm" and train.logits == "all" and train.loss == "full":
        yield ("train.logits=targets",)
    steps = train.gradient_accumulation_steps
    if config.strategy.name == "fsdp" and steps > 1:  # Between micro-batches, FSDP adds up whole gradients.
        more = () if train.global_batch_size is not None else (f"{ACCUMULATION}=1",)
        yield (f"{MICRO_BATCH}={train.micro_batch * steps}", *more)
    if train.micro_batch > 1:
        for size in _smaller_sizes(train.micro_batch):
            steps = train.gradient_accumulation_steps * train.micro_batch // size
            # A global batch size sets the accumulation.
            more = () if train.global_batch_size is not None else (f"{ACCUMULATION}={steps}",)
            yield (f"{MICRO_BATCH}={size}", *more)
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


def last_of_each_key(overrides: Sequence[str]) -> list[str]:
    """Return the overrides without those whose key comes again."""
    return list({text.partition("=")[0]: text for text in overrides}.values())

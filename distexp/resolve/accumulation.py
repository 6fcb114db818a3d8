"""Accumulation: the micro-batches of an optimizer step, computed from ``train.global_batch_size``."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.config import Config
from distexp.config.batch_sizes import searches_micro_batch

OTHER_MICRO_BATCH = ", or another micro-batch size"
"""End of the error about a global batch. A forecast leaves it out, because the profile has one micro-batch size."""


def set_accumulation(config: Config) -> Iterator[str]:
    """Set the accumulation to the global batch size, and yield an error if no whole number fits."""
    train, workers = config.train, config.cluster.world_size
    total = train.global_batch_size
    if searches_micro_batch(config):
        yield from _search_errors(config)
        train.gradient_accumulation_steps = 1  # The workers set it, because it depends on the size that they find.
    elif total is not None:
        per_pass = train.micro_batch * workers
        if total % per_pass:
            yield (
                f"train.global_batch_size={total} is no multiple of train.micro_batch_size={train.micro_batch} x "
                f"{workers} workers = {per_pass}: use {multiples_near(total, per_pass)}{OTHER_MICRO_BATCH}"
            )
        train.gradient_accumulation_steps = max(1, total // per_pass)


def _search_errors(config: Config) -> Iterator[str]:
    train, workers = config.train, config.cluster.world_size
    total = train.global_batch_size
    if total is None:
        yield (
            "train.micro_batch_size=auto needs the samples of an optimizer step: set train.global_batch_size, for "
            f"example to {16 * workers}"
        )
    elif total % workers:
        yield (
            f"train.global_batch_size={total} is no multiple of the {workers} workers: use "
            f"{multiples_near(total, workers)}"
        )
    if config.engine.name != "native":
        yield (
            f"train.micro_batch_size=auto is not supported by engine={config.engine.name}: use engine=native, or a "
            "number"
        )


def multiples_near(total: int, factor: int) -> str:
    """Return the multiples of a factor next to a number, as in ``60 or 72``."""
    below = total // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)

"""The search of ``distexp choose`` on simulated GPUs: regret and cost under noise.

    python -m benchmarks.choose_simulated [REPEATS]

The step times follow runs of an earlier version on one and two H200s: BLOOM-560m, a GPT and a Llama with 1.1 billion
parameters, 64 samples of 512 tokens. Each search has other errors of the forecasts, and
other noise. Nothing is measured, so this shows how the search decides, and not how fast a GPU is.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import exp, log2
from statistics import fmean, quantiles

from benchmarks.choose import Measured, Noise, Replay, SweepCell, replay
from distexp.choose.candidate import CHECKPOINTING, MICRO_BATCH

GLOBAL_BATCH = 64
STEPS = 5
LIMITS_GB = (24.0, 40.0, 80.0, None)
NOISES = (0.0, 0.02, 0.05, 0.1)
START_S, WARM_S = 8.0, 8.0
FORECAST_ERROR = 0.2
"""Standard deviation of the logarithm of forecast / step time of a strategy with some kernels.

A third of it is the deviation between checkpointing and none. A tenth is that of each doubling of the micro-batch.
"""

EXCHANGED = 0.15
"""Time in which the workers of a group exchange a sample, relative to its computation: an assumption."""

BLOCKS_S = 9.0
COMPILE_S = {"single": 60.0, "ddp": 60.0, "fsdp": 10.0, "deepspeed": 5.0}
"""Cold compilation of one shape with ``kernels=fast``, by strategy; with ``train.compile=blocks``, that of a block."""


@dataclass(frozen=True)
class Kernels:
    """Times and sizes of a model with some kernels: milliseconds and MiB, without checkpointing.

    Attributes:
        sample_ms: Computation of a sample.
        micro_batch_ms: Computation of a micro-batch besides.
        launch_ms: Least time of a micro-batch, which launches its kernels.
        sample_mib: Activations and logits of a sample.
        checkpointed_mib: The same with activation checkpointing.
    """

    sample_ms: float
    micro_batch_ms: float
    launch_ms: float
    sample_mib: float
    checkpointed_mib: float


@dataclass(frozen=True)
class Model:
    """A model: its kernels by name, the update in milliseconds, and its states in MiB."""

    name: str
    reference: Kernels
    fast: Kernels
    update_ms: float
    states_mib: float


MODELS = (
    Model("bloom_560m", Kernels(9.2, 8, 55, 2516, 1740), Kernels(1.95, 4, 15, 385, 130), 6, 8600),
    Model("gpt", Kernels(2.0, 1, 9, 416, 300), Kernels(0.75, 1, 4, 105, 30), 5, 5500),
    Model("llama_1b", Kernels(8.5, 6, 50, 1030, 145), Kernels(6.0, 5, 18, 732, 60), 12, 17000),
)

COMMUNICATION = {
    "strategy=single": (0.0, 0.0, 0.0),
    "strategy=ddp": (9.0, 0.0, 0.0),
    "sharding=full_shard": (3.0, 4.0, 12.0),
    "sharding=shard_grad_op": (3.0, 2.0, 10.0),
    "zero_stage=1": (25.0, 0.5, 5.0),
    "zero_stage=2": (25.0, 3.0, 5.0),
    "zero_stage=3": (30.0, 20.0, 60.0),
}
"""By strategy, in milliseconds: exposed per step, exposed per micro-batch, and more launches per micro-batch."""


@dataclass(frozen=True)
class Space:
    """A space of candidates.

    Attributes:
        gpus: Number of workers.
        sizes: Number of micro-batches, the largest ones.
        blocks: Whether all candidates compile their blocks (``train.compile=blocks``).
        degrees: Overrides with which workers share a model, for the strategies that support them.
    """

    gpus: int
    sizes: int
    blocks: bool = False
    degrees: tuple[str, ...] = ()


SPACES = (Space(1, 5, blocks=True), Space(1, 7), Space(2, 6))
WITH_DEGREES = Space(
    4, 6, degrees=("parallel.tensor=2", "parallel.tensor=4", "parallel.context=2", "parallel.context=4")
)
"""Four workers, which may share the model in groups, with ``kernels=reference``. Nothing of it was measured."""
HEADER = (
    *("GPUs", "candidates", "noise of a trial", "mean regret", "95 % of the regrets", "within 5 %"),
    *("mean share", "95 % of the shares", "trials", "out of memory"),
)


def simulated_cell(space: Space, model: Model, seed: int) -> SweepCell:
    """Return the exhaustive sweep of a model, with errors of the forecasts that depend on the seed."""
    errors = random.Random(seed)
    candidates: list[Measured] = []
    of_kernels: dict[tuple[str, ...], float] = {}
    for family in _families(space):
        kernels = tuple(text for text in family if not text.startswith(CHECKPOINTING))
        error = of_kernels.setdefault(kernels, errors.gauss(0, FORECAST_ERROR)) + errors.gauss(0, FORECAST_ERROR / 3)
        slope = errors.gauss(0, FORECAST_ERROR / 10)
        for size in _sizes(GLOBAL_BATCH * _degree(family) // space.gpus, space.sizes):
            step_s, mib = _step_s(model, space.gpus, family, size), _memory_mib(model, space.gpus, family, size)
            forecast = step_s * exp(error + slope * log2(size))
            compiled = BLOCKS_S if space.blocks else COMPILE_S[_strategy(family)] if "kernels=fast" in family else 0.0
            start = START_S + compiled
            candidates.append(
                Measured(
                    [*family, f"{MICRO_BATCH}={size}"], space.gpus, "completed" if mib < 140_000 else "oom_gpu",
                    step_s, GLOBAL_BATCH / step_s, mib, start, mib, forecast,
                )
            )  # fmt: skip
    return SweepCell(model.name, space.gpus, STEPS, candidates, WARM_S)


def _sizes(largest: int, count: int) -> list[int]:
    return [largest >> shift for shift in range(count) if largest >> shift]


def _families(space: Space) -> Iterator[tuple[str, ...]]:
    strategies = [name for name in COMMUNICATION if (name == "strategy=single") == (space.gpus == 1)]
    for name, checkpoints in product(strategies, ((), (f"{CHECKPOINTING}=true",))):
        yield (name, *checkpoints)
        if not space.degrees:
            yield (name, *checkpoints, "kernels=fast")
        for degree in space.degrees if name.startswith(("strategy=ddp", "sharding=")) else ():
            yield (name, *checkpoints, degree)


def _degree(family: tuple[str, ...]) -> int:
    """Return how many workers share a model."""
    return next((int(text.partition("=")[2]) for text in family if text.startswith("parallel.")), 1)


def _strategy(family: tuple[str, ...]) -> str:
    key, _, value = family[0].partition("=")
    return value if key == "strategy" else "fsdp" if key == "sharding" else "deepspeed"


def _step_s(model: Model, gpus: int, family: tuple[str, ...], size: int) -> float:
    kernels = model.fast if "kernels=fast" in family else model.reference
    per_step, per_micro_batch, launches = COMMUNICATION[family[0]] if gpus > 1 else (0.0, 0.0, 0.0)
    recomputed, degree = 1.3 if f"{CHECKPOINTING}=true" in family else 1.0, _degree(family)
    busy = recomputed * (kernels.sample_ms * size + kernels.micro_batch_ms) / degree
    exchanged = 0.0 if degree == 1 else EXCHANGED * recomputed * kernels.sample_ms * size * (degree - 1) / degree
    launches += kernels.launch_ms / 2 if degree > 1 else 0.0
    micro_batch = max(busy, recomputed * kernels.launch_ms + launches) + per_micro_batch + exchanged
    return (GLOBAL_BATCH * degree // gpus // size * micro_batch + per_step + model.update_ms) / 1000


def _memory_mib(model: Model, gpus: int, family: tuple[str, ...], size: int) -> float:
    kernels = model.fast if "kernels=fast" in family else model.reference
    sample = kernels.checkpointed_mib if f"{CHECKPOINTING}=true" in family else kernels.sample_mib
    shards = {"strategy=ddp": 1.0, "zero_stage=1": 0.6, "zero_stage=2": 0.55}.get(family[0], 0.5) if gpus > 1 else 1.0
    cut = _degree(family) if any("parallel.tensor" in text for text in family) else 1
    return model.states_mib * min(shards, 1 / cut) + sample * size / _degree(family)


@dataclass(frozen=True)
class Summary:
    """Replays of one kind: mean and worst values."""

    regret: float
    regret_95: float
    within: float
    share: float
    share_95: float
    trials: float
    out_of_memory: float


def summarize(found: list[Replay]) -> Summary:
    """Return the means and the 95 % quantiles of some replays."""
    regrets, shares = [each.regret for each in found], [each.share for each in found]
    return Summary(
        fmean(regrets),
        quantiles(regrets, n=20)[-1],
        sum(regret <= 0.05 for regret in regrets) / len(found),
        fmean(shares),
        quantiles(shares, n=20)[-1],
        fmean(each.trials for each in found),
        sum(each.out_of_memory for each in found) / sum(each.trials for each in found),
    )


def replays(space: Space, model: Model, limit: float | None, noise: float, repeats: int) -> list[Replay]:
    """Return searches of one cell, each with another seed."""
    found = (replay(simulated_cell(space, model, seed), limit, Noise(noise, seed)) for seed in range(repeats))
    return [each for each in found if each is not None]


LONG_ROWS = Model("llama_1b_long", Kernels(272, 6, 50, 33000, 4640), Kernels(192, 5, 18, 23400, 1920), 12, 17000)
"""The Llama with rows of 16,384 tokens: 32 times the work and the activations. It needs a degree, or checkpointing."""


def main(arguments: list[str]) -> None:
    """Print a row for each space and noise, over all models and limits."""
    repeats = int(arguments[0]) if arguments else 20
    print(f"| {' | '.join(HEADER)} |")
    print("| " + " | ".join("---:" for _ in HEADER) + " |")
    for space, noise in product((*SPACES, WITH_DEGREES), NOISES):
        cells = product(MODELS, LIMITS_GB) if space in SPACES else product((MODELS[1], LONG_ROWS), LIMITS_GB[:3])
        found = summarize([each for cell in cells for each in replays(space, *cell, noise, repeats)])
        count = len(simulated_cell(space, MODELS[0], 0).candidates)
        values = (
            *(f"{space.gpus}", f"{count}", f"{noise:.0%}", f"{found.regret:.1%}", f"{found.regret_95:.1%}"),
            *(f"{found.within:.0%}", f"{found.share:.1%}", f"{found.share_95:.1%}", f"{found.trials:.1f}"),
            f"{found.out_of_memory:.1%}",
        )
        print(f"| {' | '.join(values)} |")


if __name__ == "__main__":
    main(sys.argv[1:])

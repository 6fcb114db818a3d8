"""What turns a model into a trained one: our loop, or a trainer of another library.

Like a strategy, an engine of the group ``engine`` decides before anything runs, and imports torch only
inside ``train``. A new one is one file here and one YAML in conf/engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.runs.record import Built
from distexp.strategies.base import EvaluableModel

if TYPE_CHECKING:
    from distexp.data.shards import ShardedLoader
    from distexp.models.blueprint import Blueprint
    from distexp.training.metrics_logger import MetricsLogger, Plan


ModelFactory = Callable[[], "Blueprint"]


@dataclass(frozen=True)
class TrainingInputs:
    """What is to be done with a model, and where it is told."""

    training: ShardedLoader
    evaluation: ShardedLoader
    plan: Plan
    logger: MetricsLogger
    run_id: str  # of the run that the checkpoints belong to


class Trainer(Protocol):
    """Distributes a model as the strategy says, and trains it."""

    def validate(self, config: Config) -> list[str]:
        """A sentence for each thing that this engine cannot do as asked; the configuration is complete."""

    def train(
        self, build: ModelFactory, config: Config, context: Context, inputs: TrainingInputs
    ) -> tuple[EvaluableModel, Built]:
        """Trains to the end of the plan; the model as it was distributed, and what that really was.

        The model's blueprint is to be let go once it is built: rank 0's holds all weights in the host's memory.

        Stops by ``check_built`` before the first step where it is not what the strategy expects.
        """


def check_built(built: Built, expected: Mapping[str, Any]) -> None:
    """Stops a run that would measure something else than it was asked to."""
    wrong = [
        f"{name} is {getattr(built, name)!r}, not {value!r}"
        for name, value in expected.items()
        if getattr(built, name) != value
    ]
    if wrong:
        raise RuntimeError("what was built is not what was asked for: " + "; ".join(wrong))

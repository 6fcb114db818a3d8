"""The base class of all strategies, and the protocols of a distributed model.

The launcher has no torch, so a strategy imports torch only inside ``setup``, which a worker calls. The training loop
uses only the DistributedModel that it returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from omegaconf import OmegaConf

from distexp.config import Config, ConfigError
from distexp.config.custom_code import PAGE, check_not_abstract, locate, shorten_errors
from distexp.config.keys import conf_dir, options_of
from distexp.config.model_checks import several_lengths
from distexp.runs.record_sections import Built, StrategyTraits
from distexp.strategies.traits import Settings, Traits, setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from distexp.data.base import Batch
    from distexp.distributed.context import Context
    from distexp.models.blueprint import Blueprint


class EvaluableModel(Protocol):
    """A model on its devices: it can be evaluated, exported and described."""

    @property
    def module(self) -> nn.Module:
        """Return the module to call; its ``train`` and ``eval`` switch the mode."""

    def forward(self, batch: Batch) -> Any:
        """Return the model's outputs, without gradients, in the precision of the training."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and full value of each parameter and buffer, one at a time.

        A collective: all ranks must consume all values. The values are on this rank's device. The names are those of
        the model before it was distributed.
        """

    def describe(self) -> Built:
        """Return what was built, read from the live objects."""


class DistributedModel(EvaluableModel, Protocol):
    """A model that the native training loop can train."""

    def forward_backward(self, batch: Batch, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        """Run one micro-batch, accumulate its gradients, return its part of the step's mean loss and accuracy.

        The part is ``partial_metrics`` of ``distexp.models.objective``. ``normalizer`` is the number of targets of the
        step, over all ranks and micro-batches. Dividing by it gives every target the same weight, as on one worker.
        """

    def step(self, learning_rate: float) -> Tensor:
        """Clip the gradients, update the weights, clear the gradients; return the global norm before clipping."""

    @property
    def checkpoint_format(self) -> str:
        """Return the checkpoint format. A checkpoint loads only into a model with an equal value."""

    def save(self, folder: Path) -> None:
        """Write weights, optimizer state and loss scale into a new folder; a collective."""

    def load(self, folder: Path) -> None:
        """Read what a model with the same ``checkpoint_format`` saved, except its hyperparameters; a collective."""


COMMUNICATION = "communication"
"""The requirement of a strategy that runs several workers."""


class Strategy(Traits, ABC):
    """A way to distribute the training."""

    requires: ClassVar[tuple[str, ...]] = (COMMUNICATION,)  # what must work: COMMUNICATION, and names of libraries
    compile_scopes: ClassVar[tuple[str, ...]] = ("blocks",)  # supported values of ``train.compile``
    casts_once_per_step: ClassVar[bool] = False  # whether ``train.compute_weights=step`` is supported
    fuses_update: ClassVar[bool] = False  # whether ``train.fused_update`` is supported
    keeps_channels_last: ClassVar[bool] = False  # whether ``train.channels_last`` is supported
    gives_whole_matrices: ClassVar[bool] = False  # whether ``train.optimizer=muon`` is supported
    supports_low_bits: ClassVar[bool] = False  # whether ``train.optimizer=adamw8bit``, ``precision=float8`` work
    fixes_accumulation: ClassVar[bool] = False  # whether ``setup`` fixes the number of micro-batches per step
    hf_adapter: ClassVar[str | None] = None  # dotted name of the HFAdapter class for ``engine=hf_trainer``

    @classmethod
    def own_hf_adapter(cls) -> str | None:
        """Return ``hf_adapter`` if this class itself sets it. A subclass may distribute the model in another way."""
        return vars(cls).get("hf_adapter")

    def casts_weights(self, config: Config) -> bool:
        """Return whether its wrapper casts the weights to 16 bits, in place of autocast or copies."""
        return False

    def set_defaults(self, config: Config) -> None:
        """Set the options of this strategy that the user left open."""

    def fast_values(self, config: Config) -> Mapping[str, Any]:
        """Return the values of ``kernels=fast`` for keys that the user left open: ``{"train.compile": "blocks"}``."""
        return {}

    def validate(self, config: Config) -> list[str]:
        """Return a message for each setting that this strategy does not support."""
        return []

    def hf_errors(self, config: Config) -> list[str]:
        """Return a message for each setting that ``engine=hf_trainer`` does not support."""
        return []

    def main_option(self, config: Config) -> str:
        """Return the main option, for example ``full_shard``; empty if there is none."""
        return ""

    def label(self, config: Config) -> str:
        """Return the strategy with its main option, for example ``fsdp full_shard``."""
        return f"{config.strategy.name} {self.main_option(config)}".rstrip()

    def shards_all_parameters(self, config: Config) -> bool:
        """Return whether each worker holds an equal share of the parameters."""
        return False

    def operators(self, config: Config) -> tuple[str, ...]:
        """Return the C++ operators of DeepSpeed to compile before the workers start."""
        return ()

    def smaller_states(self, config: Config, *, workers: int) -> tuple[str, ...]:
        """Return overrides with which each of some workers keeps less of the model states; empty if there are none."""
        return _shipped_overrides("smallest_states") if workers > 1 else ()

    def offload_overrides(self, config: Config) -> tuple[str, ...]:
        """Return the overrides that offload states, with another strategy if this one cannot."""
        return (*(() if self.supports_offload(config) else _shipped_overrides("offload_with")), "offload=true")

    def report_traits(self, config: Config) -> StrategyTraits:
        """Return what the report needs to know, for the record. The report itself imports no strategy."""
        return StrategyTraits(
            label=self.label(config),
            one_worker=COMMUNICATION not in self.requires,
            keeps_states_whole=self.keeps_states_whole(config),
            memory_note=self.memory_note(config),
            setup_note=self.setup_note,
        )

    @abstractmethod
    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Return the fields of Built that ``setup`` must produce, else the run stops."""

    @abstractmethod
    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> DistributedModel:
        """Initialize the model on its device, distribute it and build its optimizer."""


def load_strategy(config: Config) -> Strategy:
    """Return the strategy of a configuration. Raise ConfigError if the class is none, or lacks a method."""
    return _make_strategy(config.strategy._target_)


def _make_strategy(target: str) -> Strategy:
    kind = locate(target)
    check_not_abstract(kind, Strategy, f"strategy._target_={target}")
    with shorten_errors(target, "the constructor"):
        strategy = kind()
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"strategy._target_={target} is not a strategy: derive the class from distexp.strategies.base.Strategy, "
            f"as in {PAGE}"
        )
    return strategy


def recorded_strategy(config: Settings, trusted: Sequence[str] = ()) -> Strategy | None:
    """Return the strategy of a record's configuration; None for a custom one that is not trusted.

    A record may come from somebody else, so no code is imported because a record names it. Raise ConfigError if a class
    of a trusted package is not a Strategy, or cannot be imported.
    """
    name, target = setting(config, "strategy.name"), setting(config, "strategy._target_")
    for shipped_name, kind in shipped_strategies().items():
        if target == f"{kind.__module__}.{kind.__qualname__}" or (not target and name == shipped_name):
            return kind()
    if isinstance(target, str) and target.split(".", 1)[0] in trusted:
        return _make_strategy(target)
    return None


def reference_name() -> str:
    """Return the name of the strategy with whose losses the others are compared."""
    return next(name for name, kind in shipped_strategies().items() if kind.is_reference)


@lru_cache(maxsize=1)
def shipped_strategies() -> Mapping[str, type[Strategy]]:
    """Return the class of each option of the config group ``strategy`` by name, the simplest one first."""
    folder = conf_dir() / "strategy"
    options = [OmegaConf.load(folder / f"{name}.yaml") for name in options_of("strategy")]
    found: dict[str, type[Strategy]] = {option.name: locate(option._target_) for option in options}
    return dict(sorted(found.items(), key=lambda item: item[1].complexity))


def _shipped_overrides(trait: str) -> tuple[str, ...]:
    return tuple(filter(None, (getattr(kind, trait) for kind in shipped_strategies().values())))


FUSED_ADAMW = "FusedAdamW"
"""Class of the optimizer of ``train.fused_update``, as in ``built.optimizer`` of a record."""

FAST_BUCKET_MB = 250.0
"""Size of DDP's buckets if the model is compiled. Dynamo splits the graph at the ends of the buckets: large ones make
few graphs. With the default of 25 MB, each block of BLOOM-560m would be a graph."""


TRANSFORMERS = "distexp.models.hf."
"""Module of the models of transformers, whose code distexp does not know."""


def whole_model_values(config: Config) -> dict[str, Any]:
    """Return the fast values of a strategy that runs the whole model on each worker, and fuses the update."""
    values: dict[str, Any] = {}
    native = config.engine.name == "native"
    if native and config.precision.outside_products == "bf16":
        values["train.compute_weights"] = "step"
    if native and config.model.traits.is_image and config.cluster.device == "cuda":
        values["train.channels_last"] = True
    if config.cluster.device == "cuda":  # A CPU compiles for minutes and gains little.
        # Many models of transformers are no single graph, or compile for minutes, and gain at most 4 % (OPT 1.3B).
        whole = native and not several_lengths(config.dataset) and not config.model._target_.startswith(TRANSFORMERS)
        values["train.compile"] = "model" if whole else "blocks"
    if native and fused_update_error(config) is None:
        values["train.fused_update"] = True
    return values


def fused_update_error(config: Config) -> str | None:
    """Return why ``train.fused_update`` is not possible with this device, optimizer and precision; None if it is."""
    if config.cluster.device != "cuda":
        return f"needs a GPU, but this run is on {config.cluster.device}: leave it out"
    if config.train.optimizer != "adamw":
        return f"is for train.optimizer=adamw, but this run has train.optimizer={config.train.optimizer}: leave it out"
    if config.precision.name == "fp16":
        return "is for precision=fp32 and bf16, but this run has precision=fp16: use precision=bf16, or leave it out"
    return None


def block_values(config: Config) -> dict[str, Any]:
    """Return the fast values of a strategy that gathers the parameters of each block."""
    return {"train.compile": "blocks"} if config.cluster.device == "cuda" else {}


def strategy_label(config: Config) -> str:
    """Return the strategy with its main option: ``fsdp full_shard, offloaded``."""
    name = load_strategy(config).label(config)
    return f"{name}, offloaded" if config.offload.enabled else name

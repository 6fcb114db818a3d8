"""What a strategy states about its options and its step: forecasts and searches ask it, and know no strategy by name.

``Strategy`` inherits all of it. The defaults are for a custom strategy that states nothing: it is tried as one
choice, and is taken to reduce its gradients once per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from distexp.config import Config
from distexp.runs.record_sections import Built
from distexp.strategies.step_collectives import StepCommunication

Settings = Config | Mapping[str, Any]
"""A resolved configuration, or that of a record."""

CUSTOM_COMPLEXITY = 4
"""Complexity of a strategy that states none. Those of distexp have 0 to 3."""


def setting(config: Settings, key: str) -> Any:
    """Return a value such as ``fsdp.sharding`` of a configuration, or of that of a record; None if it lacks the key."""
    found: Any = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
    return found


@dataclass(frozen=True)
class Option:
    """A value of the main option of a strategy, which a search tries by default.

    Attributes:
        value: Option of the config group.
        lighter: Override that chooses what needs less memory. If that does not fit, neither does this; empty: none.
        offloads: Whether it is tried with offloading too.
        needs_nodes: Whether it equals another option on a single node.
    """

    value: str
    lighter: str = ""
    offloads: bool = False
    needs_nodes: bool = False


class StepTraits:
    """What forecasts and searches ask a strategy.

    Attributes:
        is_reference: Whether the losses of the others are compared with those of this strategy.
        complexity: Number that is smaller for a simpler strategy, which a search prefers among equal ones.
        max_workers: Most workers; None for any number.
        section: Section of the schema with its options.
        option_group: Config group of its main option. An override of this group chooses the strategy too.
        option_key: Key that this group sets.
        options: Values of the main option to try.
        lighter: For a strategy without such a group, the override that chooses what needs less memory, as in Option.
    """

    is_reference: ClassVar[bool] = False
    complexity: ClassVar[int] = CUSTOM_COMPLEXITY
    max_workers: ClassVar[int | None] = None
    section: ClassVar[str] = ""
    option_group: ClassVar[str] = ""
    option_key: ClassVar[str] = ""
    options: ClassVar[tuple[Option, ...]] = ()
    lighter: ClassVar[str] = ""

    @classmethod
    def own_complexity(cls) -> int:
        """Return ``complexity`` if this class itself sets it. A subclass is less simple than its base class."""
        return int(vars(cls).get("complexity", CUSTOM_COMPLEXITY))

    @classmethod
    def equals_reference(cls, workers: int) -> bool:
        """Return whether, without offloading, it does what the reference does with this number of workers."""
        return False

    @classmethod
    def lighter_overrides(cls, name: str) -> dict[str, str]:
        """Return the override that needs less memory, by each override that chooses an option of this strategy.

        Args:
            name: Name of the strategy.
        """
        found = {f"{cls.option_group}={option.value}": option.lighter for option in cls.options}
        return {text: lighter for text, lighter in {f"strategy={name}": cls.lighter, **found}.items() if lighter}

    def option_complexity(self, config: Config) -> int:
        """Return a number that is smaller for a simpler value of the main option."""
        return 0

    def launch_factor(self, config: Config) -> float:
        """Return how much longer than the reference the CPU needs to launch an operation."""
        return 1.0

    def overlaps_communication(self, config: Config) -> bool:
        """Return whether collectives run at the same time as the computation."""
        return True

    def communication(self, config: Settings) -> StepCommunication:
        """Return the collectives of a step and the share of the update, for one or more workers."""
        return StepCommunication(**common_values(config))

    def keeps_states_whole(self, config: Settings) -> bool | None:
        """Return whether each worker has all optimizer states, so that it updates all weights; None if unknown."""
        shards = self.communication(config).shards_optimizer
        return None if shards is None else not shards

    def run_communication(self, config: Settings, built: Built | None, run_dir: Path) -> StepCommunication:
        """Return the same for a run that has ended, with what it built.

        Args:
            config: Configuration of the run.
            built: What the run built.
            run_dir: Directory of the run.

        Raises:
            ConfigError: The directory lacks a file that is needed.
        """
        return self.communication(config)


def common_values(config: Settings) -> dict[str, Any]:
    """Return the values of a StepCommunication that gathers weights in the precision and reduces gradients in fp32."""
    half = setting(config, "precision.name") in ("bf16", "fp16")
    return {
        "weight_bytes": 2 if half else 4,
        "gradient_bytes": 4,
        "offloads": bool(setting(config, "offload.enabled")),
    }

"""Settings of a search, and checks of the command line that starts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from distexp.choose.candidate import Objective
from distexp.config import Config, ConfigError
from distexp.config.choose_section import ChooseConfig
from distexp.config.override_text import sets_key
from distexp.launch.cell import Cell
from distexp.measure.energy.cpu_reader import POWERCAP, can_read_energy
from distexp.resolve.resources import launcher_traits

BATCH = "train.global_batch_size"
ACCUMULATION = "train.gradient_accumulation_steps"
BATCH_LIMITS = ("scale.micro_batch_size", "scale.gradient_accumulation_steps")
"""Limits of a scale that would give candidates with other micro-batches another global batch."""
OWN_KEYS = ("choose.", "hydra.", "sweep.")
DRY_RUN = "choose.dry_run=true"
"""Override of a dry run for the GPUs of another machine. Without it, this machine must have as many GPUs."""

SECONDS_PER_MINUTE = 60.0


@dataclass(frozen=True)
class Settings:
    """What to search for.

    Attributes:
        section: Section ``choose`` of the configuration.
        command: Overrides of the command without those of the search.
        notes: What the user should know before the search.
    """

    section: ChooseConfig
    command: list[str]
    notes: list[str]

    @property
    def objective(self) -> Objective:
        """Return the objective."""
        return Objective(self.section.objective)

    @property
    def as_json(self) -> bool:
        """Return whether stdout gets JSON only."""
        return self.section.output == "json"

    def budget_gpu_s(self, workers: int) -> float:
        """Return the GPU time of the trials.

        Args:
            workers: Most workers of a candidate.
        """
        return self.section.budget_min * SECONDS_PER_MINUTE * workers


def read_settings(cells: Sequence[Cell], master: DictConfig) -> Settings:
    """Return the settings of a command.

    Raises:
        ConfigError: the command has several cells, or its objective or directory is impossible.
    """
    if len(cells) != 1:
        raise ConfigError(
            f"distexp choose is for one training, and these arguments have {len(cells)} cells: leave out presets with "
            "a sweep, swept values and repeats. To try several values of a key, use choose.space"
        )
    cell = cells[0]
    section = OmegaConf.to_object(cell.composed.choose)
    assert isinstance(section, ChooseConfig)
    config = cell.config or cell.decided
    if error := "" if config is None else _unmeasured_on_cpus(section, config):
        raise ConfigError(error)
    if errors := _errors(section, cell, master):
        raise ConfigError(errors)
    command = [text for text in cell.overrides if not text.startswith(OWN_KEYS)]
    if section.dry_run and _names_gpu(cell):
        command.append(DRY_RUN)
    return Settings(section, command, []) if config is None else _with_fixed_batch(section, command, config)


def _unmeasured_on_cpus(section: ChooseConfig, config: Config) -> str:
    """Return why no run on the CPUs of this machine has the metric of the objective; empty if it may have it."""
    if config.cluster.device != "cpu":
        return ""
    if section.objective == Objective.COST:
        return "choose.objective=cost needs GPUs, because a run on CPUs has no price: use throughput"
    if section.objective == Objective.ENERGY and launcher_traits(config).runs_here and not can_read_energy():
        return f"choose.objective=energy: the energy of these CPUs cannot be read (RAPL, {POWERCAP}): use throughput"
    return ""


def _with_fixed_batch(section: ChooseConfig, command: list[str], config: Config) -> Settings:
    """Return the settings of a command whose global batch is the same for all candidates."""
    notes = []
    if not sets_key(command, BATCH) and config.train.global_batch_size is None:
        samples = global_batch(config)
        command = [*(text for text in command if not sets_key([text], ACCUMULATION)), f"{BATCH}={samples}"]
        notes.append(f"the global batch is {samples} samples, from these arguments: set {BATCH} for another one")
    if config.scale.name != "full":
        command = _without_batch_limits(command, config)
    return Settings(section, command, notes)


def _without_batch_limits(command: Sequence[str], config: Config) -> list[str]:
    """Return a command of a shrunk training whose global batch is the same for all micro-batches."""
    kept = [text for text in command if not any(sets_key([text], key) for key in BATCH_LIMITS)]
    batch = [] if sets_key(kept, BATCH) else [f"{BATCH}={config.train.global_batch_size}"]
    return [*kept, *batch, *(f"{key}=null" for key in BATCH_LIMITS)]


def global_batch(config: Config) -> int:
    """Return the samples of an optimizer step.

    Raises:
        ConfigError: the micro-batch is searched by the workers.
    """
    train = config.train
    if isinstance(train.micro_batch_size, str):
        raise ConfigError(f"distexp choose needs the samples of an optimizer step: set {BATCH}=64, for example")
    return train.micro_batch_size * train.gradient_accumulation_steps * config.cluster.world_size


def _errors(section: ChooseConfig, cell: Cell, master: DictConfig) -> list[str]:
    """Return the errors of the section ``choose``, and of settings that a search does not support."""
    # A search ignores other errors, because a candidate may be valid.
    found = [error for error in cell.errors if error.startswith("choose.")]
    if found:
        return found
    sweep = OmegaConf.to_container(master.hydra.sweep)
    if isinstance(sweep, dict) and sweep["subdir"] == ".":
        found.append("hydra.run.dir is for a single run, and choose starts several: use hydra.sweep.dir")
    cluster = cell.composed.cluster
    if section.objective == Objective.COST and not cluster.price_per_gpu_hour:
        found.append("choose.objective=cost needs a price: set cluster.price_per_gpu_hour=2.5, for example")
    if not cluster.wait:
        found.append("cluster.wait=false: choose decides by the results of its trials, so it waits: leave it out")
    if cluster.dry_run:
        found.append("cluster.dry_run=true prints sbatch files: use choose.dry_run=true")
    return found


def _names_gpu(cell: Cell) -> bool:
    """Return whether a command names the GPU or its memory."""
    plan = cell.composed.plan
    return plan.gpu is not None or plan.gpu_memory_gb is not None

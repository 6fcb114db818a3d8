"""Hydra's door to the local launcher: everything behind it is in ``distexp.launch.local.sweep``."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LocalLauncher(Launcher):
    """Runs the cells of a sweep one after the other on this machine."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before ``launch``."""
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Composes, judges and runs all cells."""
        from distexp.launch.local.sweep import run_sweep

        return run_sweep(self.hydra_context, self.config, job_overrides)


ConfigStore.instance().store(
    group="hydra/launcher",
    name="distexp_local",
    node={"_target_": f"{__name__}.LocalLauncher"},
    provider="distexp",
)

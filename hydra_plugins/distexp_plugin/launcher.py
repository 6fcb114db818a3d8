"""Hydra launcher plugin for this machine; delegates to ``distexp.launch.local``."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LocalLauncher(Launcher):
    """Launcher that runs the cells of a sweep one after another on this machine."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the context and the configuration that Hydra passes before ``launch``."""
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose, check and run all cells."""
        from distexp.launch.local.sweep import run_sweep

        return run_sweep(self.hydra_context, self.config, job_overrides)


ConfigStore.instance().store(
    group="hydra/launcher",
    name="distexp_local",
    node={"_target_": f"{__name__}.LocalLauncher"},
    provider="distexp",
)

"""Hydra launcher plugin. It passes the cells to the command that was typed, and this to the launcher of ``cluster``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class DistexpLauncher(Launcher):
    """The only launcher that Hydra knows. ``cluster._target_`` names the one that starts runs."""

    def __init__(self, **options: Any) -> None:
        """Keep the options under ``hydra.launcher`` that are set."""
        self.options = {key: value for key, value in options.items() if value not in (None, {}, [])}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the context and the configuration that Hydra passes before ``launch``."""
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the command with these cells."""
        from distexp.cli.dispatch import run_cells

        return run_cells(self.hydra_context, self.config, job_overrides, self.options)


SUBMITIT_KEYS = (
    "submitit_folder",
    "timeout_min",
    "cpus_per_task",
    "gpus_per_node",
    "tasks_per_node",
    "mem_gb",
    "nodes",
    "name",
    "stderr_to_stdout",
    "partition",
    "qos",
    "comment",
    "constraint",
    "exclude",
    "gres",
    "cpus_per_gpu",
    "gpus_per_task",
    "mem_per_gpu",
    "mem_per_cpu",
    "account",
    "signal_delay_s",
    "max_num_timeout",
    "additional_parameters",
    "array_parallelism",
    "setup",
)
"""Keys of Hydra's submitit launcher. They are null by default, because ``cluster`` has the same settings."""

OPTIONS: dict[str, tuple[str, ...]] = {"distexp_local": (), "distexp_slurm": SUBMITIT_KEYS}
"""Keys under ``hydra.launcher``, by the option of ``hydra/launcher``."""

for name, keys in OPTIONS.items():
    ConfigStore.instance().store(
        group="hydra/launcher",
        name=name,
        node={"_target_": f"{__name__}.DistexpLauncher", **dict.fromkeys(keys)},
        provider="distexp",
    )

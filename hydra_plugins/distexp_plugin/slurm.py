"""Hydra launcher plugin for Slurm; delegates to ``distexp.launch.slurm``."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher as SubmititLauncher


class SlurmLauncher(SubmititLauncher):  # type: ignore[misc]
    """Launcher that submits job arrays: one for all cells with the same resources."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose, check and submit all cells."""
        from distexp.launch.slurm.launcher import run_sweep

        options = {key: value for key, value in self.params.items() if value not in (None, {}, [])}
        return run_sweep(self.hydra_context, self.config, job_overrides, options)


KEYS = (
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

ConfigStore.instance().store(
    group="hydra/launcher",
    name="distexp_slurm",
    node={"_target_": f"{__name__}.SlurmLauncher", **dict.fromkeys(KEYS)},
    provider="distexp",
)

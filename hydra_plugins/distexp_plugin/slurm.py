"""Hydra's door to Slurm: everything behind it is in ``distexp.launch.slurm``."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher as SubmititLauncher


class SlurmLauncher(SubmititLauncher):  # type: ignore[misc]
    """Submits the cells of a sweep, an array for each shape, and may follow them."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Composes, judges and submits all cells."""
        from distexp.launch.slurm.launcher import run_sweep

        given = {key: value for key, value in self.params.items() if value not in (None, {}, [])}
        return run_sweep(self.hydra_context, self.config, job_overrides, given)


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
"""The keys of Hydra's submitit launcher. None is set: ``cluster`` says the same, and a contradiction is refused."""

ConfigStore.instance().store(
    group="hydra/launcher",
    name="distexp_slurm",
    node={"_target_": f"{__name__}.SlurmLauncher", **dict.fromkeys(KEYS)},
    provider="distexp",
)

"""The section of the schema with the start of a run and its resources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distexp.config.field_info import key


def sbatch_name(option: object) -> str:
    """Return the name of an option of sbatch, which users write as ``--cpus-per-gpu`` or ``cpus_per_gpu`` too."""
    return str(option).lstrip("-").replace("_", "-")


@dataclass
class ClusterConfig:
    """Where a run starts, and its resources. Some keys are for Slurm only."""

    name: str = key("local", "Name of the cluster.")
    _target_: str = key(
        "distexp.launch.local.launcher.LocalLauncher", "Launcher: what starts the runs. Set by `cluster=`."
    )
    nodes: int = key(1, "Nodes. On one machine more than one are simulated.", at_least=1)
    workers_per_node: int | None = key(
        None, "Workers per node.", at_least=1, null="one per GPU, or 2 without GPUs (1 on Slurm)"
    )
    device: str = key("auto", "Device of the workers. `auto` is cuda on Slurm.", choices=("auto", "cuda", "cpu"))
    cpus_per_worker: int | None = key(
        None, "CPU threads of each worker.", at_least=1, null="an equal share of the cores, or 4 on Slurm"
    )
    timeout_min: float | None = key(
        None, "Time limit of a run.", unit="minutes", above=0, null="none, or the limit of the Slurm partition"
    )
    hang_timeout_min: float = key(
        30.0, "Time without progress after which a run counts as hung.", unit="minutes", above=0
    )
    debug: bool = key(False, "Enable the debug logs of NCCL and torch.distributed.")
    environment: dict[str, str] = key({}, "Environment variables of the workers only, for example `NCCL_*`.")
    gpus_per_node: int | None = key(
        None, "GPUs of each node.", at_least=0, null="one per worker on cuda, none on cpu", slurm_only=True
    )
    gpu_memory_limit_gb: float | None = key(
        None, "Memory that a worker may use on its GPU, to try a smaller one, in GB of 2**30 bytes.", above=0,
        null="all",
    )  # fmt: skip
    memory_gb: float | None = key(
        None, "Memory of each node.", unit="GB", above=0, slurm_only=True,
        null="the default of the cluster, or all memory with `exclusive`",
    )  # fmt: skip
    partition: str | None = key(None, "Partition.", slurm_only=True)
    constraint: str | None = key(None, "Required node features.", slurm_only=True)
    account: str | None = key(None, "Account to charge.", slurm_only=True)
    qos: str | None = key(None, "Quality of service.", slurm_only=True)
    reservation: str | None = key(None, "Reservation.", slurm_only=True)
    exclusive: bool = key(False, "Allocate whole nodes.", slurm_only=True)
    sbatch: dict[str, Any] = key({}, "More options of sbatch, as `{mail-type: END}`.", slurm_only=True)
    srun: list[str] = key([], "More options of srun, as `[--cpu-bind=none]`.", slurm_only=True)
    signal_delay_s: int = key(
        120, "Time before the time limit at which a run is asked to stop.", unit="seconds", at_least=0
    )
    requeue: bool = key(True, "Let Slurm requeue a run after a node failure or a preemption.")
    modules: list[str] = key([], "Modules to load in the job.", slurm_only=True)
    setup: list[str] = key([], "Shell lines to run in the job, after the modules.", slurm_only=True)
    python: str | None = key(
        None, "Python command of the jobs, possibly in a container.", null="the Python that submits", slurm_only=True
    )
    array_parallelism: int | None = key(
        None, "Most runs of one job array at the same time.", at_least=1, null="no limit", slurm_only=True
    )
    wait: bool = key(True, "Wait for the jobs. False: print the job ids and exit.")
    gco2_per_kwh: float | None = key(
        None, "Carbon intensity of the electricity, for `metrics.energy.co2e_g`.", unit="grams of CO2e per kWh",
        at_least=0, null="no CO2e in record and tables",
    )  # fmt: skip
    price_per_gpu_hour: float | None = key(
        None, "Price of an hour of one GPU, in any currency, for `metrics.energy.price`.", at_least=0,
        null="no price in record and tables",
    )  # fmt: skip
    dry_run: bool = key(False, "Print the sbatch files and submit nothing.", slurm_only=True)

    @property
    def world_size(self) -> int:
        """Workers on all nodes; one on each node while ``workers_per_node`` is still null."""
        return self.nodes * (self.workers_per_node or 1)

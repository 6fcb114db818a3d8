"""The section of the schema with the options of ``distexp plan``, and of the same check before a run."""

from __future__ import annotations

from dataclasses import dataclass

from distexp.config.field_info import key


@dataclass
class PlanConfig:
    """Prediction of memory before a run starts, as by `distexp plan`."""

    name: str = key(
        "warn",
        "`check`: a run that cannot fit is invalid. `warn`: print a warning if the prediction is "
        "cached. `off`: nothing.",
        choices=("check", "warn", "off"),
    )
    gpu: str | None = key(None, "GPU model to predict for, as `a100-80gb`.", null="the GPU of this machine")
    gpu_memory_gb: float | None = key(
        None, "Memory of the GPU to predict for, in GB of 2**30 bytes.", above=0, null="that of the GPU"
    )
    host_memory_gb: float | None = key(
        None,
        "Memory of a node to predict for with `cluster.device=cpu`, in GB of 2**30 bytes.",
        above=0,
        null="`cluster.memory_gb` on Slurm, else the memory of this machine",
    )
    timeout_s: float | None = key(
        900.0,
        "Longest time of a prediction. After it only the model states are computed.",
        unit="seconds",
        above=0,
        null="no limit",
    )
    search_timeout_s: float | None = key(
        30.0,
        "Longest time in which `plan=check` searches for changes that make runs fit. The message states how many were "
        "left out.",
        unit="seconds",
        above=0,
        null="no limit",
    )
    output: str = key("table", "Output of `distexp plan`. Its option `--json` sets it.", choices=("table", "json"))

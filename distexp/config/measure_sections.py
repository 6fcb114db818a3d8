"""The sections of the schema with the measurements of a run, and where a tracker sends them."""

from __future__ import annotations

from dataclasses import dataclass

from distexp.config.field_info import key


@dataclass
class MeasureConfig:
    """Memory and utilization, sampled from outside the workers, and the watch for slow ranks inside of them."""

    enabled: bool = key(True, "Whether to sample.")
    interval_s: float = key(0.5, "Time between two samples.", unit="seconds", above=0)
    slow_ranks: bool = key(
        True,
        "Whether to watch for slow ranks: how long each rank waits for the others in some steps. "
        "If false, no method of torch is replaced.",
    )
    watchers: list[str] = key(
        [], "Custom measurements of the training: classes that extend `Watcher`, from `trusted_packages`."
    )


@dataclass
class TrackerConfig:
    """Experiment tracker. Credentials are read by its library and are never part of a configuration."""

    name: str = key("none", "Name of the tracker.")
    _target_: str | None = key(None, "Class that implements the `Tracker` protocol.", null="no tracker")
    project: str = key("distexp", "Project of wandb, or experiment of MLflow.")
    online: bool = key(False, "wandb: upload while the run trains.")
    uri: str | None = key(None, "MLflow server or store.", null="the folder `mlruns/`")


@dataclass
class PreflightConfig:
    """Communication bandwidth test before training."""

    enabled: bool = key(False, "Whether to run the test.")
    min_busbw_gbps: float | None = key(
        None, "Lowest accepted bus bandwidth of the largest all-reduce.", unit="GB/s", at_least=0,
        null="5 on GPUs, no limit on CPUs",
    )  # fmt: skip
    max_bytes: int | None = key(
        None, "Size of the largest buffer.", unit="bytes", at_least=1024, null="4 GiB on GPUs, 64 MiB on CPUs"
    )
    warmup_rounds: int = key(20, "Rounds before the measured ones.", at_least=0)
    rounds: int = key(50, "Measured rounds. Fewer if one size would take longer than 10 s.", at_least=1)

"""The section of the schema with the options of ``distexp forecast``. A run does not use it."""

from __future__ import annotations

from dataclasses import dataclass

from distexp.config.field_info import key


@dataclass
class ForecastConfig:
    """Forecast of a profiled run on other numbers of GPUs, by `distexp forecast`."""

    memory: str = key(
        "predict",
        "Memory of each size. `predict`: as `distexp plan`, up to 64 workers. `cached`: only predictions of earlier "
        "commands. `off`: none.",
        choices=("predict", "cached", "off"),
    )
    preflight: str | None = key(
        None,
        "Directory of a run with a preflight, whose bandwidths are used.",
        null="the bandwidths of the run, or of the last preflight on this machine",
    )
    network: str | None = key(
        None, "Network between nodes, as `infiniband-ndr-400g`.", null="that of the measured bandwidths"
    )
    rail_optimized: bool | None = key(
        None, "Whether each GPU of a node has its own network adapter.", null="as is usual for the network"
    )
    oversubscription: float = key(1.0, "Bandwidth of all nodes divided by that of the core of the network.", at_least=1)
    only: bool = key(False, "Forecast and do not train. Set by `distexp forecast`.")
    output: str = key("table", "Output of `distexp forecast`. Its option `--json` sets it.", choices=("table", "json"))
    run: str | None = key(None, "Directory of the profiled run. Set by `distexp forecast`.", null="none")

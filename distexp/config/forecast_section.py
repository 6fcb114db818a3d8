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
        None,
        "Network between nodes, as `infiniband-ndr-400g` with one card per worker. The workers of a node share one "
        "`ethernet-10g` card. Measured bandwidths take precedence.",
        null="infiniband-hdr-200g for GPUs, ethernet-10g for CPUs",
    )
    rail_optimized: bool | None = key(
        None, "Whether GPUs of the same index share a switch, up to 32 nodes.", null="true"
    )
    oversubscription: float = key(
        1.0,
        "By how much the upper level of the network is slower than the lower one. With `rail_optimized`, only more "
        "than 32 nodes use the upper level.",
        at_least=1,
    )
    output: str = key("table", "Output of `distexp forecast`. Its option `--json` sets it.", choices=("table", "json"))
    run: str | None = key(None, "Directory of the profiled run. Set by `distexp forecast`.", null="none")

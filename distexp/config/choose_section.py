"""The section of the schema with the settings of ``distexp choose``."""

from __future__ import annotations

from dataclasses import dataclass

from distexp.config.field_info import key

OBJECTIVES = ("throughput", "energy", "cost", "memory")
"""What the best configuration has most or least of."""


@dataclass
class ChooseConfig:
    """Search for the best configuration, as by `distexp choose`. It does not change the training."""

    objective: str = key(
        "throughput",
        "What is best: most samples per second, least energy or price per sample, or lowest peak of GPU memory.",
        choices=OBJECTIVES,
    )
    budget_min: float = key(
        10.0,
        "Time for the trials. GPU time = minutes x the largest number of GPUs of a trial.",
        unit="minutes",
        above=0,
    )
    gpus: list[int] = key([], "Numbers of workers to try, over all nodes. Empty: that of the command.", at_least=1)
    space: list[str] = key(
        [],
        "What to vary: keys with the values to try, as in `['strategy=ddp,fsdp']`. A key without values has the usual "
        "ones, and then only the listed keys vary. Empty: all usual keys.",
    )
    dry_run: bool = key(False, "Print the candidates, the planned trials and their cost. Start nothing.")
    output: str = key("table", "Output of `distexp choose`. Its option `--json` sets it.", choices=("table", "json"))

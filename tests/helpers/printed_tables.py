"""Terminal tables of runs as text, and a sweep to print."""

from __future__ import annotations

import io
import itertools

from rich.console import Console

from distexp.report.overview_table import build_overview_table
from distexp.runs.record import RunRecord
from tests.helpers.records import record


def printed(records: list[RunRecord], width: int = 140) -> str:
    """Return the table of some runs on a terminal with ``width`` characters."""
    console = Console(file=io.StringIO(), width=width)
    console.print(build_overview_table(records))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def header(text: str) -> str:
    """Return the titles of a printed table."""
    return text.split("─", maxsplit=1)[0]


def unwrapped(text: str) -> str:
    """Return a text without line breaks and repeated spaces."""
    return " ".join(text.split())


def zero_sweep() -> list[RunRecord]:
    """Return the records of ZeRO stages 1 to 3, with and without offload."""
    cells = itertools.product((1, 2, 3), (True, False))
    return [
        record(
            number,
            strategy="deepspeed",
            deepspeed__zero_stage=stage,
            offload__enabled=offload,
            speed=100.0 * stage / (1 + offload),
            peak=30000.0 / stage,
            overrides=(f"zero_stage={stage}", f"offload={offload}".lower()),
        )
        for number, (stage, offload) in enumerate(cells)
    ]

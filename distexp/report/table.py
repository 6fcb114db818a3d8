"""The table that compares runs on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from distexp.results import RunRecord


def comparison(records: Sequence[RunRecord]) -> Table:
    """A row a run: what was varied, what became of it, and its figures."""
    table = Table(title=None, header_style="bold")
    for name, justify in (
        ("run", "right"),
        ("overrides", "left"),
        ("status", "left"),
        ("train loss", "right"),
        ("eval loss", "right"),
        ("samples/s", "right"),
        ("runtime s", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for record in records:
        metrics = record.metrics
        table.add_row(
            str(record.run.number),
            " ".join(record.run.overrides),
            record.status,
            _number(metrics.train_loss, "{:.4f}"),
            _number(metrics.eval_loss, "{:.4f}"),
            _number(metrics.train_samples_per_second, "{:,.1f}"),
            _number(metrics.train_runtime, "{:.1f}"),
        )
    return table


def _number(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)

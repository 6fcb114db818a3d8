"""Reasons why runs did not complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distexp.report.data.rows import Row
from distexp.report.data.text import name_runs
from distexp.runs.failure_text import shorten_message
from distexp.runs.out_of_memory import describe_advice, describe_largest, describe_numbers
from distexp.runs.record_sections import RunError

MAX_LENGTH = 300  # characters of a message
MAX_LABELS = 8


def failure_notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield one line for each reason, with the runs that share it."""
    labels: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if not row.completed:
            for reason in failure_reasons(row):
                labels.setdefault((row.record.status, reason), []).append(row.label)
    for (status, reason), found in labels.items():
        yield f"{name_runs(found, MAX_LABELS)} {status}: {reason}"


def failure_reason(row: Row, limit: int = MAX_LENGTH) -> str:
    """Return why a run did not complete, in one line."""
    return "; ".join(failure_reasons(row, limit))


def failure_reasons(row: Row, limit: int = MAX_LENGTH) -> list[str]:
    """Return why a run did not complete; an invalid run may have several reasons."""
    status, error = row.record.status, row.record.error
    if error is None:
        return ["its record has no error message"]
    if status == "invalid":
        return [" ".join(message.split()) for message in error.errors]
    phase = f" in phase {error.phase}" if error.phase else ""
    if status in ("oom_gpu", "oom_host"):
        reason = f"out of {'GPU' if status == 'oom_gpu' else 'host'} memory{phase}{_peak_memory(row)}"
        return [reason if error.memory is None else f"{reason}; {_allocation(error.memory)}"]
    return [f"{error.type}{phase}: {_shorten(error, limit)}"]


def _allocation(memory: Mapping[str, Any]) -> str:
    """Return the allocation that failed, the largest tensors and what would fit."""
    largest, advice = describe_largest(memory), describe_advice(memory)
    texts = [describe_numbers(memory), f"largest: {largest}" if largest else "", f"to fit: {advice}" if advice else ""]
    return "; ".join(filter(None, texts))


def _shorten(error: RunError, limit: int) -> str:
    message = " ".join(shorten_message(error, limit).split())
    return message if len(message) <= limit else message[: limit - 1] + "…"


def _peak_memory(row: Row) -> str:
    if row.record.status == "oom_host":
        peak = row.metrics["cpu_peak_mib"]
        return "" if peak is None else f", at a peak of {peak:,.0f} MiB on a node"
    total = row.record.environment.gpu_total_mib if row.record.environment else None
    of_total = f" of {total:,.0f}" if total else ""
    for name, where in (("gpu_peak_mib", "on a GPU"), ("torch_peak_allocated_mib", "allocated by torch")):
        if (peak := row.metrics[name]) is not None:
            return f", at a peak of {peak:,.0f}{of_total} MiB {where}"
    return ""

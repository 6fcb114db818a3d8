"""Where the numbers come from: machines, versions, code and commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

from distexp.report.data.rows import Row
from distexp.report.data.text_table import TextTable

MOST_COMMANDS = 200
Cells = tuple[str, ...]
VERSIONS = ("python", "torch", "cuda", "nccl", "transformers", "deepspeed")


def provenance(rows: Sequence[Row]) -> Iterator[TextTable]:
    """Tables, each with the runs that its rows hold for."""
    yield _kinds("Machines", ("hosts", "GPU", "GPU memory (MiB)", "CPU cores"), rows, _machine)
    yield _kinds("Versions", VERSIONS, rows, _versions)
    yield _kinds("Code", ("git commit", "changed since"), rows, _code)
    yield commands(rows)


def commands(rows: Sequence[Row]) -> TextTable:
    """What repeats each run."""
    shown = tuple(
        (row.label, command(row), (row.record.run.started_at or "-")[:19].replace("T", " "))
        for row in rows[:MOST_COMMANDS]
    )
    more = len(rows) - MOST_COMMANDS
    note = f"{more} more are in results.csv, column overrides." if more > 0 else ""
    return TextTable("Commands", ("run", "command", "started (UTC)"), shown, note)


def command(row: Row) -> str:
    """The command line of a run by itself."""
    return shlex.join(["python", "-m", "distexp", *row.record.run.overrides])


def _kinds(title: str, header: Cells, rows: Sequence[Row], read: Callable[[Row], Cells]) -> TextTable:
    counts: dict[Cells, list[str]] = {}
    for row in rows:
        counts.setdefault(read(row), []).append(row.label)
    cells = tuple((*kind, _runs(labels, len(rows))) for kind, labels in counts.items())
    return TextTable(title, (*header, "runs"), cells)


def _runs(labels: Sequence[str], total: int) -> str:
    if len(labels) == total:
        return "all"
    return ", ".join(labels[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")


def _machine(row: Row) -> Cells:
    environment = row.record.environment
    hosts = ", ".join(row.record.run.hosts) or (environment.hostname if environment else None) or "-"
    if environment is None:
        return hosts, "-", "-", "-"
    memory = f"{environment.gpu_total_mib:,.0f}" if environment.gpu_total_mib else "-"
    return hosts, environment.gpu_name or "none", memory, str(environment.cpu_count or "-")


def _versions(row: Row) -> Cells:
    environment = row.record.environment
    return tuple(str(getattr(environment, name, None) or "-") for name in VERSIONS)


def _code(row: Row) -> Cells:
    run = row.record.run
    changed = {True: "yes: uncommitted changes", False: "no", None: "unknown"}[run.git_dirty]
    return run.git_sha or "unknown", changed

"""Tables of the machines, versions, git commits and commands of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from distexp.report.data.rows import Row
from distexp.runs.copyable_command import copyable_command
from distexp.runs.listing import join_first
from distexp.tables.text_table import TextTable

MAX_COMMANDS = 200
Cells = tuple[str, ...]
VERSIONS = ("python", "torch", "cuda", "nccl", "transformers", "deepspeed")


def provenance_tables(rows: Sequence[Row]) -> Iterator[TextTable]:
    """Yield the tables. The last column of each row lists its runs."""
    yield _count_kinds("Machines", ("hosts", "GPU", "GPU memory (MiB)", "CPU cores"), rows, _machine)
    yield _count_kinds("Versions", VERSIONS, rows, _versions)
    yield _count_kinds("Code", ("git commit", "uncommitted changes"), rows, _code)
    yield command_table(rows)


def command_table(rows: Sequence[Row]) -> TextTable:
    """List the command of each run."""
    shown = tuple(
        (row.label, command(row), (row.record.run.started_at or "-")[:19].replace("T", " "))
        for row in rows[:MAX_COMMANDS]
    )
    more = len(rows) - MAX_COMMANDS
    note = f"{more} more runs are in results.csv, column overrides." if more > 0 else ""
    return TextTable("Commands", ("run", "command", "started (UTC)"), shown, note)


def command(row: Row) -> str:
    """Return the command line that repeats a run."""
    return copyable_command(row.record.run.overrides)


def _count_kinds(title: str, header: Cells, rows: Sequence[Row], read: Callable[[Row], Cells]) -> TextTable:
    counts: dict[Cells, list[str]] = {}
    for row in rows:
        counts.setdefault(read(row), []).append(row.label)
    cells = tuple((*kind, _runs(labels, len(rows))) for kind, labels in counts.items())
    return TextTable(title, (*header, "runs"), cells)


def _runs(labels: Sequence[str], total: int) -> str:
    return "all" if len(labels) == total else join_first(labels)


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
    changed = {True: "yes", False: "no", None: "unknown"}[run.git_dirty]
    return run.git_sha or "unknown", changed

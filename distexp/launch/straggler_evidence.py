"""Stragglers in the record: slow ranks with the evidence of their GPUs, and GPUs with a problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distexp.measure.gpu_evidence import GpuEvidence, read_gpu_evidence
from distexp.measure.memory.summary import run_traces
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import EVENTS
from distexp.runs.spec import RunSpec


def add_evidence(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add what the agents saw to ``metrics.stragglers``. A GPU with a problem is added even if no rank is slow."""
    if spec.config.cluster.device != "cuda" or not spec.config.measure.enabled:
        return
    evidence = read_gpu_evidence(run_traces(directory, spec.nodes), directory / EVENTS, spec.workers_per_node)
    for entry in record.metrics.stragglers or []:
        found = evidence.get(entry["rank"])
        if found is not None:
            entry["gpu"] = found.index
            entry["evidence"] = "; ".join([entry["evidence"], *found.problems, *found.differences])
    named = {entry["rank"] for entry in record.metrics.stragglers or []}
    problems = {rank: found for rank, found in evidence.items() if found.problems and rank not in named}
    if problems:
        entries = [_problem_entry(record, rank, found, spec) for rank, found in sorted(problems.items())]
        record.metrics.stragglers = [*(record.metrics.stragglers or []), *entries]


def _problem_entry(record: RunRecord, rank: int, found: GpuEvidence, spec: RunSpec) -> dict[str, Any]:
    """Return the entry of a rank that is not slow, but whose GPU has a problem."""
    hosts = record.run.hosts
    return {
        "rank": rank,
        "gpu": found.index,
        "host": hosts[rank // spec.workers_per_node] if len(hosts) == spec.nodes else None,
        "slower_by_pct": None,
        "evidence": "; ".join(found.problems),
    }

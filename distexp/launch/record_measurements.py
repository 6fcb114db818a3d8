"""What the agents measured during a run, in its record: memory, utilization, energy, cost and stragglers."""

from __future__ import annotations

import json
from pathlib import Path

from distexp.explain.explanation import explain
from distexp.launch.straggler_evidence import add_evidence
from distexp.measure.energy.cost import energy_entry
from distexp.measure.energy.trace_energy import TraceEnergy, measure_energy
from distexp.measure.memory.summary import run_traces, summarize_run
from distexp.runs.events import last_value
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import EVENTS, PREFLIGHT
from distexp.runs.spec import RunSpec
from distexp.strategies.base import load_strategy


def add_traces(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add the preflight's results, and what the memory traces contain, to a record."""
    if (directory / PREFLIGHT).exists():
        record.preflight = json.loads((directory / PREFLIGHT).read_text())
    if spec.config.measure.enabled:
        summary = summarize_run(directory, spec.nodes)
        record.memory.update(summary.memory)
        record.utilization.update(summary.utilization)
    add_energy(record, spec, directory)
    add_evidence(record, spec, directory)


def add_strategy(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add what the strategy states for the report, if no worker did."""
    record.strategy = record.strategy or load_strategy(spec.config).report_traits(spec.config)


def add_explanation(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add the bottleneck of the profiled step, if there is one, with the advice of the strategy.

    Its advice depends on the measured memory, so call it after ``add_traces``.
    """
    found = explain(record, load_strategy(spec.config)) if record.metrics.step_breakdown else None
    record.metrics.explanation = None if found is None else found.to_json()


def add_energy(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add energy and cost to a record. Without measurement only the GPU-hours and their price are known."""
    traces = run_traces(directory, spec.nodes)
    energy = measure_energy(traces, directory / EVENTS) if spec.config.measure.enabled else TraceEnergy()
    samples = last_value(directory, "measured_samples")
    tokens = last_value(directory, "measured_tokens")
    record.metrics.energy = energy_entry(
        energy, spec.config.cluster, duration_s=record.run.duration_s, samples=samples, tokens=tokens
    )

"""Start and end of a run's attempt: the files that it starts from, and the record that it ends with.

The process that outlives the run calls ``finalize_run``. That is the launcher, or the head's agent if the launcher
has died.
"""

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from distexp.checkpoints.folder import remove_unfinished
from distexp.explain.explanation import explain
from distexp.launch import failures, node_setup
from distexp.measure.memory.sampler import run_traces, summarize_run
from distexp.measure.run_energy import TraceEnergy, energy_entry, measure_energy
from distexp.resolve.run_id import proof_file
from distexp.runs import attempts, events, predictions, step_files, texts
from distexp.runs.number_ranges import range_errors, without_impossible
from distexp.runs.record import RunRecord, RunSpec
from distexp.runs.record_sections import RunError, RunInfo, make_environment
from distexp.runs.run_dir import ALLOCATOR, DISK_RESERVE, EVENTS, PREFLIGHT, RANK_LOG, RECORD, RESULT, SPEC
from distexp.runs.run_state import last_activity
from distexp.strategies.base import load_strategy, recorded_strategy
from distexp.system.environment_variables import select_arithmetic, select_variables


def add_traces(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add the preflight's results to a record, and what the agents measured: memory, energy, cost and stragglers."""
    if (directory / PREFLIGHT).exists():
        record.preflight = json.loads((directory / PREFLIGHT).read_text())
    if spec.config.measure.enabled:
        summary = summarize_run(directory, spec.nodes)
        record.memory.update(summary.memory)
        record.utilization.update(summary.utilization)
    # Without measurement only the GPU-hours and their price are known.
    traces = run_traces(directory, spec.nodes)
    record.metrics.energy = energy_entry(
        measure_energy(traces, directory / EVENTS) if spec.config.measure.enabled else TraceEnergy(),
        spec.config.cluster,
        duration_s=record.run.duration_s,
        samples=events.last_value(directory, "measured_samples"),
        tokens=events.last_value(directory, "measured_tokens"),
    )
    failures.add_evidence(record, spec, directory)


def add_explanation(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add the bottleneck of the profiled step, if there is one, with the advice of the strategy."""
    found = explain(record, load_strategy(spec.config)) if record.metrics.step_breakdown else None
    record.metrics.explanation = None if found is None else found.to_json()


RESERVED_FILES, RESERVED_FILE_BYTES = 16, 16 * 1024
"""Files that are kept during a run, so that errors and the record fit on a full disk, also on one without inodes."""


def start_attempt(spec: RunSpec, directory: Path, job_id: str | None = None, hosts: Sequence[str] = ()) -> None:
    """Reserve disk space for the record, register an attempt, and write the spec for its workers.

    If the disk is full, OSError is raised, and the record has the cause, so that every command finds the run. The
    record of an earlier attempt is kept.
    """
    with texts.name_folder(directory):
        try:
            reserve = directory / DISK_RESERVE
            reserve.mkdir(exist_ok=True)
            for number in range(RESERVED_FILES):
                (reserve / str(number)).write_bytes(b"\0" * RESERVED_FILE_BYTES)
            attempts.register_attempt(spec.run, directory, job_id, list(hosts) or [socket.gethostname()])
            spec.write(directory)
        except OSError as error:
            texts.release_reserve(directory)
            if texts.is_full_disk(error) and not (directory / RECORD).exists():
                _record_full_disk(spec, directory, error)
            raise


def _record_full_disk(spec: RunSpec, directory: Path, error: OSError) -> None:
    """Write the record of a run that could not start. If it does not fit, the process is known at least."""
    cause = texts.full_disk_error(OSError(error.errno, error.strerror), directory, "setup")
    record = failed_record(spec, directory, "failed", cause, started=None)
    try:
        spec.write(directory)
        record.write(directory)
    except OSError:
        with suppress(OSError):
            attempts.write_launcher_process(directory)


def finalize_run(
    spec: RunSpec,
    directory: Path,
    codes: Mapping[int, int],
    started: float,
    stopped: str | None = None,
    *,
    stopped_status: str = "killed",
    ended: float | None = None,
) -> RunRecord:
    """Classify how a run ended, write its record and return it.

    ``started`` and ``ended`` are in Unix seconds; the default of ``ended`` is now. ``stopped`` is why the run was
    stopped from outside, if it was.
    """
    texts.release_reserve(directory)
    with suppress(OSError):  # Nothing needs the rest of a checkpoint, but it may fill the disk.
        remove_unfinished(directory)
    record, wrong = _read_result(directory) if all(code == 0 for code in codes.values()) else (None, "")
    if record is None and stopped is not None:
        error = RunError("Stopped", stopped, failures.current_phase(directory))
        record = failed_record(spec, directory, stopped_status, error, started, ended=ended)
    elif record is None:
        cause = _unreadable(directory, wrong) if wrong else find_cause(spec, directory, codes)
        record = failed_record(spec, directory, cause.status, cause.error, started, ended=ended)
    for add, failed in STEPS.items():
        try:
            add(record, spec, directory)
        except Exception as failure:  # The record matters more.
            reason = f"{type(failure).__name__}: {failure}"
            print(f"distexp: {failed.format(directory=directory)}: {reason}", file=sys.stderr)
    attempts.record_attempt_end(record)
    record.write(directory)
    if not wrong:
        (directory / RESULT).unlink(missing_ok=True)  # The record has all of it.
    return record


def _read_result(directory: Path) -> tuple[RunRecord | None, str]:
    """Return rank 0's part of the record, without impossible numbers, and what is wrong with it; None if it has none.

    A training of days must not fail because of one wrong measurement.
    """
    path = directory / RESULT
    try:
        return RunRecord.read(path), ""
    except ValueError as error:
        wrong = str(error) if path.exists() else ""
    try:
        record = RunRecord.read(path, without_impossible)
    except ValueError:
        return None, wrong
    print(f"distexp: the record of {directory} lacks a number: {wrong}", file=sys.stderr)
    return record, wrong


def _unreadable(directory: Path, wrong: str) -> failures.Cause:
    message = f"the training has ended, but its result cannot be read: {wrong}"
    return failures.Cause("failed", RunError("UnreadableResult", message, failures.current_phase(directory)))


def find_cause(spec: RunSpec, directory: Path, codes: Mapping[int, int]) -> failures.Cause:
    """Return the cause of a run that did not complete, also if the search for it fails."""
    try:
        return failures.classify_failure(directory, codes, spec)
    except Exception as failure:  # Without a record, the run would count as one whose launcher died.
        message = f"the run failed, and its cause cannot be determined ({failure}): see logs/node*/*.log"
        return failures.Cause("failed", RunError(type(failure).__name__, message))


def finalize_dead_run(directory: Path, launcher: int, trusted: Sequence[str]) -> None:
    """Write the record of a run whose launcher and agent died together, unless another command does it.

    There is still no record without write permission, and if the spec, which somebody else may have changed, names a
    strategy whose package is not trusted. ``launcher`` is a process id.
    """
    try:
        with attempts.run_lock(directory) as other:
            spec = RunSpec.read(directory)
            is_known = recorded_strategy(asdict(spec.config), trusted) is not None
            if other is None and is_known and not (directory / RECORD).exists():
                why = "and its agent died, as by kill -9 or on a read-only disk"
                if attempts.read_agent_process(directory) is None:
                    why = "died before an agent started, as by kill -9 or on a full disk"
                why = f"its launcher (process {launcher}) {why}"
                started = (directory / SPEC).stat().st_mtime
                finalize_run(spec, directory, {}, started, why, ended=last_activity(directory))
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError) or error.errno not in texts.NOT_WRITABLE:
            print(f"distexp: the record of {directory} cannot be written: {error}", file=sys.stderr)


def add_advice(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add what would have fit, if the run was out of GPU memory. Raise ValueError if the report of memory is wrong."""
    if record.status != "oom_gpu" or record.error is None or record.error.memory is None:
        return
    if errors := list(range_errors(record.error.memory, "memory")):
        record.error.memory = None  # A record with impossible numbers could not be read.
        raise ValueError(texts.join_errors(errors))
    from distexp.launch import memory_check  # It needs the planner.

    memory_check.add_advice(record.error.memory, spec, directory)


def add_strategy(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add what the strategy states for the report, if no worker did."""
    record.strategy = record.strategy or load_strategy(spec.config).report_traits(spec.config)


def add_prediction(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add the memory that was predicted before the start."""
    record.predicted = predictions.read_prediction(directory)


def add_proof(record: RunRecord, spec: RunSpec, directory: Path) -> None:
    """Add the hash of the proof that the configuration trains as ``single`` does, if there is one."""
    environment = record.environment
    if environment is None or environment.arithmetic is None:
        return  # It has not trained.
    computes = [*environment.arithmetic.split(", "), *select_arithmetic(environment.variables)]
    file = proof_file(spec.config, computes)
    record.run.proof = json.loads(file.read_text())["proof"] if file.exists() else None


STEPS = {
    add_advice: "{directory} has no advice in its record",
    add_traces: "{directory} has no memory or energy in its record",
    add_strategy: "the record has no strategy section",
    add_explanation: "the profiled step has no explanation",  # Its advice depends on the measured memory.
    add_prediction: "{directory} has no prediction in its record",
    add_proof: "{directory} has no proof in its record",
}
"""What completes a record, in this order, with the message if it fails."""


def read_record(path: Path) -> RunRecord | None:
    """Read a record, or rank 0's part of it; None if it was not written completely."""
    try:
        return RunRecord.read(path)
    except ValueError:
        return None


def failed_record(
    spec: RunSpec, directory: Path, status: str, error: RunError, started: float | None, *, ended: float | None = None
) -> RunRecord:
    """Return the record of a run that did not complete, without memory traces.

    ``started`` and ``ended`` are in Unix seconds. The first is None if the run never started, or not on this machine.
    """
    run, device = spec.run, spec.config.cluster.device
    if error.rank is not None and (logs := RANK_LOG.find(directory, rank=error.rank)):
        error.log = str(logs[0].relative_to(directory))
    variables = {}
    if started is not None:
        run.started_at = datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")
        run.duration_s = (ended or time.time()) - started
        run.hosts = run.attempts[-1]["hosts"] if run.attempts else [socket.gethostname()]
        attempts.record_resume(run, events.last_value(directory, "resumed_from_step"), events.resume_changes(directory))
        variables = select_variables(node_setup.worker_environment(spec, node=0))
    environment = make_environment(on_gpu=device == "cuda", variables=variables)
    record = RunRecord(status=status, run=run, config=asdict(spec.config), error=error, environment=environment)
    record.memory["torch"] = [json.loads(path.read_text()) for path in ALLOCATOR.find(directory)]
    step_files.add_search(record, directory)
    return record


def invalid_record(run: RunInfo, config: dict[str, Any], errors: list[str]) -> RunRecord:
    """Return the record of a cell whose combination of options is impossible."""
    return RunRecord(
        status="invalid",
        run=run,
        config=config,
        error=RunError("ConfigError", texts.join_errors(errors), errors=errors),
        environment=make_environment(on_gpu=True),
    )

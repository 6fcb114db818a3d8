"""Comparison of a training with that of ``strategy=single``, and the cause of a difference.

``run_verify`` composes the phases of each cell (``phases.py``), and starts the process that trains and compares them
(``workers.py``). This process imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from distexp import __version__
from distexp.compose.composition import Cell, MakeCell
from distexp.config import ConfigError
from distexp.config.custom_code import library_versions
from distexp.config.overrides import format_count, path_argument, shell_quote
from distexp.exceptions import SweepFailedError, SweepInterrupted
from distexp.launch import node_setup
from distexp.launch.run_dirs import locked_sweep_dir
from distexp.report.files import errors_of_parameters, write_proof
from distexp.resolve.resources import launcher_traits
from distexp.resolve.run_id import proof_file, run_id
from distexp.runs.record import RunSpec
from distexp.runs.run_dir import AGENT_ERROR, OPERATORS_LOG, PHASE_SETTINGS, PROOF, PROOF_PAGE
from distexp.system import files
from distexp.system.environment_variables import select_arithmetic
from distexp.system.processes import end_tree, start_module
from distexp.tables.columns import print_plain
from distexp.verify.phases import (
    DIFFERENT,
    EQUAL,
    JOB,
    NOT_COMPARABLE,
    PlannedVariant,
    RunSettings,
    labels_of,
    plan_variant,
    remove_proofs,
)  # fmt: skip
from distexp.worker.preload import own_modules

LOG = "workers.log"
GRACE_S = 1.0
MIN_WIDTH = 100  # columns of a table that is not in a terminal
COLUMNS = {
    "loss": "loss", "gradient": "grads", "norm": "norm", "update": "updates", "state": "states", "ranks": "ranks",
    "evaluation": "eval", "resume": "resume",
}  # fmt: skip
"""Kinds of findings that the table shows, with their titles."""


def run_verify(cells: Sequence[Cell], master: DictConfig, make: MakeCell) -> None:
    """Compare all cells with ``single``, and print the results.

    Raise SweepFailedError if one differs, else ConfigError if one cannot be compared.
    """
    section = cells[0].composed.verify
    check_cells(cells)
    with locked_sweep_dir(master, len(cells)) as found:
        sweep_dir = found.absolute()
        results = verify_cells(cells, make, sweep_dir, quick=section.quick, timeout_s=section.timeout_s)
        for cell, result in zip(cells, results, strict=True):
            keep_proof(cell, result, is_complete=not section.quick)
    conclude(results, str(sweep_dir / ("0" if len(cells) == 1 else "*")), as_json=section.output == "json")


def conclude(results: Sequence[dict[str, Any]], proof: str, *, as_json: bool) -> None:
    """Print the results. Raise SweepFailedError if one differs, else ConfigError if one cannot be compared."""
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        console = Console(width=max(MIN_WIDTH, Console().width))
        console.print(result_table(results))
        verdicts = [line for result in results for line in verdict_lines(result, single=len(results) == 1)]
        for line in (*verdicts, f"proof: {proof}/{PROOF}", f"page: {proof}/{PROOF_PAGE}"):
            print_plain(console, line)
    if any(result["status"] == DIFFERENT for result in results):
        raise SweepFailedError
    if wrong := [result for result in results if result["status"] != EQUAL]:
        raise ConfigError([f"{result['label']} cannot be compared: {reason_of(result)}" for result in wrong])


def keep_proof(cell: Cell, result: dict[str, Any], *, is_complete: bool) -> None:
    """Keep the hash of a proof for the records of runs with this configuration. A difference removes that of before."""
    if cell.config is None or not result.get("arithmetic"):
        return
    file = proof_file(cell.config, result["arithmetic"])
    if result["status"] == DIFFERENT:
        file.unlink(missing_ok=True)
    elif result["status"] == EQUAL and is_complete:
        file.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(Path(result["proof"]).read_bytes()).hexdigest()[:12]
        files.write_json(file, {"proof": digest, "path": result["proof"]})


RECORDED, RECORDING_VARIABLE = "--recorded", "DISTEXP_VERIFY"
"""Option of the command, and the variable with the folder to which ``watch`` records. Without it, it does nothing."""


def watch(model: Any, optimizer: Any, *, precision: str = "fp32") -> Any:
    """Record the training of a script, until ``end()`` of the result is called, if DISTEXP_VERIFY names a folder.

    All ranks call both. The model is the one that the script calls, with the wrapper of DDP. A step is a call of
    ``optimizer.step()``. Raise ConfigError if the optimizer is not one of torch.
    """
    from distexp.verify.watching import Watch

    folder = os.environ.get(RECORDING_VARIABLE)
    return Watch(model, optimizer, Path(folder).absolute(), precision) if folder else SimpleNamespace(end=lambda: None)


def _recorded_command(*folders: Path) -> str:
    return " ".join(["distexp verify", RECORDED, *(shell_quote(path_argument(folder)) for folder in folders)])


def compare_recordings(reference: Path, variant: Path, *, as_json: bool) -> None:
    """Compare the recordings of a script, of one process and of several, and print the result as ``run_verify``."""
    for folder in (reference, variant):
        if not (folder / PHASE_SETTINGS).is_file():
            variable = f"{RECORDING_VARIABLE}={shell_quote(str(folder))}"
            raise ConfigError(f"{folder} has no recording: run your script with {variable}")
    if (workers := RunSettings.read(reference).world_size) > 1:
        typed = _recorded_command(Path("SINGLE"), reference)
        raise ConfigError(
            f"{reference} is a recording of {workers} workers, but the first folder must have that of one process: "
            f"run your script with {RECORDING_VARIABLE}=SINGLE without torchrun, and type {typed}"
        )
    for name in (PROOF, PROOF_PAGE):
        (variant / name).unlink(missing_ok=True)
    directories = {"reference": str(reference), "noise": str(reference), "variant": str(variant)}
    settings, label = RunSettings.read(variant), variant.name
    phase = {"name": "script", "adds": f"recorded on {settings.world_size} workers", "directories": directories}
    command = _recorded_command(reference, variant)
    header: Any = {"label": label, "command": command, "workers": settings.world_size, "precision": settings.precision}
    header |= {"versions": {"distexp": __version__, **library_versions()}, "reference": reference.name}
    planned = {"directory": str(variant), "skipped": {}, "header": header, "phases": [phase]}
    groups: Any = [{"environments": [], "runs": []}] * 2
    job = {"modules": [], "device": "cpu", "timeout_s": 0.0, "groups": groups, "variants": [planned]}
    files.write_json(variant / JOB, job)
    started = time.monotonic()
    run_workers(variant, os.environ)
    conclude([read_result(label, variant, variant, time.monotonic() - started)], str(variant), as_json=as_json)


def check_cells(cells: Sequence[Cell]) -> None:
    """Raise ConfigError if all cells are invalid, or if their workers are not on this machine."""
    configs = [cell.config for cell in cells if cell.config is not None]
    if not configs:
        raise ConfigError(list(dict.fromkeys(error for cell in cells for error in cell.errors)))
    if len({tuple(select_arithmetic(config.cluster.environment)) for config in configs}) > 1:
        raise ConfigError(
            "cluster.environment lets the variants compute differently, but they share the runs of single: "
            "verify each of them by its own command"
        )
    if elsewhere := [config.cluster.name for config in configs if not launcher_traits(config).runs_here]:
        raise ConfigError(
            f"distexp verify starts its workers on this machine, but cluster={elsewhere[0]} does not: "
            "use cluster=local, on a node of the cluster"
        )


def verify_cells(
    cells: Sequence[Cell], make: MakeCell, sweep_dir: Path, *, quick: bool, timeout_s: float
) -> list[dict[str, Any]]:
    """Train and compare all cells; return their results, in the order of the cells."""
    remove_proofs(sweep_dir)
    labels, planned = labels_of(cells), {}
    make_once = cache(make)  # The variants of a sweep have the same references.
    for number, (cell, label) in enumerate(zip(cells, labels, strict=True)):
        if cell.config is not None:
            planned[number] = plan_variant(cell, label, sweep_dir / str(number), make_once, quick=quick)
            planned[number].directory.mkdir(parents=True, exist_ok=True)
            build_operators(planned[number])
    started = time.monotonic()
    variants = list(planned.values())
    write_job(variants, sweep_dir, timeout_s)
    phases = format_count(max(len(variant.phases) for variant in variants), "phase")
    print(f"distexp: comparing {', '.join(labels)} with single in {phases}", file=sys.stderr)
    run_workers(sweep_dir, environments_of(variants[0])[0])
    return [
        read_result(planned[number].label, planned[number].directory, sweep_dir, time.monotonic() - started)
        if number in planned
        else {"label": labels[number], "status": NOT_COMPARABLE, "reasons": cell.errors, "phases": []}
        for number, cell in enumerate(cells)
    ]


def run_workers(folder: Path, environment: Mapping[str, str]) -> None:
    """Start the process that trains and compares what the job of a folder lists, and wait for it."""
    with (folder / LOG).open("w") as log:
        process = start_module("distexp.verify.workers", str(folder), env=environment, output=log)
        try:
            process.wait()
        except KeyboardInterrupt:
            raise SweepInterrupted("interrupted: nothing was compared") from None
        finally:
            end_tree(process, GRACE_S)


def build_operators(variant: PlannedVariant) -> None:
    """Compile the C++ operators of DeepSpeed that a variant needs. Raise ConfigError if that fails."""
    for folder in variant.run_dirs("variant")[:1]:
        OPERATORS_LOG.path(folder, 0).parent.mkdir(parents=True, exist_ok=True)
        if node_setup.lacks_operators(RunSpec.read(folder), folder, 0):
            raise ConfigError(files.read_json(AGENT_ERROR.path(folder, 0))["message"])


def environments_of(variant: PlannedVariant) -> list[dict[str, str]]:
    """Return the environment of each rank of a variant."""
    if not variant.phases:
        return []
    spec = RunSpec.read(variant.run_dirs("variant")[0])
    size, per_node = spec.world_size, spec.workers_per_node
    nodes = [node_setup.worker_environment(spec, node) for node in range(spec.nodes)]
    return [nodes[rank // per_node] | rank_variables(rank, size, per_node) for rank in range(size)]


def rank_variables(rank: int, size: int, per_node: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank."""
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    return {name: str(value) for name, value in {**numbers, "GROUP_RANK": rank // per_node}.items()}


def write_job(variants: Sequence[PlannedVariant], sweep_dir: Path, timeout_s: float) -> None:
    """Write what the process that trains has to do: the references first, and the runs of each variant."""
    shared = [path for variant in variants for path in variant.run_dirs("reference", "noise")]
    started_with = environments_of(variants[0])[0]
    groups = [{"environments": [rank_variables(0, 1, 1)], "runs": list(dict.fromkeys(map(str, shared)))}]
    for variant in variants:
        runs = list(map(str, variant.run_dirs("variant", "resumed")))
        # Only changes, because the environment of the user's shell may have secrets.
        changes = [dict(each.items() - started_with.items()) for each in environments_of(variant)]
        groups.append({"environments": changes, "runs": runs})
    modules = [module for variant in variants for module in own_modules(variant.config)]
    job = {
        "modules": list(dict.fromkeys(modules)),
        "device": variants[0].config.cluster.device,
        "timeout_s": timeout_s,
        "groups": groups,
        "variants": [
            {"directory": str(one.directory), "skipped": one.skipped, "phases": one.phases, "header": header_of(one)}
            for one in variants
        ],
    }
    files.write_json(sweep_dir / JOB, job)


def header_of(variant: PlannedVariant) -> dict[str, Any]:
    """Return what identifies a comparison: the configuration and the versions."""
    config = variant.config
    return {
        "command": variant.command,
        "label": variant.label,
        "configuration": run_id(config),
        "workers": config.cluster.world_size,
        "device": config.cluster.device,
        "precision": config.precision.name,
        "model": config.model.name,
        "dataset": config.dataset.name,
        "versions": {"distexp": __version__, **library_versions()},
    }


def read_result(label: str, directory: Path, sweep_dir: Path, seconds: float) -> dict[str, Any]:
    """Return the result of a variant, which stays in its directory as the proof."""
    path = directory / PROOF
    if not path.exists():
        lines = (sweep_dir / LOG).read_text(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"the process that compares was ended, see {sweep_dir / LOG}"
        return {"label": label, "status": NOT_COMPARABLE, "reasons": [reason], "phases": []}
    result: dict[str, Any] = files.read_json(path)
    result |= {"seconds": round(seconds, 1), "proof": str(path), "parameters": errors_of_parameters(result["phases"])}
    files.write_json(path, result)
    write_proof(result, list(verdict_lines(result, single=True)), COLUMNS, directory / PROOF_PAGE)
    return result


def reason_of(result: dict[str, Any]) -> str:
    """Return why a variant cannot be compared."""
    reasons = result.get("reasons") or ["no phase could be compared"]
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return f"{reasons[0]}{more}"


def result_table(results: Sequence[dict[str, Any]]) -> Table:
    """Return the largest errors of each phase of one variant, or of each of several variants."""
    kinds = list(COLUMNS) if len(results) == 1 else ["loss", "gradient", "update"]
    titles = ["phase", "steps"] if len(results) == 1 else ["variant", "phases"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in (*titles, *(COLUMNS[kind] for kind in kinds), ""):
        table.add_column(title, justify="left" if title in (titles[0], "") else "right", no_wrap=True)
    for result in results:
        phases = [(each["phase"], each.get("steps", ""), [each], each["status"]) for each in result["phases"]]
        whole = (result["label"], len(result["phases"]), result["phases"], result["status"])
        for name, count, members, status in phases if len(results) == 1 else [whole]:
            table.add_row(name, str(count), *(error_text(members, kind) for kind in kinds), status)
    return table


def error_text(phases: Sequence[dict[str, Any]], kind: str) -> str:
    """Return the largest error of a kind relative to its bound, with a mark if it exceeds that."""
    found = [phase["worst"][kind] for phase in phases if kind in phase.get("worst", {})]
    pairs = [(float("inf") if each["error"] is None else each["error"], each["bound"]) for each in found]
    if not pairs:
        return "-"
    error, bound = max(pairs, key=lambda pair: pair[0] / pair[1])
    return f"{f'{error:.0e}' if error else '0'}{'!' if error > bound else ''}"


def verdict_lines(result: dict[str, Any], *, single: bool) -> Iterator[str]:
    """Yield the verdict on a variant, with the cause of a difference."""
    prefix = f"{result['label']}: " if not single else ""
    if result["status"] == EQUAL:
        if single:
            yield (
                f"equal: {result['label']} trains as single does, on {format_count(result['workers'], 'worker')} in "
                f"{result['precision']} ({result['seconds']:.0f} s)"
            )
    elif cause := result.get("cause"):
        yield f"{prefix}different, first in phase {cause['phase']} ({cause['adds']}), step {cause['step']}"
        yield f"cause: {cause['sentence']}"
        error = float("inf") if cause["error"] is None else cause["error"]
        yield f"evidence: {cause['kind']} of {cause['name']} differs by {error:.1e} (bound {cause['bound']:.1e})"
    else:
        yield f"{prefix}not comparable: {reason_of(result)}"
    for name, error in result.get("skipped", {}).items():
        yield f"{prefix}phase {name} is left out: {error}"

"""Numbers and directories of the runs of a sweep: which cell is which run, also after a resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distexp.launch.cell import Cell
from distexp.launch.git_state import GitState
from distexp.launch.run_dir_claim import ClaimedDir, claim_run_dir, run_dir_for
from distexp.launch.unsuccessful_records import invalid_record
from distexp.resolve import without_hydra
from distexp.runs.command_text import format_override
from distexp.runs.existing import ExistingRun, ExistingRuns, unmatched_message
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunInfo


@dataclass(frozen=True)
class AssignedRun:
    """A cell with the number and the directory of its run.

    Attributes:
        composed: Composed configuration of the cell, with the number and the directory in its hydra node.
    """

    cell: Cell
    info: RunInfo
    directory: Path
    composed: DictConfig


def make_run_info(cell: Cell, number: int, code: GitState, snapshot: str | None = None) -> RunInfo:
    """Return the identity of a cell's run."""
    overrides = [format_override(text) for text in cell.overrides if not text.startswith("sweep.")]
    name = str(cell.composed.name) if cell.config is None else cell.config.name
    return RunInfo(cell.id, name, number, overrides, git_sha=code.sha, git_dirty=code.dirty, snapshot=snapshot)


def write_invalid(run: AssignedRun) -> RunRecord:
    """Write the record of an invalid cell and return it."""
    content = _composed_content(run.composed) if run.cell.decided is None else asdict(run.cell.decided)
    record = invalid_record(run.info, content, run.cell.errors)
    record.predicted = run.cell.predicted
    run.cell.write_prediction(run.directory)
    record.write(run.directory)
    return record


def _composed_content(config: DictConfig) -> dict[str, Any]:
    composed = without_hydra(config)
    try:
        content: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException:  # An interpolation of a missing key may be the error.
        content = OmegaConf.to_container(composed)
    return dict(content)


@dataclass(frozen=True)
class ExistingRunRules:
    """What a launcher does about the runs that a sweep directory has already.

    Attributes:
        should_skip: Reports an existing run that is kept, and returns whether it is.
        warn: Prints a warning about existing runs that no cell matches.
        active: Numbers of runs that have not ended. The warning leaves them out.
    """

    should_skip: Callable[[ExistingRun], bool]
    warn: Callable[[str], None]
    active: Collection[int] = ()


def assign_run_dirs(
    cells: Sequence[Cell],
    sweep_dir: Path,
    code: GitState,
    rules: ExistingRunRules,
    *,
    resume: bool,
    snapshot: str | None = None,
) -> Iterator[AssignedRun]:
    """Yield each cell to run with its number and directory, which is claimed at that moment.

    A cell with an existing run keeps the number and directory of that run.

    Args:
        cells: Cells of the sweep.
        sweep_dir: Directory of the sweep.
        code: Git state of the code.
        rules: What to do about existing runs.
        resume: Whether the sweep may have existing runs.
        snapshot: Copy of the code that the runs use.
    """
    existing = ExistingRuns.read(sweep_dir) if resume else ExistingRuns()
    infos = [make_run_info(cell, 0, code, snapshot) for cell in cells]
    matches = existing.match(infos)
    _warn_of_unmatched(existing, sweep_dir, rules)
    first_free = 0
    for cell, info, known in zip(cells, infos, matches, strict=True):
        if known is not None and rules.should_skip(known):
            continue
        composed = cell.composed
        if known is None:
            claimed = claim_run_dir(partial(run_dir_for, composed, sweep_dir), first_free, resume=resume)
            first_free = claimed.number + 1
        else:
            claimed = ClaimedDir(known.number, run_dir_for(composed, sweep_dir, known.number))
        info.number = claimed.number
        yield AssignedRun(cell, info, claimed.directory, composed)


def _warn_of_unmatched(existing: ExistingRuns, sweep_dir: Path, rules: ExistingRunRules) -> None:
    unfinished = [run for run in existing.unfinished(below=sweep_dir) if run.number not in rules.active]
    warning = unmatched_message(unfinished)
    if warning is not None:
        rules.warn(warning)

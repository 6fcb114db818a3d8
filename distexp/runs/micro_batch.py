"""The search of ``train.micro_batch_size=auto`` on disk: ``micro_batch.json`` of a run, and the stored searches.

Rank 0 writes the file of a run before the training starts. So the record contains the search even if the run fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distexp.runs.json_files import write_json
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import MICRO_BATCH
from distexp.runs.typed_values import read_dataclass

FITS, OUT_OF_MEMORY, TOO_LARGE = "fits", "oom", "too_large"
"""Outcomes of a candidate. ``too_large``: it ran, and left too little memory."""


@dataclass(frozen=True)
class TriedSize:
    """A micro-batch size that the search tried, over all ranks."""

    micro_batch_size: int
    outcome: str
    samples_per_second: float | None = None  # of a whole step, over all ranks
    peak_mib: float | None = None  # of the rank with the most
    base_mib: float | None = None  # before the forward pass of the last micro-batch, of the rank with the most
    usable_mib: float | None = None  # of the rank with the least


@dataclass(frozen=True)
class MicroBatchSearch:
    """A search, and what it chose."""

    chosen: int | None  # None: no size fits
    candidates: list[TriedSize] = field(default_factory=list)
    seconds: float = 0.0
    stored_in: str | None = None  # file of an earlier search that gave this result
    skipped: int | None = None  # smallest size that was not tried because it needs too much memory
    complete: bool = True  # False: the time limit ended the search

    @property
    def untried(self) -> bool:
        """Return whether the chosen size was not tried, because the time limit ended the search."""
        return self.chosen is not None and all(tried.micro_batch_size != self.chosen for tried in self.candidates)

    def write(self, path: Path) -> None:
        """Write the search as JSON, atomically."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> MicroBatchSearch | None:
        """Read a search; None if the file is missing or damaged."""
        return read_dataclass(cls, path)

    def with_candidates(self, candidates: Sequence[TriedSize]) -> MicroBatchSearch:
        """Return a copy with other candidates."""
        return replace(self, candidates=list(candidates))


def describe_search(search: MicroBatchSearch) -> str:
    """Return the line for the terminal: ``micro-batch: 32 (of 1, 2, 4, 8, 16, 32; 64 ran out of memory)``."""
    return f"micro-batch: {search.chosen} ({'; '.join(_remarks(search))})"


def _remarks(search: MicroBatchSearch) -> Iterator[str]:
    yield f"of {_sizes(search, FITS)}"
    if sizes := _sizes(search, TOO_LARGE):
        yield f"{sizes} left too little memory"
    if sizes := _sizes(search, OUT_OF_MEMORY):
        yield f"{sizes} ran out of memory"
    if search.skipped is not None:
        yield f"{search.skipped} would not fit"
    if not search.complete:
        yield "chosen by its memory, because the time was over" if search.untried else "then the time was over"
    yield f"from {search.stored_in}" if search.stored_in else f"{search.seconds:.0f} s"


def _sizes(search: MicroBatchSearch, outcome: str) -> str:
    """Return the sizes with an outcome, as in ``1, 2, 4``; empty if there are none."""
    sizes = sorted(tried.micro_batch_size for tried in search.candidates if tried.outcome == outcome)
    return ", ".join(map(str, sizes))


def add_search(record: RunRecord, run_dir: Path) -> None:
    """Add the search of a run to its record: the candidates, and the sizes that were chosen."""
    search = MicroBatchSearch.read(run_dir / MICRO_BATCH)
    if search is None:
        return
    record.metrics.micro_batch_search = asdict(search)
    if search.chosen is not None and isinstance(record.config["train"]["micro_batch_size"], str):
        _replace_auto(record.config, search.chosen)


def _replace_auto(config: dict[str, Any], chosen: int) -> None:
    """Replace ``train.micro_batch_size=auto`` by the chosen size, and compute the steps of accumulation from it."""
    train, cluster = config["train"], config["cluster"]
    workers = cluster["nodes"] * cluster["workers_per_node"]
    train["micro_batch_size"] = chosen
    train["gradient_accumulation_steps"] = train["global_batch_size"] // (workers * chosen)

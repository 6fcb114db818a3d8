"""Predictions on disk: the memory of a run, its forecasts, and searches of a micro-batch size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Predicted
from distexp.runs.run_dir import FORECAST, MICRO_BATCH, PREDICTED
from distexp.system.files import read_or_none, write_json
from distexp.system.typed_values import matches, parse_dataclass, read_dataclass

PHASE = "phase"

Curve = Mapping[str, Sequence[Any]]
"""The phase, and each part in MiB, at some points of a training step."""


def write_prediction(directory: Path, predicted: Predicted, curve: Curve) -> None:
    """Write the prediction of a run, and its curve through a training step."""
    write_json(directory / PREDICTED, {"predicted": asdict(predicted), "curve": dict(curve)})


def remove_prediction(directory: Path) -> None:
    """Remove the prediction of a run, if it has one. The records of its earlier attempts keep theirs."""
    (directory / PREDICTED).unlink(missing_ok=True)


def read_prediction(directory: Path) -> Predicted | None:
    """Return the prediction of a run; None if it has none."""
    return read_dataclass(Predicted, directory / PREDICTED, "predicted")


def read_curve(directory: Path) -> Curve:
    """Return the curve of a run's prediction; empty if it has none."""
    curve = read_or_none(directory / PREDICTED, "curve")
    return curve if _is_curve(curve) else {}


def _is_curve(curve: Any) -> bool:
    if not isinstance(curve, dict) or not matches(curve.get(PHASE), list[str]):
        return False
    lengths = {len(values) for values in curve.values() if isinstance(values, list)}
    return len(lengths) == 1 and all(matches(curve[name], list[float]) for name in curve if name != PHASE)


# ``forecast.json``: forecasts of a profiled run on other numbers of workers, which ``distexp forecast`` writes.


SCHEMA = 1


@dataclass(frozen=True)
class StoredForecast:
    """The forecast of one size.

    Attributes:
        nodes: Number of nodes.
        workers_per_node: Workers of each node.
        run_id: Id of the same training at this size.
        micro_batch_size: Samples of a worker in a forward pass.
        micro_batches: Micro-batches of an optimizer step.
        samples_per_step: Samples of all workers in an optimizer step.
        step_time_s: Most likely duration of the step.
        low_s: Lower end of the interval.
        high_s: Upper end of the interval.
        created_at: ISO 8601, UTC.
        beyond: How far the size is beyond the measured range; empty inside of it.
        what_if: Options for another machine, which later runs do not share; empty without them.
    """

    nodes: int
    workers_per_node: int
    run_id: str
    micro_batch_size: int
    micro_batches: int
    samples_per_step: float
    step_time_s: float
    low_s: float
    high_s: float
    created_at: str = ""
    beyond: str = ""
    what_if: str = ""

    @property
    def workers(self) -> int:
        """Return the number of workers on all nodes."""
        return self.nodes * self.workers_per_node

    @property
    def samples_per_second(self) -> float:
        """Return the throughput over all workers."""
        return self.samples_per_step / self.step_time_s

    def same_size(self, other: StoredForecast) -> bool:
        """Return whether another forecast is about the same size, the same steps and the same machine."""
        names = ("nodes", "workers_per_node", "run_id", "micro_batches", "samples_per_step", "what_if")
        return all(getattr(self, name) == getattr(other, name) for name in names)


def cap_efficiency(high: float, efficiency: float) -> float:
    """Return the upper end of an interval of the efficiency, for workers whose work does not shrink with their number.

    It is at most 100 %, or the forecast efficiency if that is more, as with a slower network at the baseline.
    """
    return min(high, max(efficiency, 1.0))


def write_forecasts(run_dir: Path, forecasts: Sequence[StoredForecast]) -> None:
    """Add forecasts to those of a run. A new one replaces that of the same size.

    Raises:
        OSError: the run directory is not writable.
    """
    kept = [old for old in read_forecasts(run_dir) if not any(old.same_size(new) for new in forecasts)]
    ordered = sorted([*kept, *forecasts], key=lambda forecast: (forecast.workers, forecast.nodes))
    write_json(run_dir / FORECAST, {"schema": SCHEMA, "forecasts": [asdict(forecast) for forecast in ordered]})


def read_forecasts(run_dir: Path) -> list[StoredForecast]:
    """Return the forecasts of a run, by the number of workers; none if the file is missing or damaged."""
    schema, forecasts = (read_or_none(run_dir / FORECAST, key) for key in ("schema", "forecasts"))
    try:
        return [parse_dataclass(StoredForecast, raw) for raw in forecasts if _is_valid(raw)] if schema == SCHEMA else []
    except (ValueError, TypeError):
        return []


def _is_valid(raw: Any) -> bool:
    """Return whether an entry has positive sizes and times."""
    names = ("nodes", "workers_per_node", "samples_per_step", "step_time_s", "low_s", "high_s")
    return isinstance(raw, dict) and all(matches(raw.get(name), float) and raw[name] > 0 for name in names)


# The search of ``train.micro_batch_size=auto`` on disk: ``micro_batch.json`` of a run, and the stored searches.
#
# Rank 0 writes the file of a run before the training starts. So the record contains the search even if the run fails.


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

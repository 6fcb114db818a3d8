"""From records on disk to flat rows, one a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distexp.report.data.metrics import read_metrics
from distexp.report.data.settings import read_settings
from distexp.runs.record import RunRecord, find_records


@dataclass(frozen=True)
class Row:
    """One run: what was chosen and what came out."""

    label: str  # short, and unlike those of the other rows
    record: RunRecord
    settings: dict[str, Any]
    metrics: dict[str, float | None]  # by the names of figures.METRICS
    path: Path | None = None  # of the record; None where it was never read from disk

    @property
    def completed(self) -> bool:
        """Whether the training went to its end."""
        return self.record.status == "completed"


def row_from_record(record: RunRecord, label: str, path: Path | None = None) -> Row:
    """The row of a record.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it has the outline of a record, but not its content.
    """
    return Row(label, record, read_settings(record), read_metrics(record), path)


def load_rows(roots: Sequence[Path]) -> tuple[list[Row], list[str]]:
    """A row for every readable record below some folders, and a sentence for each that is not.

    A record that lies below two of the folders counts once.
    """
    rows: list[Row] = []
    skipped: list[str] = []
    paths = list(dict.fromkeys(Path(os.path.abspath(path)) for path in find_records(*roots)))
    for path, label in zip(paths, labels(paths), strict=True):
        try:
            rows.append(row_from_record(RunRecord.read(path), label, path))
        except (KeyError, TypeError, AttributeError) as error:
            skipped.append(f"{path} is not a record of distexp: {type(error).__name__}: {error}")
        except OSError as error:
            skipped.append(f"{path} cannot be read: {error.strerror}")
        except ValueError as error:
            sentence = str(error)
            skipped.append(sentence if str(path) in sentence else f"{path}: {sentence}")
    return rows, skipped


def labels(paths: Sequence[Path]) -> list[str]:
    """``3`` for a run of the only sweep, ``01-35-43/3`` among several: what all have in common is cut."""
    sweeps = [str(path.parent.parent) for path in paths]
    if len(set(sweeps)) < 2:
        return [path.parent.name for path in paths]
    short = _told_apart(sorted(set(sweeps)))
    return [f"{short[sweep]}/{path.parent.name}" for sweep, path in zip(sweeps, paths, strict=True)]


def _told_apart(folders: Sequence[str]) -> dict[str, str]:
    """As few of the last parts of each path as differ, without the date that all begin with."""
    parts = [folder.split("/") for folder in folders]
    deepest = max(map(len, parts))
    count = next(n for n in range(1, deepest + 1) if len({tuple(each[-n:]) for each in parts}) == len(parts))
    tails = ["/".join(each[-count:]) for each in parts]
    alike = 0
    while len({tail[: alike + 1] for tail in tails}) == 1:
        alike += 1
    cut = tails[0].rfind("_", 0, alike) + 1
    return {folder: tail[cut:] for folder, tail in zip(folders, tails, strict=True)}

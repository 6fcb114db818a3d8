"""Prediction of a run's memory: ``predicted.json``, which the launcher writes before the run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distexp.runs.json_files import read_or_none, write_json
from distexp.runs.record_sections import Predicted
from distexp.runs.run_dir import PREDICTED
from distexp.runs.typed_values import matches, read_dataclass

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

"""A cell of a sweep: its overrides, and what Hydra and ``resolve`` made of them."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from omegaconf import DictConfig

from distexp.config import Config
from distexp.runs.prediction import Curve, remove_prediction, write_prediction
from distexp.runs.record import INVALID_ID
from distexp.runs.record_sections import Predicted


@dataclass
class Cell:
    """The overrides of one run, and what Hydra and ``resolve`` made of them.

    Attributes:
        overrides: Overrides of the cell.
        packed: Composed configuration, pickled and compressed. A sweep may have thousands of cells.
        config: Resolved configuration; None for an invalid cell.
        decided: Configuration of an invalid cell, with the values that were decided before its errors were found.
        id: ``run.id`` of the run.
        errors: Why the cell is invalid.
        varied: Overrides that not all cells share.
        predicted: Predicted memory; None if it is not predicted.
        curve: Predicted memory through a training step.
    """

    overrides: list[str]
    packed: bytes
    config: Config | None = None
    decided: Config | None = None
    id: str = INVALID_ID
    errors: list[str] = field(default_factory=list)
    varied: list[str] = field(default_factory=list)
    predicted: Predicted | None = None
    curve: Curve = field(default_factory=dict)

    @property
    def composed(self) -> DictConfig:
        """Return a new copy of the composed configuration, with the hydra node."""
        return cast(DictConfig, pickle.loads(zlib.decompress(self.packed)))

    def write_prediction(self, directory: Path) -> None:
        """Write the prediction into the directory of the cell's run. Without one, remove that of an earlier attempt."""
        if self.predicted is None:
            remove_prediction(directory)
        else:
            write_prediction(directory, self.predicted, self.curve)


MakeCell = Callable[[Sequence[str]], Cell]

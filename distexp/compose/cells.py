"""A cell of a sweep: its overrides, and what Hydra and ``resolve`` made of them."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from distexp.config import Config
from distexp.exceptions import interruptions_kept
from distexp.guard.config_files import CheckedConfigLoader
from distexp.runs.predictions import Curve, write_prediction
from distexp.runs.record import INVALID_ID
from distexp.runs.record_sections import Predicted


@dataclass
class Cell:
    """The overrides of one run, and what Hydra and ``resolve`` made of them."""

    overrides: list[str]
    packed: bytes  # composed configuration, pickled and compressed. A sweep may have thousands of cells.
    config: Config | None = None  # resolved configuration; None for an invalid cell
    decided: Config | None = None  # of an invalid cell, with what was decided before its errors were found
    id: str = INVALID_ID  # ``run.id`` of the run
    errors: list[str] = field(default_factory=list)  # why the cell is invalid
    varied: list[str] = field(default_factory=list)  # overrides that not all cells share
    predicted: Predicted | None = None  # predicted memory; None if it is not predicted
    curve: Curve = field(default_factory=dict)  # predicted memory through a training step

    @property
    def composed(self) -> DictConfig:
        """Return a new copy of the composed configuration, with the hydra node."""
        return cast(DictConfig, pickle.loads(zlib.decompress(self.packed)))

    def write_prediction(self, directory: Path) -> None:
        """Write the prediction into the directory of the cell's run. Without one, remove that of an earlier attempt."""
        write_prediction(directory, self.predicted, self.curve)

    def invalidate(self, error: str) -> None:
        """Make a resolved cell invalid."""
        self.errors, self.decided = [error], self.config
        self.config, self.id = None, INVALID_ID


MakeCell = Callable[[Sequence[str]], Cell]


class CellComposer:
    """Composition of cells with the result of Hydra's ``load_sweep_config``, but with one call for each choice.

    A call needs about 50 ms, mostly to read YAML files and to merge them. Cells that choose the same options differ
    only in values, which are set on a copy.
    """

    def __init__(self, loader: CheckedConfigLoader, master: DictConfig) -> None:
        """Create the composer of the cells of a command, with its own configuration."""
        self._loader, self._master = loader, master
        self._hydra_overrides = cast(list[str], OmegaConf.to_container(master.hydra.overrides.hydra))
        self._parser = OverridesParser.create()
        self._is_group: dict[str, bool] = {}
        self._bases: dict[tuple[str, ...], bytes] = {}

    @interruptions_kept()
    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the composed configuration of a cell; ConfigError if a foreign file has values that could run code."""
        parsed = self._parser.parse_overrides(list(overrides))
        if any(override.is_hydra_override() for override in parsed):
            return self._loader.load_sweep_config(self._master, list(overrides))
        chosen = [override for override in parsed if self._chooses_option(override)]
        values = [override for override in parsed if not self._chooses_option(override)]
        key = tuple(map(_text, chosen))
        if key not in self._bases:
            self._bases[key] = pickle.dumps(self._loader.load_sweep_config(self._master, list(key)))
        composed = cast(DictConfig, pickle.loads(self._bases[key]))  # a copy
        self._loader._apply_overrides_to_config(values, composed)
        composed.hydra.overrides.task = list(map(_text, parsed))
        job = composed.hydra.job
        job.override_dirname = get_overrides_dirname(parsed, **job.config.override_dirname)
        self._loader.check(composed)  # The values may be those of a foreign file, too.
        return composed

    def _chooses_option(self, override: Override) -> bool:
        """Return whether an override chooses an option of a group, as Hydra decides it."""
        key = override.key_or_group
        if key not in self._is_group:
            config_name = self._master.hydra.job.config_name
            self._is_group[key] = bool(self._loader.get_group_options(key, None, config_name, self._hydra_overrides))
        return self._is_group[key] and not isinstance(override.value(), dict)


def _text(override: Override) -> str:
    assert override.input_line is not None
    return override.input_line

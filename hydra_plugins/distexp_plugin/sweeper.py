"""Hydra sweeper plugin: the product of the swept keys, for each cell of ``sweep.cells``.

Hydra's own sweeper composes every cell twice: to validate it and to run it. Here the launcher composes each cell
once, and starts nothing before all cells are composed.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from distexp.config import ConfigError
from distexp.config.keys import config_groups, reference_errors
from distexp.config.overrides import (
    MAX_CELLS,
    add_plus_prefix,
    check_cell_count,
    format_count,
    join_first,
    parse,
    quote_choice,
)

CELLS_KEY = "sweep.cells"
REPEATS_KEY = "repeats"
SEED_KEY = "train.seed"


class DistexpSweeper(BasicSweeper):
    """Hydra's basic sweeper with lists of cells and repeats. The command line replaces the sweep of a preset."""

    def sweep(self, arguments: list[str]) -> Any:
        """Launch all cells in one call of the launcher."""
        assert self.hydra_context is not None
        assert self.launcher is not None
        if not type(self.launcher).__module__.startswith(__package__ or ""):
            raise ConfigError(
                f"cluster={self.config.cluster.name if self.config else ''} chooses no launcher of distexp: start its "
                "file with 'defaults: [slurm]' or 'defaults: [local]'"
            )
        errors = reference_errors(self.config) if self.config else []
        # A reference may need the keys of a cell. Those of a directory may not.
        if errors and (errors[0].startswith("hydra.") or not (self.config and self.config.sweep.cells)):
            raise ConfigError(errors)
        self.parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        return [self.launcher.launch(self.expand(arguments), initial_job_idx=0)]

    def expand(self, arguments: Sequence[str]) -> list[list[str]]:
        """Return the overrides of each cell in the order of the command line. Warn about cells that are repeated."""
        given = self._parse(arguments)
        for override in given:
            if override.get_key_element() == CELLS_KEY and override.is_sweep_override():
                raise ConfigError(f"{override.input_line} is more than one list: write {CELLS_KEY}=[[...],[...]]")
        named = {override.get_key_element() for override in given}
        preset = self._parse([f"{key}={value}" for key, value in self.params.items()])
        swept = [o for o in preset if o.get_key_element() not in named] + given
        swept = [o for o in swept if o.get_key_element() != CELLS_KEY]
        cells = [self._parse(cell) for cell in self._listed_cells()]
        if CELLS_KEY not in named:  # a preset's cells, too, are replaced by the command line
            cells = [[o for o in cell if o.get_key_element() not in named] for cell in cells]
        cells = cells or [[]]
        expanded: list[list[str]] = []
        decided = [{override.get_key_element() for override in cell} for cell in cells]  # keys that a cell sets itself
        for cell, own in zip(cells, decided, strict=True):
            expanded += self._product([o for o in swept if o.get_key_element() not in own] + cell)
            _check_total(len(expanded))
        for override in given:
            if override.is_sweep_override() and override.get_key_element() in set.intersection(*decided):
                text = f"{override.input_line} has no effect, because each cell of sweep.cells sets this key"
                print(f"distexp: warning: {text}: leave it out", file=sys.stderr)
        return self._repeat(drop_repeated(expanded))

    def _repeat(self, cells: list[list[str]]) -> list[list[str]]:
        """Return each cell as often as ``repeats`` requests, with different seeds.

        All cells run once before the first one repeats, so that slow changes of the machine affect all of them.
        """
        assert self.config is not None
        seed, repeats = int(self.config.train.seed), int(self.config.repeats)
        planned = [(cell, _integer(cell, REPEATS_KEY, repeats), _integer(cell, SEED_KEY, seed)) for cell in cells]
        total = sum(max(count, 1) for _, count, _ in planned)
        _check_total(total)
        most = max((count for _, count, _ in planned), default=1)
        repeated = [
            cell if count < 2 else _with_seed(cell, first + n)
            for n in range(max(most, 1)) for cell, count, first in planned if n < max(count, 1)
        ]  # fmt: skip
        return drop_repeated(repeated)

    def _parse(self, overrides: Sequence[str]) -> list[Override]:
        return parse([quote_choice(add_plus_prefix(text), config_groups()) for text in overrides], self.parser)

    def _product(self, overrides: list[Override]) -> list[list[str]]:
        check_cell_count(overrides)
        return [cell for batch in self.split_arguments(overrides, None) for cell in batch]

    def _listed_cells(self) -> list[list[str]]:
        assert self.config is not None
        cells: Any = OmegaConf.to_container(self.config.sweep.cells)
        for cell in cells:
            if not isinstance(cell, list) or not all(isinstance(item, str) for item in cell):
                raise ConfigError(
                    f"sweep.cells contains {cell!r}, but each cell must be a list of overrides, as in "
                    '\'sweep.cells=[["strategy=single"],["zero_stage=1","offload=true"]]\''
                )
            if of_hydra := next((item for item in cell if re.match(r"[+~]*hydra[./=]", item)), None):
                raise ConfigError(
                    f"sweep.cells sets {of_hydra}, which is the same for all runs: set it outside of sweep.cells"
                )
        listed: list[list[str]] = cells
        return listed


def _check_total(cells: int) -> None:
    if not 0 < cells <= MAX_CELLS:
        raise ConfigError(f"the sweep has {cells:,} cells: start one with 1 to {MAX_CELLS:,} cells")


def _integer(cell: Sequence[str], key: str, default: int) -> int:
    """Return the value that a cell gives to a key; the default if it is no integer, which is an error later."""
    text = next((value for name, _, value in map(_split, cell) if name == key), "")
    return int(text) if text.lstrip("-").isdecimal() else default


def _split(override: str) -> tuple[str, str, str]:
    return override.lstrip("+").partition("=")


def _with_seed(cell: Sequence[str], seed: int) -> list[str]:
    kept = [text for text in cell if _split(text)[0] not in (REPEATS_KEY, SEED_KEY)]
    return [*kept, f"{SEED_KEY}={seed}"]


def drop_repeated(cells: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return each cell once, and warn about those that are left out."""
    counts = Counter(tuple(cell) for cell in cells)
    repeated = [cell for cell, count in counts.items() if count > 1]
    if repeated:
        shared = set.intersection(*map(set, counts)) if len(counts) > 1 else set()
        shown = join_first([" ".join(text for text in cell if text not in shared) for cell in repeated], limit=2)
        left_out, text = format_count(len(cells) - len(counts), "repeated cell"), shown.replace("'", "")
        print(f"distexp: warning: {left_out} left out ({text}): to repeat runs, add repeats=2", file=sys.stderr)
    return [list(cell) for cell in counts]


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="distexp",
    node={
        "_target_": f"{__name__}.DistexpSweeper",
        "max_batch_size": None,
        "params": None,
    },
    provider="distexp",
)

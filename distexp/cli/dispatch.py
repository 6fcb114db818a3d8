"""What each command does with its cells, which it composes itself. Hydra's launcher plugin calls it.

``DISPATCH`` is the only place that asks which command was typed, in order to do something else.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from distexp.compose.composition import Adjust, Cell, CellRules, MakeCell, cell_maker, compose_cells
from distexp.config import Command, ConfigError
from distexp.config.overrides import sets_key, shell_quote, sweep_dir_override
from distexp.guard.command_line import packages_trusted_by_user
from distexp.launch.launcher import Launcher, Sweep
from distexp.launch.memory_check import predict_before_start
from distexp.resolve.resources import find_launcher


@dataclass(frozen=True)
class CommandLine:
    """A command line as Hydra has parsed it."""

    context: HydraContext
    master: DictConfig
    overrides: Sequence[Sequence[str]]
    launcher: Launcher
    adjust: Adjust  # Changes a composed cell before it is resolved.

    def compose(self, rules: CellRules) -> list[Cell]:
        """Return all cells."""
        return compose_cells(self.context, self.master, self.overrides, self.adjust, rules)

    @property
    def make(self) -> MakeCell:
        """Return the function that composes a variant of a cell."""
        return cell_maker(self.context, self.master, self.adjust)


def start_runs(line: CommandLine) -> list[JobReturn]:
    """Run every cell, or print what would be started (``cluster.dry_run=true``)."""
    cells = line.compose(CellRules())
    dry_run = cells[0].composed.cluster.dry_run
    if not dry_run:  # Predictions may take minutes, so what would stop the start is checked before them.
        line.launcher.check()
    predict_before_start(cells, line.make)
    sweep = Sweep(line.context, line.master, cells)
    if not dry_run:
        return line.launcher.start(sweep)
    line.launcher.print_dry_run(sweep)
    return []


def plan(line: CommandLine) -> list[JobReturn]:
    """Predict the memory of every cell, and print it."""
    from distexp.plan.command import run_plan

    run_plan(line.compose(CellRules(may_be_invalid=_prints_json(line))), line.make)
    return []


def forecast(line: CommandLine) -> list[JobReturn]:
    """Print the forecast of the profiled run for the size of every cell."""
    from distexp.forecast.command import run_forecast

    run_forecast(line.compose(CellRules(may_be_invalid=_prints_json(line), keeps_accumulation=True)))
    return []


def _prints_json(line: CommandLine) -> bool:
    """Return whether the output is for programs, which get the errors of a cell too."""
    return bool(line.master.plan.output == "json")


def choose(line: CommandLine) -> list[JobReturn]:
    """Search for the best configuration. A candidate has other sizes, so it may be valid even if the cell is not."""
    from distexp.choose.candidate import config_label
    from distexp.choose.command import run_choose

    cells = line.compose(CellRules(may_be_invalid=True, sizes_vary=True))
    if not (cells[0].composed.cluster.dry_run or line.master.choose.dry_run):
        line.launcher.check()
    trials = line.launcher.trials(Sweep(line.context, line.master, cells), config_label)
    run_choose(cells, line.master, line.make, trials)
    return []


def verify(line: CommandLine) -> list[JobReturn]:
    """Compare the training of every cell with that of the reference. A cell that is invalid is not comparable."""
    from distexp.verify import run_verify

    run_verify(line.compose(CellRules(may_be_invalid=True, sizes_vary=True)), line.master, line.make)
    return []


RUN_DIR = "${hydra.sweep.dir}"
"""Value of ``hydra.run.dir`` in ``config.yaml``."""


def _check_run_dir(master: DictConfig) -> None:
    """Raise ConfigError if a file sets ``hydra.run.dir``, which has an effect on the command line only."""
    typed = cast(list[str], OmegaConf.to_container(master.hydra.overrides.hydra))  # does not resolve ${...}
    chosen = cast(dict[str, str], OmegaConf.to_container(master.hydra.run))["dir"]
    if chosen != RUN_DIR and not sets_key(typed, "hydra.sweep.dir"):
        fixed = "DIR" if "${" in chosen else chosen  # A command line cannot use all references of a file.
        override = shell_quote(sweep_dir_override(Path(fixed), "hydra.run.dir"))
        raise ConfigError(
            f"hydra.run.dir={chosen} has no effect in a file: set hydra.sweep.dir there, or type {override} for a "
            "single run"
        )


DISPATCH: Mapping[Command, Callable[[CommandLine], list[JobReturn]]] = {
    Command.TRAIN: start_runs,
    Command.PREFLIGHT: start_runs,
    Command.PLAN: plan,
    Command.FORECAST: forecast,
    Command.CHOOSE: choose,
    Command.VERIFY: verify,
}


def run_cells(
    context: HydraContext, master: DictConfig, overrides: Sequence[Sequence[str]], options: Mapping[str, Any]
) -> list[JobReturn]:
    """Run the command that was typed. Raise ConfigError if the launcher is not trusted or cannot be imported."""
    command = Command(master.command)
    if command not in (Command.PLAN, Command.FORECAST):  # These make no directory.
        _check_run_dir(master)
    trusted = packages_trusted_by_user(sys.argv[1:])
    launcher = find_launcher(master.cluster._target_, trusted, Launcher)  # type: ignore[type-abstract]
    line = CommandLine(context, master, overrides, launcher, partial(launcher.adjust, options))
    return DISPATCH[command](line)

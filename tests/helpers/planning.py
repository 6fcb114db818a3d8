"""Commands of ``distexp plan`` in the process of the test, with estimates that follow a formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.types import HydraContext, RunMode

from distexp.compose.composition import Cell, CellRules, MakeCell, cell_maker, compose_cells
from distexp.config import Command, Config
from distexp.config.keys import conf_dir, config_groups
from distexp.config.overrides import quote_choice
from distexp.guard.config_files import CheckedConfigLoader
from distexp.plan.estimate import Estimate
from distexp.plan.planner import Outcome, Planner
from tests.helpers.runs import register_schema_once

COMMAND = "command="
STATES_MIB, SAMPLE_MIB, OVERHEAD_MIB = 4_000.0, 1_000.0, 500.0


@contextmanager
def composed(
    shared: Sequence[str], *cells: Sequence[str], config_dir: Path | None = None
) -> Iterator[tuple[list[Cell], MakeCell]]:
    """Compose the cells of a command, and yield them with the function that composes variants.

    Args:
        shared: Overrides of all cells. ``command=NAME`` is the command.
        cells: Further overrides of each cell.
        config_dir: Folder of custom options, as with ``--config-dir``.
    """
    command = next((text.removeprefix(COMMAND) for text in shared if text.startswith(COMMAND)), Command.TRAIN)
    register_schema_once(Command(command))
    fixed = [quote_choice(text, config_groups()) for text in shared if not text.startswith(COMMAND)]
    lists = [[*fixed, *(quote_choice(text, config_groups()) for text in cell)] for cell in cells or ([],)]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        search_path = GlobalHydra.instance().config_loader().get_search_path()
        if config_dir is not None:
            search_path.prepend("command-line", f"file://{config_dir}", "schema")
        loader = CheckedConfigLoader(search_path)
        vars(GlobalHydra.instance().hydra)["config_loader"] = loader
        searches = command == Command.CHOOSE
        master = loader.load_configuration("config", ["hydra.sweep.dir=somewhere"], RunMode.MULTIRUN)
        rules = CellRules(may_be_invalid=searches, sizes_vary=searches)
        context = HydraContext(config_loader=loader, callbacks=Callbacks())
        yield compose_cells(context, master, lists, rules=rules), cell_maker(context, master)


def linear_estimate(config: Config) -> Estimate:
    """Return an estimate that grows with the micro-batch, and shrinks as with real trainings."""
    sample = SAMPLE_MIB * (0.25 if config.train.activation_checkpointing else 1.0)
    sample *= 0.5 if config.train.logits == "targets" else 1.0
    sharded = config.fsdp.sharding == "full_shard" or config.deepspeed.zero_stage == 3
    states = STATES_MIB / (config.cluster.world_size if sharded else 1)
    activations = sample * config.train.micro_batch_size
    needed = states + activations
    return Estimate(
        peak_allocated_mib=needed,
        peak_reserved_mib=1.1 * needed,
        step_mib=needed,
        overhead_mib=OVERHEAD_MIB,
        host_mib=3_000.0,
        phase="backward",
        parts={"parameters": states, "activations": activations},
        curve={"phase": ["forward", "backward"], "parameters": [states] * 2, "activations": [0.0, activations]},
        seconds=7.0,
    )


@dataclass
class FormulaPlanner(Planner):
    """Planner without a cache, whose estimates follow a formula. It counts them."""

    formula: Callable[[Config], Outcome] = linear_estimate
    known: bool = False
    count: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def cached(self, config: Config) -> Estimate | None:
        """Return an estimate as if it was cached."""
        outcome = self.formula(config) if self.known else None
        return outcome if isinstance(outcome, Estimate) else None

    def count_missing(self, configs: Sequence[Config]) -> int:
        """Return 0, because a formula takes no time."""
        return 0

    def estimate(self, configs: Sequence[Config], advance: Callable[[], None] = lambda: None) -> list[Outcome]:
        """Return the estimate of each configuration."""
        self.count += len(configs)
        return [self.formula(config) for config in configs]

"""The cells of a command with their predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from distexp.compose.cells import Cell, MakeCell
from distexp.config import Config
from distexp.config.keys import config_groups, key_of_group, strategy_groups
from distexp.config.model_checks import depends_on_micro_batch
from distexp.config.overrides import format_override, key_of, quote_choice
from distexp.plan.estimate import Estimate
from distexp.plan.fitting_change import MICRO_BATCH, ConfigChange, Search
from distexp.plan.planner import Planner
from distexp.plan.verdict import memory_to_fit_mib, predict
from distexp.runs.record_sections import Predicted
from distexp.runs.texts import join_errors


@dataclass(frozen=True)
class PlannedCell:
    """A cell with its prediction, or the reason why it has none."""

    cell: Cell
    estimate: Estimate | None = None
    predicted: Predicted | None = None
    error: str = ""

    @property
    def overrides(self) -> list[str]:
        """Return the overrides as typed, without those that the command adds."""
        typed = map(format_override, self.cell.overrides)
        return [text for text in typed if not text.startswith("plan.output=")]

    def to_json(self) -> dict[str, object]:
        """Return the cell for programs: its overrides, what is predicted, and the error if there is one."""
        predicted = asdict(self.predicted or Predicted())
        return {"overrides": self.overrides, **predicted, **({"error": self.error} if self.error else {})}


def plan_cells(cells: Sequence[Cell], planner: Planner, advance: Callable[[], None]) -> list[PlannedCell]:
    """Predict all valid cells."""
    outcomes = iter(planner.estimate([cell.config for cell in cells if cell.config is not None], advance))
    planned = []
    for cell in cells:
        outcome = f"invalid: {join_errors(cell.errors)}" if cell.config is None else next(outcomes)
        if cell.config is None or isinstance(outcome, str):
            planned.append(PlannedCell(cell, error=str(outcome)))
        else:
            planned.append(PlannedCell(cell, outcome, predict(outcome, memory_to_fit_mib(cell.config))))
    return planned


def search_of(
    cell: Cell, config: Config, make: MakeCell, planner: Planner, advance: Callable[[], None] = lambda: None
) -> Search | None:
    """Return the search among variants of a cell, which calls ``advance``; None if the memory is unknown."""
    memory = memory_to_fit_mib(config)

    def compose(overrides: Sequence[str]) -> Config | str:
        quoted = [quote_choice(text, config_groups()) for text in overrides]
        variant = make(replace_overrides(cell.overrides, quoted))
        return variant.config or join_errors(variant.errors)

    if memory is None:
        return None
    return Search(config, compose, lambda configs: planner.estimate(configs, advance), memory)


def replace_overrides(overrides: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the overrides of a cell with others, which replace those of the same keys."""
    replaced = {key_of(text) for text in new}
    replaced |= {key for group in replaced if (key := key_of_group(group)) is not None}
    if replaced & strategy_groups().keys():
        replaced |= {"strategy", *strategy_groups()}
    return [*(text for text in overrides if key_of(text) not in replaced), *new]


def change_notes(overrides: Sequence[str], changes: Sequence[ConfigChange], config: Config) -> Iterator[str]:
    """Yield what a user must know to type the changes of a cell with some overrides."""
    keys = [{key_of(text) for text in change.overrides} for change in changes]
    after = [[format_override(text) for text in replace_overrides(overrides, change.overrides)] for change in changes]
    removed = [
        text
        for text in map(format_override, overrides)
        if any(key_of(text) not in new and text not in left for new, left in zip(keys, after, strict=True))
    ]
    if removed:
        yield f"Some changes replace {' '.join(removed)}: remove that from the command."
    if depends_on_micro_batch(config) and any(MICRO_BATCH in new for new in keys):
        yield "A batch norm uses the statistics of a micro-batch, so another micro-batch is another training."

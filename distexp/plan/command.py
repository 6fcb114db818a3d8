"""Output of ``distexp plan`` for the cells that Hydra composed."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from distexp.compose.composition import Cell, MakeCell
from distexp.config import Config
from distexp.config.overrides import format_count
from distexp.exceptions import SweepFailedError, SweepInterrupted
from distexp.plan import plan_table
from distexp.plan.estimate import BASE_ERROR_MIB, CPU_ERROR_BOUND, Estimate
from distexp.plan.fitting_change import (
    MAX_SIZES,
    Search,
    avoidable_parts,
    candidate_overrides,
    largest_avoidable,
    saves_enough,
)
from distexp.plan.plan_table import PlannedCell, change_notes, compose_variant, plan_cells, search_of
from distexp.plan.planner import Planner
from distexp.plan.verdict import FITS, memory_to_fit_mib, verdict_of
from distexp.resolve.resources import launcher_traits
from distexp.system import cgroups, files, units
from distexp.tables.columns import print_plain, shows_live_lines

SLOW_S = 100.0  # time of a prediction from which no variants are predicted

MOST_CHECKED = 2  # most changes that are predicted to name the largest avoidable part

UNKNOWN_MEMORY = {
    "cuda": "hint: set plan.gpu=a100-80gb or plan.gpu_memory_gb=80 for a verdict",
    "cpu": "hint: set cluster.memory_gb or plan.host_memory_gb for a verdict",
}
"""What to type if the memory to plan for is unknown, by device."""

DECIDES = {
    "gpu": "verdict: needs (error up to {error}) is compared with the GPU memory of {memory}",
    "cpu": "verdict: needs (all processes, error up to {error}) is compared with the memory of {memory}",
}
"""Which column decides."""


def run_plan(cells: Sequence[Cell], make: MakeCell, planner: Planner | None = None) -> None:
    """Predict all cells and print the result. Raise SweepFailedError if there is no prediction at all."""
    with planner or Planner() as source:
        configs = [cell.config for cell in cells if cell.config is not None]
        together = _first_variant(cells[0], make) if len(cells) == 1 else []
        with show_predictions(source.count_missing([*configs, *together])) as advance:
            planned = plan_cells(cells, source, advance, together)
        if cells[0].composed.plan.output == "json":
            print(json.dumps(files.nan_to_none([cell.to_json() for cell in planned]), indent=2))
        else:
            _print_tables(planned, make, source)
        if all(cell.predicted is None for cell in planned):
            raise SweepFailedError


def _first_variant(cell: Cell, make: MakeCell) -> list[Config]:
    """Return the variant that probably avoids most memory, to be predicted at the same time; empty if there is none."""
    if cell.config is None or cell.composed.plan.output == "json":
        return []
    first = next(avoidable_parts(cell.config), None)
    variant = compose_variant(cell, make, first.overrides) if first else ""
    return [] if isinstance(variant, str) else [variant]


def _print_tables(planned: Sequence[PlannedCell], make: MakeCell, planner: Planner) -> None:
    console = Console()
    for line in dict.fromkeys(plan_table.training_lines(planned)):
        print_plain(console, line)
    for part in plan_table.cells_table(planned, console.width):
        console.print(part, soft_wrap=True)
    notes = plan_table.sample_notes, plan_table.sharding_notes, _assumptions, plan_table.notes
    for line in dict.fromkeys(line for lines_of in notes for line in lines_of(planned)):
        console.print(line, style="dim", highlight=False, markup=False, emoji=False, soft_wrap=True)
    if len(planned) > 1 and planned[0].cell.composed.plan.search:
        print_plain(console, "no search for what fits, because there are several configurations")
    if len(planned) == 1:
        _print_details(planned[0], make, planner, console)


def _assumptions(planned: Sequence[PlannedCell]) -> Iterator[str]:
    found = [(cell.predicted, cell.cell.config) for cell in planned]
    known = [(predicted, config) for predicted, config in found if predicted is not None and config is not None]
    configs = [config for _, config in known]
    unknown = {config.cluster.device for config in configs if memory_to_fit_mib(config) is None}
    yield from (hint for device, hint in UNKNOWN_MEMORY.items() if device in unknown)
    names_no_gpu = any(
        config.cluster.device == "cuda"
        and config.plan.gpu is None
        and config.plan.gpu_memory_gb is None
        and launcher_traits(config).runs_here
        for config in configs
    )
    if names_no_gpu and not cgroups.visible_gpus():
        yield "this is for GPUs, but a run on this machine would use its CPUs: set cluster.device=cpu to predict that"
    memories = {
        (kind, memory, predicted.error_bound)
        for predicted, _ in known
        for kind, memory in (("gpu", predicted.gpu_memory_mib), ("cpu", predicted.host_memory_mib))
        if memory is not None and predicted.error_bound is not None
    }
    for kind, memory, error in sorted(memories):
        is_constant = kind == "cpu" and error > CPU_ERROR_BOUND  # as for the processes of a tiny model
        bound = f"{BASE_ERROR_MIB:.0f} MiB per node" if is_constant else f"{100 * error:.0f} %"
        yield DECIDES[kind].format(memory=units.format_memory(memory), error=bound)


def _print_details(planned: PlannedCell, make: MakeCell, planner: Planner, console: Console) -> None:
    """Print the parts of a single cell, the largest micro-batch, and what would make it fit."""
    predicted, estimate, config = planned.predicted, planned.estimate, planned.cell.config
    if predicted is None or estimate is None or config is None:
        return
    if predicted.parts:
        print_plain(console, f"\n{plan_table.parts_title(predicted, config)}\n")
        console.print(plan_table.parts_table(predicted))
    if estimate.traced and (line := _why_line(planned.cell, estimate, config, make, planner)):
        print_plain(console, line)
    if memory_to_fit_mib(config) is None or not estimate.traced or estimate.error_bound is None:
        if config.plan.search:
            print_plain(console, "no search for what fits, because there is no verdict")
        return
    if verdict_of(estimate, memory_to_fit_mib(config)) == FITS and not config.plan.search:
        print_plain(console, "for the largest micro-batch that fits, add plan.search=true")
        return
    if estimate.seconds > SLOW_S:
        print_plain(console, f"no search for what fits, because a prediction takes {estimate.seconds:.0f} s")
        return

    def search(advance: Callable[[], None]) -> Search:
        found = search_of(planned.cell, config, make, planner, advance)
        assert found is not None, "the memory is known"
        return found

    try:
        _print_search(planned, config, estimate, search, console)
        if (override := plan_table.full_data_override(planned)) is not None:
            with show_search(f"what {override} needs", 1) as advance:
                found = search(advance)
                variant = found.variant(override)
            if variant is not None:
                print_plain(console, f"with {plan_table.describe_change(variant, found.memory_mib)}")
    except KeyboardInterrupt:
        raise SweepInterrupted("the search for what fits was interrupted; the prediction is complete") from None


def _why_line(cell: Cell, estimate: Estimate, config: Config, make: MakeCell, planner: Planner) -> str:
    """Return the line about the largest part that is avoidable; empty if no change saves enough, by its prediction."""
    for avoidable in largest_avoidable(config, estimate)[:MOST_CHECKED]:
        variant = compose_variant(cell, make, avoidable.overrides)
        if isinstance(variant, str):
            continue
        with show_predictions(planner.count_missing([variant])) as advance:
            (outcome,) = planner.estimate([variant], advance)
        if isinstance(outcome, Estimate) and saves_enough(estimate, outcome):
            return plan_table.avoidable_line(avoidable, estimate, outcome, config)
    return ""


def _print_search(
    planned: PlannedCell,
    config: Config,
    estimate: Estimate,
    search: Callable[[Callable[[], None]], Search],
    console: Console,
) -> None:
    """Print the largest micro-batch of a configuration, and what would make it fit."""
    remark = f" (about {estimate.seconds:.0f} s a variant; Ctrl-C skips the search)"
    with show_search("the largest micro-batch", MAX_SIZES, remark) as advance:
        largest = search(advance).largest_micro_batch(estimate)
    print_plain(console, plan_table.micro_batch_line(largest))
    memory_mib = memory_to_fit_mib(config)
    if verdict_of(estimate, memory_mib) == FITS or memory_mib is None:
        return
    with show_search("what fits", len(list(candidate_overrides(config, largest))), remark) as advance:
        changes = search(advance).changes(largest)
    for line in plan_table.change_lines(changes, memory_mib, config.cluster.device, estimate.required_mib):
        print_plain(console, line)
    for note in change_notes(planned.cell.overrides, changes, config):
        print_plain(console, note)


@contextmanager
def show_predictions(total: int, remark: str = "") -> Iterator[Callable[[], None]]:
    """Show on stderr that memory is predicted; yield a function to call after each prediction that is not cached."""
    console = Console(stderr=True)
    if not shows_live_lines(console) or not total:
        if total:
            _print(f"predicting the memory of {format_count(total, 'configuration')}{remark}")
        yield lambda: None
        return
    columns = (TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


@contextmanager
def show_search(title: str, most: int, remark: str = "") -> Iterator[Callable[[], None]]:
    """Show on stderr how many of the most variants are predicted; yield a function to call after each one."""
    console, title, done = Console(stderr=True), f"searching for {title}", 0
    status = console.status(f"{title}{remark}") if shows_live_lines(console) else None

    def advance() -> None:
        nonlocal done
        done += 1
        text = f"{done} of at most {format_count(most, 'variant')} predicted"
        if status is None:
            _print(text)
        else:
            status.update(f"{title}: {text}{remark}")

    if status is None:
        _print(f"{title}{remark}")
    with status or nullcontext():
        yield advance


def _print(text: str) -> None:
    print(f"distexp: {text}", file=sys.stderr)

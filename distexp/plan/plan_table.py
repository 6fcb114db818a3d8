"""What ``distexp plan`` prints: the table of the cells, the parts of a single one, and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf

from rich.table import Table
from rich.text import Text

from distexp.compose.composition import Cell, MakeCell
from distexp.config import Config, model_checks
from distexp.config.keys import config_groups, key_of_group, strategy_groups
from distexp.config.overrides import format_override, join_first, key_of, quote_choice, sets_key
from distexp.plan import verdict
from distexp.plan.estimate import Estimate
from distexp.plan.fitting_change import MICRO_BATCH, AvoidablePart, ConfigChange, LargestMicroBatch, Search
from distexp.plan.planner import Planner
from distexp.runs.record_sections import Predicted
from distexp.runs.texts import join_errors, model_label
from distexp.strategies.base import load_strategy, strategy_label
from distexp.system.units import MIB_PER_GIB, format_memory
from distexp.tables.columns import ALWAYS, Column, build_table, fitted_table

UNKNOWN = "-"
MAX_NAMED_CELLS = 3  # most cells with the same error that are named


def cells_table(cells: Sequence[PlannedCell], width: int) -> list[Table | Text]:
    """Return the table with a row per cell, the reasons of cells without a prediction, and what is hidden."""
    planned = [cell for cell in cells if cell.predicted is not None]
    found: list[Table | Text] = []
    if planned:
        found += fitted_table(_columns(planned), width, "Print them with --json.")
    return [*found, *(Text(line, style="yellow") for line in _error_lines(cells))]


def _error_lines(cells: Sequence[PlannedCell]) -> Iterator[str]:
    by_error: dict[str, list[PlannedCell]] = {}
    for cell in cells:
        if cell.error:
            by_error.setdefault(cell.error, []).append(cell)
    for error, same in by_error.items():
        if len(cells) == 1:
            yield error
        elif len(same) == 1:
            yield f"{' '.join(_varied(same[0]))}: {error}"
        elif len(same) == len(cells):
            yield f"all {len(cells)} cells: {error}"
        else:
            names = join_first((" ".join(_varied(cell)) for cell in same), MAX_NAMED_CELLS)
            yield f"{len(same)} cells ({names}): {error}"


def _columns(cells: Sequence[PlannedCell]) -> list[Column]:
    configs = [cell.cell.config for cell in cells if cell.cell.config is not None]
    found = [cell.predicted for cell in cells if cell.predicted is not None]
    # On CPUs the peak of a worker is not the memory that decides.
    on_cpus = any(config.cluster.device == "cpu" for config in configs)
    workers, peak = ("workers", "peak of\na worker") if on_cpus else ("GPUs", "peak")
    columns = [
        Column("cell", tuple(" ".join(map(_without_section, _varied(cell))) for cell in cells), ALWAYS, right=False),
        Column("strategy", tuple(map(strategy_label, configs)), 95, right=False),
        Column(workers, tuple(str(config.cluster.world_size) for config in configs), 90),
        Column("micro-\nbatch", tuple(_micro_batch(config, "") for config in configs), ALWAYS),
        Column(peak, tuple(_or_states(cell.peak_allocated_mib, cell) for cell in found), 92),
        Column("reserved", tuple(_memory(cell.peak_reserved_mib) for cell in found), 80),
        Column("nvidia-smi", tuple(_memory(cell.nvidia_smi_mib) for cell in found), 70),
        Column("host", tuple(_memory(cell.host_peak_mib) for cell in found), 75),
        Column("phase", tuple(cell.phase or UNKNOWN for cell in found), 50, right=False),
        Column("needs", tuple(_or_states(cell.required_mib, cell) for cell in found), ALWAYS),
        Column("verdict", tuple(map(verdict.describe_verdict, found)), ALWAYS, right=False),
    ]
    known = [column for column in columns if set(column.cells) != {UNKNOWN}]
    return known if len(cells) > 1 else known[1:]


def _varied(cell: PlannedCell) -> list[str]:
    return [format_override(text) for text in cell.cell.varied]


def _without_section(override: str) -> str:
    key, equals, value = override.partition("=")
    return f"{key.rpartition('.')[2]}{equals}{value}"


def _micro_batch(config: Config, unit: str) -> str:
    """Return the micro-batch, and the accumulation with a unit: ``4 x 2 accumulation``."""
    steps = config.train.gradient_accumulation_steps
    return f"{config.train.micro_batch_size}" + (f" x {steps}{unit}" if steps > 1 else "")


def _or_states(mib: float | None, predicted: Predicted) -> str:
    """Return a memory, or the model states if nothing else is known."""
    return f"over {_memory(sum(predicted.parts.values()))}" if mib is None and predicted.parts else _memory(mib)


def _memory(mib: float | None) -> str:
    return UNKNOWN if mib is None else format_memory(mib, digits=2)


def parts_title(predicted: Predicted, config: Config) -> str:
    """Return the line above the parts: the time of the peak, because a part may be larger at another time."""
    worker = "worker" if config.cluster.device == "cpu" else "GPU"
    title = f"Memory of one {worker} by part"
    if predicted.phase is None:
        return title
    return f"{title}, at the peak in the phase {predicted.phase}. At other times a part may be larger."


def parts_table(predicted: Predicted) -> Table:
    """Return what the peak is made of."""
    total = sum(predicted.parts.values()) or 1.0
    parts = {name.replace("_", " "): mib for name, mib in predicted.parts.items()}
    return build_table(
        [
            Column("part", tuple(parts), ALWAYS, right=False),
            Column("memory", tuple(map(_memory, parts.values())), ALWAYS),
            Column("%", tuple(f"{100 * mib / total:.0f}" for mib in parts.values()), ALWAYS),
        ]
    )


def notes(cells: Sequence[PlannedCell]) -> Iterator[str]:
    """Yield the assumptions of all cells."""
    for cell in cells:
        label = " ".join(_varied(cell)) if len(cells) > 1 else ""
        for note in cell.predicted.notes if cell.predicted else ():
            yield f"{label}: {note}" if label and note.startswith("not traced:") else note


def micro_batch_line(largest: LargestMicroBatch) -> str:
    """Return the line about the largest micro-batch."""
    if largest.one_may_fit:
        return "largest micro-batch that fits: not certain for 1"
    if largest.size is None:
        return "not even a micro-batch of 1 fits" if largest.is_exact else "no micro-batch found that fits"
    size = f"{largest.size}" if largest.is_exact else f"at least {largest.size}"
    reason = largest.invalid or ("" if largest.is_exact else "sizes between it and one that does not fit are not known")
    return f"largest micro-batch that fits: {size}" + (f" ({reason})" if reason else "")


def avoidable_line(avoidable: AvoidablePart, estimate: Estimate, variant: Estimate, config: Config) -> str:
    """Return which part is avoidable, and what the training needs with the change, which is another prediction."""
    change = " ".join(avoidable.overrides)
    needed = f"{_memory(variant.required_mib)} instead of {_memory(estimate.required_mib)}"
    line = f"{_memory(estimate.parts[avoidable.part])} are {avoidable.reason}: {change} needs {needed}"
    if (steps := config.train.gradient_accumulation_steps) > 1 and change == "train.gradient_accumulation_steps=1":
        samples = config.train.micro_batch * config.data_parallel
        line += f", with a global batch of {samples} samples instead of {samples * steps}"
    return line


def change_lines(
    changes: Sequence[ConfigChange], memory_mib: float, device: str, required_mib: float | None
) -> Iterator[str]:
    """Yield the smallest change that makes a training fit, and what each change needs that reduces the memory."""
    may_fit = any(verdict.verdict_of(change.estimate, memory_mib) in (verdict.TOO_CLOSE, None) for change in changes)
    less = [change for change in changes if (change.estimate.required_mib or inf) < (required_mib or inf)]
    verdicts = [verdict.verdict_of(change.estimate, memory_mib) for change in less]
    if verdict.FITS in verdicts:
        yield f"smallest change that makes it fit: {' '.join(less[verdicts.index(verdict.FITS)].overrides)}"
    else:
        makes = "is certain to make" if may_fit else "makes"
        yield f"no change {makes} it fit: {verdict.LARGER_MACHINE[device]}"
    for wanted in (verdict.FITS, verdict.TOO_CLOSE, None, verdict.DOES_NOT_FIT):
        for change, known in zip(less, verdicts, strict=True):
            if known == wanted:
                yield f"  {describe_change(change, memory_mib)}"


def describe_change(change: ConfigChange, memory_mib: float) -> str:
    """Return overrides with what the training then needs: ``train.logits=targets: needs 4.88 GiB, fits, 9 % free``."""
    predicted = verdict.predict(change.estimate, memory_mib)
    needed, result = _memory(predicted.required_mib), verdict.describe_verdict(predicted)
    return f"{' '.join(change.overrides)}: needs {needed}, {result}"


@dataclass(frozen=True)
class FullData:
    """The dataset of which a sample imitates a part: its name, and the size of its texts or images."""

    name: str
    key: str
    size: int


FULL_DATA = {
    "squad_sample": FullData("squad", "max_length", 512),
    "tinyimagenet_sample": FullData("tinyimagenet", "image_size", 64),
}
"""The samples whose texts or images are smaller than those of the dataset. They need less memory."""


def training_lines(cells: Sequence[PlannedCell]) -> Iterator[str]:
    """Yield a line for each training, such as ``gpt on squad: 512 tokens, bf16, micro-batch 4 x 2 accumulation``."""
    for config in (cell.cell.config for cell in cells if cell.cell.config is not None):
        # The table has the micro-batches of several cells.
        batch = f"micro-batch {_micro_batch(config, ' accumulation')}" if len(cells) == 1 else ""
        model = model_label(config.model.name, config.scale.name)
        sizes = ", ".join(filter(None, [_data_size(config), config.precision.name, batch]))
        yield f"{model} on {config.dataset.name}: {sizes}"


def _data_size(config: Config) -> str:
    dataset = config.dataset
    if config.model.traits.is_image:
        return f"images of {dataset.image_size} x {dataset.image_size}" if dataset.image_size else ""
    length = dataset.max_length or config.model.seq_length
    is_limit = dataset.bucketing or dataset.padding == "longest"
    return f"{'up to ' if is_limit else ''}{length} tokens" if length else ""


def sample_notes(cells: Sequence[PlannedCell]) -> Iterator[str]:
    """Yield what to type if trainings with a large peak have data that is smaller than the real data."""
    for cell in cells:
        override, config = full_data_override(cell), cell.cell.config
        if override is not None and config is not None:
            dataset, full = config.dataset, FULL_DATA[config.dataset.name]
            size = f"{full.key}={getattr(dataset, full.key)}"
            yield f"note: {dataset.name} has {size}, so it needs less memory than {full.name}: type {override}"


def sharding_notes(cells: Sequence[PlannedCell]) -> Iterator[str]:
    """Yield a note if the only worker of a training has all that its strategy would shard."""
    configs = [cell.cell.config for cell in cells if cell.cell.config is not None]
    sharding = [config for config in configs if load_strategy(config).keeps_states_whole(config) is False]
    if sharding and all(config.cluster.world_size == 1 for config in sharding):
        yield "note: with one worker nothing is sharded: type, for example, cluster.workers_per_node=4"


def full_data_override(cell: PlannedCell) -> str | None:
    """Return what to type for data of the real size; None if it is set or smaller anyway, or the training small."""
    config, predicted = cell.cell.config, cell.predicted
    if config is None or predicted is None:
        return None
    full = FULL_DATA.get(config.dataset.name)
    size = getattr(config.dataset, full.key) if full else None
    peak_mib = predicted.peak_allocated_mib or sum(predicted.parts.values())
    # From 1 GiB on, a sample of a dataset is unlikely to be the data of the real training.
    if full is None or size is None or size >= full.size or peak_mib < MIB_PER_GIB:
        return None
    if sets_key(cell.cell.overrides, f"dataset.{full.key}"):
        return None
    if (config.model.seq_length or full.size) < full.size:  # The model cannot have longer texts.
        return None
    return f"dataset.{full.key}={full.size}"


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


def plan_cells(
    cells: Sequence[Cell], planner: Planner, advance: Callable[[], None], together: Sequence[Config] = ()
) -> list[PlannedCell]:
    """Predict all valid cells, and other configurations at the same time, whose estimates are then in the cache."""
    configs = [cell.config for cell in cells if cell.config is not None]
    outcomes = iter(planner.estimate([*configs, *together], advance))
    planned = []
    for cell in cells:
        outcome = f"invalid: {join_errors(cell.errors)}" if cell.config is None else next(outcomes)
        if cell.config is None or isinstance(outcome, str):
            planned.append(PlannedCell(cell, error=str(outcome)))
        else:
            planned.append(PlannedCell(cell, outcome, verdict.predict(outcome, verdict.memory_to_fit_mib(cell.config))))
    return planned


def search_of(
    cell: Cell, config: Config, make: MakeCell, planner: Planner, advance: Callable[[], None] = lambda: None
) -> Search | None:
    """Return the search among variants of a cell, which calls ``advance``; None if the memory is unknown."""
    memory = verdict.memory_to_fit_mib(config)
    if memory is None:
        return None
    compose = partial(compose_variant, cell, make)
    return Search(config, compose, lambda configs: planner.estimate(configs, advance), memory)


def compose_variant(cell: Cell, make: MakeCell, overrides: Sequence[str]) -> Config | str:
    """Return the configuration of a cell with further overrides, or why it is invalid."""
    quoted = [quote_choice(text, config_groups()) for text in overrides]
    variant = make(replace_overrides(cell.overrides, quoted))
    return variant.config or join_errors(variant.errors)


def replace_overrides(overrides: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the overrides of a cell with others, which replace those of the same keys."""
    replaced = {key_of(text) for text in new}
    replaced |= {key for group in replaced if (key := key_of_group(group)) is not None}
    if replaced & strategy_groups().keys():
        replaced |= {"strategy", *strategy_groups()}
    return [*(text for text in overrides if key_of(text) not in replaced), *new]


def replaced_overrides(overrides: Sequence[str], changes: Sequence[ConfigChange]) -> list[str]:
    """Return those of the overrides of a cell that contradict some changes, without those of the same keys."""
    keys = [{key_of(text) for text in change.overrides} for change in changes]
    after = [[format_override(text) for text in replace_overrides(overrides, change.overrides)] for change in changes]
    return [
        text
        for text in map(format_override, overrides)
        if any(key_of(text) not in new and text not in left for new, left in zip(keys, after, strict=True))
    ]


def change_notes(overrides: Sequence[str], changes: Sequence[ConfigChange], config: Config) -> Iterator[str]:
    """Yield what a user must know to type the changes of a cell with some overrides."""
    if removed := replaced_overrides(overrides, changes):
        yield f"Some changes replace {' '.join(removed)}: remove that from the command."
    changes_size = any(key_of(text) == MICRO_BATCH for change in changes for text in change.overrides)
    if model_checks.depends_on_micro_batch(config) and changes_size:
        yield "A batch norm or a router loss uses statistics of a micro-batch, so another size is another training."

"""What ``distexp plan`` prints: the table of the cells, the parts of a single one, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from rich.table import Table
from rich.text import Text

from distexp.config import Config
from distexp.config.overrides import format_override, join_first, sets_key
from distexp.plan.fitting_change import ConfigChange, LargestMicroBatch
from distexp.plan.planned_cells import PlannedCell, smallest_change
from distexp.plan.verdict import DOES_NOT_FIT, FITS, LARGER_MACHINE, TOO_CLOSE, describe_verdict, predict, verdict_of
from distexp.runs.record_sections import Predicted
from distexp.runs.texts import model_label
from distexp.strategies.base import load_strategy
from distexp.system.units import MIB_PER_GB, format_memory
from distexp.tables.columns import ALWAYS, Column, build_table, fitted_table

STYLES = {FITS: "green", TOO_CLOSE: "yellow", DOES_NOT_FIT: "red"}
NOT_TRACED = "not traced:"
UNKNOWN = "-"
MAX_NAMED_CELLS = 3
"""Most cells with the same error that are named."""

LABELS = {"optimizer_states": "optimizer states"}


def cells_table(cells: Sequence[PlannedCell], width: int) -> list[Table | Text]:
    """Return the table with a row per cell, the reasons of cells without a prediction, and what is hidden."""
    planned = [cell for cell in cells if cell.predicted is not None]
    found: list[Table | Text] = []
    if planned:
        found += fitted_table(_columns(planned), width, "Print them with --json.")
    return [*found, *(Text(line, style="yellow") for line in _error_lines(cells))]


def _error_lines(cells: Sequence[PlannedCell]) -> Iterator[str]:
    """Yield each error once, with the cells that it concerns."""
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
    columns = [
        Column("cell", tuple(" ".join(map(_without_section, _varied(cell))) for cell in cells), 96, right=False),
        Column("strategy", tuple(cell.title for cell in cells), 95, right=False),
        Column(_workers_title(configs), tuple(str(config.cluster.world_size) for config in configs), 90),
        Column("micro-\nbatch", tuple(map(_micro_batch, configs)), ALWAYS),
        Column(_peak_title(configs), tuple(_or_states(cell.peak_allocated_mib, cell) for cell in found), 92),
        Column("reserved", tuple(_memory(cell.peak_reserved_mib) for cell in found), 80),
        Column("nvidia-smi", tuple(_memory(cell.nvidia_smi_mib) for cell in found), 70),
        Column("host", tuple(_memory(cell.host_peak_mib) for cell in found), 75),
        Column("phase", tuple(cell.phase or UNKNOWN for cell in found), 50, right=False),
        Column("needs", tuple(_or_states(cell.required_mib, cell) for cell in found), ALWAYS),
        Column("verdict", tuple(cell.verdict for cell in cells), ALWAYS, right=False),
    ]
    known = [column for column in columns if set(column.cells) != {UNKNOWN}]
    return known if len(cells) > 1 else known[1:]


def _workers_title(configs: Sequence[Config]) -> str:
    return "workers" if _on_cpus(configs) else "GPUs"


def _peak_title(configs: Sequence[Config]) -> str:
    """Return the title of the peak. On CPUs it is not the peak of the memory that decides."""
    return "peak of\na worker" if _on_cpus(configs) else "peak"


def _on_cpus(configs: Sequence[Config]) -> bool:
    return any(config.cluster.device == "cpu" for config in configs)


def _varied(cell: PlannedCell) -> list[str]:
    return [format_override(text) for text in cell.cell.varied]


def _without_section(override: str) -> str:
    key, equals, value = override.partition("=")
    return f"{key.rpartition('.')[2]}{equals}{value}"


def _micro_batch(config: Config) -> str:
    steps = config.train.gradient_accumulation_steps
    return f"{config.train.micro_batch_size}" + (f" x {steps}" if steps > 1 else "")


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
    parts = {LABELS.get(name, name): mib for name, mib in predicted.parts.items()}
    return build_table(
        [
            Column("part", tuple(parts), ALWAYS, right=False),
            Column("memory", tuple(map(_memory, parts.values())), ALWAYS),
            Column("%", tuple(f"{100 * mib / total:.0f}" for mib in parts.values()), ALWAYS),
        ]
    )


def notes(cells: Sequence[PlannedCell]) -> list[str]:
    """Return the assumptions of all cells, each one once."""
    several = len(cells) > 1
    found = [(cell, note) for cell in cells for note in (cell.predicted.notes if cell.predicted else [])]
    labels = ((" ".join(_varied(cell)) if several and note.startswith(NOT_TRACED) else "") for cell, note in found)
    return list(
        dict.fromkeys(f"{label}: {note}" if label else note for label, (_, note) in zip(labels, found, strict=True))
    )


def micro_batch_line(largest: LargestMicroBatch) -> str:
    """Return the line about the largest micro-batch."""
    if largest.one_may_fit:
        return "largest micro-batch that fits: not certain for 1"
    if largest.size is None:
        return "not even a micro-batch of 1 fits" if largest.is_exact else "no micro-batch found that fits"
    size = f"{largest.size}" if largest.is_exact else f"at least {largest.size}"
    reason = largest.invalid or ("" if largest.is_exact else "sizes between it and one that does not fit are not known")
    return f"largest micro-batch that fits: {size}" + (f" ({reason})" if reason else "")


def change_lines(
    changes: Sequence[ConfigChange], memory_mib: float, device: str, required_mib: float | None
) -> Iterator[str]:
    """Yield the smallest change that makes a training fit, and what all changes need that reduce the memory.

    Args:
        changes: The changes, the smallest one first.
        memory_mib: Memory of the GPU, or of the node for a run on CPUs.
        device: cuda or cpu.
        required_mib: Memory that the training needs without a change.
    """
    may_fit = any(verdict_of(change.estimate, memory_mib) in (TOO_CLOSE, None) for change in changes)
    less = [change for change in changes if (change.estimate.required_mib or inf) < (required_mib or inf)]
    best, verdicts = smallest_change(less, memory_mib), [verdict_of(change.estimate, memory_mib) for change in less]
    if best is not None:
        yield f"smallest change that makes it fit: {' '.join(best.overrides)}"
    else:
        makes = "is certain to make" if may_fit else "makes"
        yield f"no change {makes} it fit: {LARGER_MACHINE[device]}"
    for wanted in (FITS, TOO_CLOSE, None, DOES_NOT_FIT):
        for change, verdict in zip(less, verdicts, strict=True):
            if verdict == wanted:
                yield f"  {describe_change(change, memory_mib)}"


def describe_change(change: ConfigChange, memory_mib: float) -> str:
    """Return overrides with what the training then needs: ``train.logits=targets: needs 4.88 GB, fits, 9 % free``."""
    predicted = predict(change.estimate, memory_mib)
    return f"{' '.join(change.overrides)}: needs {_memory(predicted.required_mib)}, {describe_verdict(predicted)}"


# What ``distexp plan`` prints about the trainings that it predicts: model, data, and the size of the data.


LARGE_MIB = 1.0 * MIB_PER_GB
"""Peak from which a sample of a dataset is unlikely to be the data of the real training."""


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


def training_lines(cells: Sequence[PlannedCell]) -> list[str]:
    """Return a line for each training, such as ``gpt on squad: 512 tokens, bf16, micro-batch 4 x 2 accumulation``.

    The micro-batch is that of a single cell. The table has those of several.
    """
    configs = [cell.cell.config for cell in cells if cell.cell.config is not None]
    return list(dict.fromkeys(_training_line(config, with_micro_batch=len(cells) == 1) for config in configs))


def _training_line(config: Config, *, with_micro_batch: bool) -> str:
    sizes = [_data_size(config), config.precision.name, _micro_batch_text(config) if with_micro_batch else ""]
    model = model_label(config.model.name, config.scale.name)
    return f"{model} on {config.dataset.name}: {', '.join(filter(None, sizes))}"


def _data_size(config: Config) -> str:
    """Return the size of the texts or images; empty if it is not known."""
    dataset = config.dataset
    if config.model.task == "image_classification":
        return f"images of {dataset.image_size} x {dataset.image_size}" if dataset.image_size else ""
    length = dataset.max_length or config.model.seq_length
    is_limit = dataset.bucketing or dataset.padding == "longest"
    return f"{'up to ' if is_limit else ''}{length} tokens" if length else ""


def _micro_batch_text(config: Config) -> str:
    steps = config.train.gradient_accumulation_steps
    return f"micro-batch {config.train.micro_batch_size}" + (f" x {steps} accumulation" if steps > 1 else "")


def sample_notes(cells: Sequence[PlannedCell]) -> list[str]:
    """Return what to type if trainings with a large peak have data that is smaller than the real data."""
    return list(dict.fromkeys(note for cell in cells for note in _sample_note(cell)))


def _sample_note(cell: PlannedCell) -> Iterator[str]:
    override, config = full_data_override(cell), cell.cell.config
    if override is not None and config is not None:
        full = FULL_DATA[config.dataset.name]
        yield (
            f"note: {config.dataset.name} has {full.key}={getattr(config.dataset, full.key)}, so it needs less memory "
            f"than {full.name}: type {override}"
        )


def sharding_notes(cells: Sequence[PlannedCell]) -> list[str]:
    """Return a note if the only worker of a training has all that its strategy would shard."""
    configs = [cell.cell.config for cell in cells if cell.cell.config is not None]
    sharding = [config for config in configs if load_strategy(config).keeps_states_whole(config) is False]
    if not sharding or any(config.cluster.world_size > 1 for config in sharding):
        return []
    return ["note: with one worker nothing is sharded: type, for example, cluster.workers_per_node=4"]


def full_data_override(cell: PlannedCell) -> str | None:
    """Return what to type for texts or images of the real size.

    It is None if the training has them, if the user has typed their size, or if the training is small.
    """
    config, predicted = cell.cell.config, cell.predicted
    if config is None or predicted is None:
        return None
    full = FULL_DATA.get(config.dataset.name)
    size = getattr(config.dataset, full.key) if full else None
    peak_mib = predicted.peak_allocated_mib or sum(predicted.parts.values())
    if full is None or size is None or size >= full.size or peak_mib < LARGE_MIB:
        return None
    if sets_key(cell.cell.overrides, f"dataset.{full.key}"):
        return None
    if (config.model.seq_length or full.size) < full.size:  # The model cannot have longer texts.
        return None
    return f"dataset.{full.key}={full.size}"

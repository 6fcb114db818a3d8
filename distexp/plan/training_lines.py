"""What ``distexp plan`` prints about the trainings that it predicts: model, data, and the size of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.config import Config
from distexp.config.override_text import sets_key
from distexp.plan.cells import PlannedCell
from distexp.runs.model_label import model_label
from distexp.strategies.base import load_strategy
from distexp.system.units import MIB_PER_GB

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
    sizes = [_data_size(config), config.precision.name, _micro_batch(config) if with_micro_batch else ""]
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


def _micro_batch(config: Config) -> str:
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

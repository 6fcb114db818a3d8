"""Notes below the workshop's tables that are computed from the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distexp.report.data.metrics import NOT_OFFLOADED
from distexp.report.data.repeats import RunGroup
from distexp.report.exercises.layout import Layout

OVERALL_SPEED = "train_samples_per_second_overall"
Groups = Sequence[RunGroup]


def table_notes(layout: Layout, groups: Groups) -> Iterator[str]:
    """Yield the notes of a layout: computed ones by name, others as they are."""
    for note in layout.notes:
        yield COMPUTED[note](groups) if note in COMPUTED else note


def describe_scale(groups: Groups) -> str:
    """Warn if the runs were made small with ``scale``."""
    scales = {(group.rows[0].record.config.get("scale") or {}).get("name", "full") for group in groups}
    small = sorted(scales - {"full"})
    if not small:
        return ""
    return f"scale={small[0]}: small model, few samples. Do not compare this table with the workshop's numbers."


def _speed_with_evaluation(groups: Groups) -> str:
    """Return the speed as the Trainer computes it, with evaluation time."""
    speed = groups[0].metric(OVERALL_SPEED)
    if speed is None or not groups[0].completed:
        return ""
    return f"The workshop's samples/s include evaluation time. With it, this run has {speed.mean:,.2f} samples/s."


def _random_weights(groups: Groups) -> str:
    if groups[0].rows[0].record.config["model"]["init"] == "pretrained":
        return ""
    return "These losses start from random weights. Use model.init=pretrained for the published weights."


def _lowest_memory_by_model(groups: Groups) -> str:
    """Name the ZeRO stage with the lowest memory for each model: a question of the workshop.

    Without a GPU these are the parts of a worker's memory that are not offloaded.
    """
    if best := _lowest_by_model(groups, "gpu_peak_mib"):
        found = [f"stage {lowest.zero_stage} on {model} ({lowest.mib:,.0f} MiB)" for model, lowest in best.items()]
        return f"Lowest peak GPU memory: {', '.join(found)}."
    if best := _lowest_by_model(groups, NOT_OFFLOADED):
        found = [f"stage {lowest.zero_stage} on {model} ({lowest.mib:,.3f} MiB)" for model, lowest in best.items()]
        return f"Lowest memory that a GPU would hold: {', '.join(found)}."
    return ""


@dataclass(frozen=True)
class _LowestMemory:
    mib: float
    zero_stage: Any


def _lowest_by_model(groups: Groups, metric: str) -> dict[str, _LowestMemory]:
    """Return the lowest value of a memory metric for each model, with its ZeRO stage."""
    best: dict[str, _LowestMemory] = {}
    for group in groups:
        size, model = group.metric(metric), str(group.setting("model"))
        if group.completed and size and (model not in best or size.mean < best[model].mib):
            best[model] = _LowestMemory(size.mean, group.setting("zero_stage"))
    return best


COMPUTED: dict[str, Callable[[Groups], str]] = {
    "speed_with_evaluation": _speed_with_evaluation,
    "random_weights": _random_weights,
    "lowest_memory_by_model": _lowest_memory_by_model,
}
"""Notes by their names in ``workshop.yaml``."""

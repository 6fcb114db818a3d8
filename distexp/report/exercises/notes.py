"""Notes below the workshop's tables that are computed from the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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
    return f"scale={small[0]}: small model, few samples. Only the layout of this table is meaningful." if small else ""


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
    """Find the ZeRO stage with the lowest peak GPU memory for each model: a question of the workshop."""
    best: dict[str, tuple[float, object]] = {}
    for group in groups:
        peak, model = group.metric("gpu_peak_mib"), str(group.setting("model"))
        if group.completed and peak and (model not in best or peak.mean < best[model][0]):
            best[model] = peak.mean, group.setting("zero_stage")
    found = [f"stage {stage} on {model} ({peak:,.0f} MiB)" for model, (peak, stage) in best.items()]
    return f"Lowest peak GPU memory: {', '.join(found)}." if found else ""


COMPUTED: dict[str, Callable[[Groups], str]] = {
    "speed_with_evaluation": _speed_with_evaluation,
    "random_weights": _random_weights,
    "lowest_memory_by_model": _lowest_memory_by_model,
}
"""Notes by their names in ``workshop.yaml``."""

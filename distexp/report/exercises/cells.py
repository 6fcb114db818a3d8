"""What stands in a cell: a figure of a training, or why there is none."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from distexp.report.data.failures import failure_reasons
from distexp.report.data.repeats import RunGroup
from distexp.report.data.settings import format_setting

Read = Callable[[RunGroup, RunGroup | None], list[float]]
"""The values of a training's runs; its second argument is the training that others are measured against."""

MIB_IN_GB = 2**20 / 1e9
MIB_IN_GIB = 1 / 1024


@dataclass(frozen=True)
class Measure:
    """A row or column of figures."""

    title: str
    read: Read
    form: str = "{:,.1f}"
    category: str = ""
    gpu: bool = False  # nothing to measure without a GPU
    survives: bool = False  # a run that broke has it too
    text: Callable[[RunGroup], str] | None = None  # in words, instead of a figure


def worded(measure: Measure, group: RunGroup | None, base: RunGroup | None, *, first: bool) -> str:
    """A cell's text; the ``first`` cell of a training that broke says why."""
    if group is None:
        return "not run" if first else ""
    if not group.completed:
        return _broken(measure, group, first=first)
    if measure.text is not None:
        return measure.text(group)
    values = measure.read(group, base)
    if values:
        return _spread(measure, values)
    return "no GPU" if measure.gpu and group.setting("device") == "cpu" else "not measured"


def _broken(measure: Measure, group: RunGroup, *, first: bool) -> str:
    values = measure.read(group, None) if measure.survives else []
    if values:
        return f"{_spread(measure, values)} ({group.status})"
    if not first:
        return group.status
    why = failure_reasons(group.rows[0], 160)[0]
    if group.status == "invalid":
        why = why.split(": ")[0]  # the mend is in the notes above
    return why if group.status.startswith("oom") else f"{group.status}: {why}"


def _spread(measure: Measure, values: list[float]) -> str:
    text = measure.form.format(statistics.fmean(values))
    return text if len(values) == 1 else f"{text} ± {measure.form.format(statistics.stdev(values))}"


def figure(title: str, name: str, form: str = "{:,.1f}", factor: float = 1.0, category: str = "") -> Measure:
    """A figure of the report, in another unit where the exercise has one."""

    def read(group: RunGroup, base: RunGroup | None) -> list[float]:
        return [value * factor for row in group.counted_rows if (value := row.metrics[name]) is not None]

    on_gpu = name.startswith(("gpu_", "torch_"))
    return Measure(title, read, form, category, gpu=on_gpu, survives=name.endswith(("peak_mib", "average_mib")))


def of_gpu_0(title: str, key: str) -> Measure:
    """Memory of the first GPU of the first node, in MiB."""

    def read(group: RunGroup, base: RunGroup | None) -> list[float]:
        entries = [entry for row in group.counted_rows for entry in row.record.memory.get("gpu") or []
                   if entry["node"] == 0 and entry["index"] == 0]  # fmt: skip
        return [float(entry[key]) for entry in entries if entry[key] is not None]

    return Measure(title, read, "{:,.0f}", gpu=True, survives=key != "mode_mib")


def of_epoch(
    title: str, name: str, epoch: int, *, form: str = "{:.4f}", factor: float = 1.0, category: str = ""
) -> Measure:
    """A metric after an epoch, counted from 1; -1: after the last."""

    def read(group: RunGroup, base: RunGroup | None) -> list[float]:
        found = [getattr(row.record.metrics, name) for row in group.counted_rows]
        position = epoch - 1 if epoch > 0 else epoch
        return [values[position] * factor for values in found if len(values) >= abs(epoch)]

    return Measure(title, read, form, category)


def setting(title: str, name: str) -> Measure:
    """What was chosen."""
    return Measure(title, lambda group, base: [], text=lambda group: format_setting(group.setting(name)))


def parameters(title: str) -> Measure:
    """Millions of parameters of the whole model."""
    return Measure(title, lambda group, base: [n / 1e6 for n in built_parameters(group)], "{:,.1f} M")


def relative(title: str, measure: Measure, *, inverse: bool = False) -> Measure:
    """A measure over that of the base, or the base's over it."""

    def read(group: RunGroup, base: RunGroup | None) -> list[float]:
        own, others = measure.read(group, base), measure.read(base, base) if base else []
        if not own or not others or not statistics.fmean(own):
            return []
        ratio = statistics.fmean(own) / statistics.fmean(others)
        return [1 / ratio if inverse else ratio]

    return Measure(title, read, "{:.2f}x", gpu=measure.gpu)


def built_parameters(group: RunGroup) -> list[int]:
    """Parameters that were built; one number, for all repeats have the same."""
    return [row.record.built.parameters for row in group.counted_rows if row.record.built][:1]

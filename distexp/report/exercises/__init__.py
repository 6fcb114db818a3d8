"""The workshop's results tables, which ``workshop.yaml`` describes. A preset chooses one with the key ``exercise``."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from distexp.report.data.metrics import NOT_OFFLOADED
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import RunGroup, collect
from distexp.report.data.rows import format_settings
from distexp.report.exercises.columns import Layout, RowKey, format_row, load_layouts
from distexp.tables.columns import TextTable

PRINTED = "printed in the workshop"
MAX_SETTINGS = 4  # in the label of a row
Groups = Sequence[RunGroup]
Cells = tuple[str, ...]
TableRow = tuple[Cells, Cells]  # a label for each column of the header, and a cell for each column of the layout


def quiz_columns(overview: Overview) -> frozenset[str]:
    """Return the names of the settings and metrics that the quizzes of the exercises ask for."""
    layouts = load_layouts()
    exercises = {str(row.record.config.get("exercise")) for row in overview.rows}
    return frozenset(name for exercise in exercises & layouts.keys() for name in layouts[exercise].quiz)


def exercise_tables(overview: Overview) -> Iterator[TextTable]:
    """Yield the table of every exercise among the runs."""
    exercises = collect(overview.groups, lambda group: group.rows[0].record.config.get("exercise"))
    for exercise in dict.fromkeys(row.record.config.get("exercise") for row in overview.rows):
        if exercise is not None and (layout := load_layouts().get(exercise)) is not None:
            yield fill_table(exercise, layout, overview, exercises.get(exercise, []))


def fill_table(exercise: str, layout: Layout, overview: Overview, groups: Sequence[RunGroup]) -> TextTable:
    """Build the table of an exercise. Rows of the workshop without a run are marked ``not run``."""
    keyed = _assign_rows(layout, groups)
    first = next(iter(layout.keys), None)
    baseline = next((group for key, group in keyed if key == first and group and group.completed), None)
    counts = Counter(key for key, _ in keyed)
    rows: list[TableRow] = []
    reasons: dict[str, str] = {}
    for key, group in keyed:
        labels = layout.labels_of(key)
        if group is not None and counts[key] > 1:
            settings = format_settings(group.settings, overview.varied[:MAX_SETTINGS])
            labels = (labels[0] + f", {settings or f'run {group.label}'}", *labels[1:])
        rows.append((labels, format_row(layout.columns, group, baseline, reasons)))
        if layout.printed and key == layout.keys[0]:
            cells = tuple(layout.printed.get(column.title, "") for column in layout.columns)
            rows.append(((PRINTED, *[""] * (len(layout.label) - 1)), cells))
    notes = (COMPUTED[note](groups) if note in COMPUTED else note for note in layout.notes)
    note = " ".join(filter(None, [describe_scale(groups), *notes]))
    build = _build_transposed if layout.transpose else _build
    table = build(f"{layout.title} ({exercise})", layout, rows)
    return replace(table, note=note, reasons=tuple(f"{number} {text}" for text, number in reasons.items()))


def _assign_rows(layout: Layout, groups: Sequence[RunGroup]) -> list[tuple[RowKey, RunGroup | None]]:
    """Return the workshop's rows in their order, each with its groups, then the rows of all other groups."""
    found = collect(groups, layout.key_of)
    keys = [*layout.keys, *(key for key in found if key not in layout.keys)]
    if all(len(key) == 1 and isinstance(key[0], int) for key in keys):
        keys.sort()
    no_run: list[RunGroup | None] = [None]
    return [(key, group) for key in keys for group in found.get(key, no_run)]


def _build(title: str, layout: Layout, rows: Sequence[TableRow]) -> TextTable:
    header = (*layout.header, *(column.title for column in layout.columns))
    return TextTable(title, header, tuple(labels + cells for labels, cells in rows), num_labels=len(layout.header))


def _build_transposed(title: str, layout: Layout, rows: Sequence[TableRow]) -> TextTable:
    """Build a table with a row for each column of the layout, and a column for each run."""
    has_categories = any(column.category for column in layout.columns)
    corner = ("Category", "Metric") if has_categories else ("Metric",)
    titles = [(column.category, column.title) if has_categories else (column.title,) for column in layout.columns]
    texts = tuple((*row_title, *(cells[n] for _, cells in rows)) for n, row_title in enumerate(titles))
    return TextTable(title, (*corner, *(labels[0] for labels, _ in rows)), texts, num_labels=len(corner))


def describe_scale(groups: Groups) -> str:
    """Warn if the runs were made small with ``scale``."""
    scales = {(group.rows[0].record.config.get("scale") or {}).get("name", "full") for group in groups}
    small = sorted(scales - {"full"})
    if not small:
        return ""
    return f"scale={small[0]}: small model, few samples. Do not compare this table with the workshop's numbers."


def _speed_with_evaluation(groups: Groups) -> str:
    """Return the speed as the Trainer computes it, with evaluation time."""
    speed = groups[0].metric("train_samples_per_second_overall")
    if speed is None or not groups[0].completed:
        return ""
    return f"The workshop's samples/s include evaluation time. With it, this run has {speed.mean:,.2f} samples/s."


def _random_weights(groups: Groups) -> str:
    if groups[0].rows[0].record.config["model"]["init"] == "pretrained":
        return ""
    return "These losses start from random weights. Use model.init=pretrained for the published weights."


def _lowest_memory_by_model(groups: Groups) -> str:
    """Name the ZeRO stage with the lowest memory of each model; without a GPU, of the parts that are not offloaded."""
    names = {"gpu_peak_mib": "peak GPU memory", NOT_OFFLOADED: "memory that a GPU would hold"}
    for metric, digits in (("gpu_peak_mib", 0), (NOT_OFFLOADED, 3)):
        best: dict[str, tuple[float, Any]] = {}
        for group in groups:
            size, model = group.metric(metric), str(group.setting("model"))
            if group.completed and size and (model not in best or size.mean < best[model][0]):
                best[model] = (size.mean, group.setting("zero_stage"))
        if best:
            found = [f"stage {stage} on {model} ({mib:,.{digits}f} MiB)" for model, (mib, stage) in best.items()]
            return f"Lowest {names[metric]}: {', '.join(found)}."
    return ""


COMPUTED: dict[str, Callable[[Groups], str]] = {  # notes by their names in `workshop.yaml`
    "speed_with_evaluation": _speed_with_evaluation,
    "random_weights": _random_weights,
    "lowest_memory_by_model": _lowest_memory_by_model,
}

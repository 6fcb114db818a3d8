"""Writes all files of a report: results as CSV and Parquet, page and figures; and the page of a proof."""

import csv
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

from distexp.config.fields import flatten
from distexp.report.data.metrics import METRICS
from distexp.report.data.overview import Overview
from distexp.report.data.rows import WORKERS, Row
from distexp.runs.run_dir import PROOF_PAGE
from distexp.system.files import replace_atomically

PAGE, PLOTS = "report.html", "plots"
ResultRow = dict[str, Any]

LIGHT = {
    "page": "#f6f7f9", "card": "#ffffff", "ink": "#1b2430", "muted": "#5b6675", "grid": "#e6e9ee", "line": "#d3d8e0",
    "accent": "#2f5fd0", "good": "#14804a", "bad": "#c62f2f", "warn": "#946200",
    "c1": "#2a5fd0", "c2": "#e0690c", "c3": "#0a7a58", "c4": "#8c1d5e",
    "c5": "#8f7bea", "c6": "#6b4f00", "c7": "#0b9bb5", "c8": "#c2273a",
    "phase-setup": "#8a96a8", "phase-warmup": "#e0a030", "phase-train": "#3f7be0", "phase-eval": "#35a877",
    "phase-profile": "#d0569a", "phase-save": "#b066c8", "phase-search": "#2b98a8", "phase-compiling": "#7a8f3c",
}  # fmt: skip
DARK = {
    "page": "#12161c", "card": "#1a2029", "ink": "#e6eaf0", "muted": "#9aa6b6", "grid": "#2a323e", "line": "#38424f",
    "accent": "#86aeff", "good": "#5fd295", "bad": "#ff8680", "warn": "#e8bd5a",
    "c1": "#5f92ff", "c2": "#ffb066", "c3": "#2fc494", "c4": "#e052a6",
    "c5": "#cdbfff", "c6": "#a8821c", "c7": "#9ee9f8", "c8": "#e8604f",
    "phase-setup": "#8d99ab", "phase-warmup": "#e8b04a", "phase-train": "#6a9cf5", "phase-eval": "#52c493",
    "phase-profile": "#ee82b8", "phase-save": "#c78adb", "phase-search": "#57c0cf", "phase-compiling": "#a3b860",
}  # fmt: skip
"""Colors of the pages and of all charts, by name."""


def write_files(
    overview: Overview, directory: Path, traced_runs: Sequence[str] = (), skipped: Sequence[str] = ()
) -> list[Path]:
    """Write all files of a report, each completely or not at all; return their paths, or raise OSError.

    Without labels of ``traced_runs`` the most informative runs are drawn. ``skipped`` are messages on other records.
    """
    # Imported here, because the table after a sweep should not wait for plotting libraries.
    from distexp.report.figures import build_figures
    from distexp.report.figures.base import render_files
    from distexp.report.page import write_markdown, write_page
    from distexp.report.traces import load_traces

    directory.mkdir(parents=True, exist_ok=True)
    rows = [result_row(row) for row in overview.rows]
    names = column_names(rows)
    figures = build_figures(overview, load_traces(overview, traced_runs))
    images = [_write_image(path, content) for path, content in list(render_files(figures, directory / PLOTS))]
    return [
        _replace(directory / "results.csv", lambda path: write_csv(rows, names, path)),
        _replace(directory / "results.md", lambda path: write_markdown(overview, figures, path)),
        _replace(directory / "results.parquet", lambda path: write_parquet(rows, names, path)),
        *images,
        _replace(directory / PAGE, lambda path: write_page(overview, figures, path, skipped)),
    ]


def write_figures(overview: Overview, directory: Path, traced_runs: Sequence[str] = ()) -> list[Path]:
    """Write figures as SVG, PDF and PNG and tables as Markdown and LaTeX, for a paper or slides; or raise OSError."""
    from distexp.report.figures import build_figures
    from distexp.report.figures.base import render_files
    from distexp.report.page import format_tables
    from distexp.report.traces import load_traces

    directory.mkdir(parents=True, exist_ok=True)
    figures = build_figures(overview, load_traces(overview, traced_runs))
    tables = ((directory / name, text.encode()) for name, text in format_tables(overview, figures))
    return [
        _write_image(path, content) for path, content in (*render_files(figures, directory, with_pdf=True), *tables)
    ]


def _write_image(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    return _replace(path, lambda temporary: temporary.write_bytes(content))


def _replace(path: Path, write: Callable[[Path], object]) -> Path:
    with replace_atomically(path) as temporary:
        write(temporary)
    return path


def write_csv(rows: Sequence[ResultRow], names: Sequence[str], path: Path) -> None:
    """Write comma-separated values. A text that a spreadsheet would take for a formula gets an apostrophe."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval=None)
        writer.writeheader()
        writer.writerows({name: _as_text(value) for name, value in row.items()} for row in rows)


def _as_text(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def write_parquet(rows: Sequence[ResultRow], names: Sequence[str], path: Path) -> None:
    """Write typed columns. Metrics are doubles even if no run has them, so that files can be concatenated."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    metrics, arrays = {metric.name for metric in METRICS}, {}
    for name in names:
        values = [row.get(name) for row in rows]
        types = {float} if name in metrics else {type(value) for value in values if value is not None}
        kind: Any = float if types == {int, float} else str  # Other mixed types, as ``64`` and ``auto``, are strings.
        if len(types) == 1:
            kind = next(one if one in kinds else str for one in types)
        arrays[name] = pa.array([None if value is None else kind(value) for value in values], kinds[kind])
    with path.open("wb") as file:  # pyarrow takes a relative path with a colon for a URI.
        pq.write_table(pa.table(arrays), file)


def result_row(row: Row) -> ResultRow:
    """Return all values of a run by column; lists are JSON, None is not measured."""
    record, run, error = row.record, row.record.run, row.record.error
    found: ResultRow = {
        "run": row.label,
        "run_id": run.id,
        "name": run.name,
        "number": run.number,
        "overrides": " ".join(run.overrides),
        "status": record.status,
        "disturbance": row.disturbance,
        **{f"error_{key}": getattr(error, key, None) for key in ("type", "message", "phase", "rank")},
        "started_at": run.started_at,
        "hosts": " ".join(run.hosts),
        "git_sha": run.git_sha,
        "world_size": row.settings[WORKERS],
        **row.metrics,
        **{f"config.{key}": value for key, value in flatten(record.config)},
        **_section("built", record.built),
        **_section("environment", record.environment),
        "record": str(row.path) if row.path else None,
    }
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in found.items()}


def _section(name: str, section: object | None) -> ResultRow:
    return {} if section is None else {f"{name}.{key}": value for key, value in vars(section).items()}


def column_names(rows: Sequence[ResultRow]) -> list[str]:
    """Return the column names of some rows; the path of the record is the last."""
    return [*dict.fromkeys(name for row in rows for name in row if name != "record"), "record"]


# The page of a result of ``distexp verify``: heat maps of its phases and of its parameters.


CHECKS = {
    "initial": "start", "gradient": "grads",
    **dict.fromkeys(("lr", "weight_decay", "betas", "eps", "momentum"), "settings"),
    "update": "updates", "weight": "weights", "state": "states", "ranks": "ranks", "exported": "export",
    "resume": "resume",
}  # fmt: skip
"""Titles of the columns of parameters, by the kind of an error."""

MEANINGS = {
    "loss": "loss of each step", "grads": "gradients before clipping", "norm": "gradient norm that is reported",
    "updates": "change of the weights, computed again", "weights": "weights after each step",
    "states": "optimizer states", "ranks": "replicas on other ranks", "eval": "evaluation loss and buffers",
    "resume": "training after a checkpoint", "start": "initial weights", "settings": "options of the optimizer",
    "export": "weights that a model is saved with",
}  # fmt: skip
"""What a column compares, by its title."""

LEVELS = {0.0: "no error", 0.01: "up to 1 % of the bound", 0.1: "up to 10 %", 1.0: "up to the bound", inf: "above it"}
"""Upper ends of the shades, as shares of the bound, with what they mean."""

MAX_CELL_ROWS = 40  # Of more parameters, the page shows the worst of each block first.
BLOCK = re.compile(r".*?\.\d+(?=\.)")
FoundError = Sequence[Any]  # relative error (None: infinite), bound, step, phase, name
Errors = dict[str, FoundError]  # by the column


def write_proof(result: dict[str, Any], lines: Sequence[str], columns: Mapping[str, str], path: Path) -> None:
    """Write the page of a result: the lines of its verdict, and its errors. The columns are titles of kinds."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    parameters = {name: _by_check(name, errors) for name, errors in result["parameters"].items()}
    checks = [title for title in dict.fromkeys(CHECKS.values()) if any(title in each for each in parameters.values())]
    known = {kind for phase in result["phases"] for kind in phase.get("worst", {})}
    shown = {kind: title for kind, title in columns.items() if kind in known}
    rows = _by_block(parameters) if len(parameters) > MAX_CELL_ROWS else parameters
    every = ((check, error) for errors in parameters.values() for check, error in errors.items())
    worst = max(every, key=lambda pair: share_of_bound(pair[1]), default=None)
    folder = files("distexp.report") / "page"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string((folder / PROOF_PAGE).read_text()).render(
        result=result,
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        lines=lines,
        worst=f"{worst[1][-1]}, {worst[0]}: {_describe_error(worst[1])}" if worst else "",
        columns=list(shown.values()),
        phases=_heat_rows({phase["phase"]: _of_phase(phase, shown) for phase in result["phases"]}, shown.values()),
        meanings=MEANINGS,
        after_dot=Markup(".<wbr>"),
        checks=checks,
        parameters=_heat_rows(rows, checks),
        every=_heat_rows(parameters, checks),
        is_grouped=rows is not parameters,
        levels=list(enumerate(LEVELS.values())),
        facts=dict(_facts(result)),
        palettes={"light": LIGHT, "dark": DARK},
        style=Markup((folder / "page.css").read_text()),
    )
    _replace(path, lambda temporary: temporary.write_text(text))


def errors_of_parameters(phases: Sequence[dict[str, Any]]) -> dict[str, Errors]:
    """Take the errors out of all phases, and return the largest of each parameter by its kind."""
    found: dict[str, Errors] = {}
    for phase in phases:
        errors = phase.pop("errors", {})
        for kind, named in errors.items():
            for text, each in named.items():
                name = text.partition(": ")[0]  # without that of an optimizer state
                if name in errors.get("initial", {}):
                    _keep_worst(found.setdefault(name, {}), kind, (*each, phase["phase"]))
    return found


def share_of_bound(error: FoundError) -> float:
    """Return an error as a multiple of its bound."""
    return inf if error[0] is None else error[0] / error[1]


def _keep_worst(errors: Errors, key: str, error: FoundError) -> None:
    errors[key] = max(errors.get(key, error), error, key=share_of_bound)


def _by_check(name: str, errors: Errors) -> Errors:
    found: Errors = {}
    for kind in errors.keys() & CHECKS.keys():
        _keep_worst(found, CHECKS[kind], (*errors[kind], name))
    return found


def _by_block(parameters: Mapping[str, Errors]) -> dict[str, Errors]:
    """Return the worst errors of each block. Parameters that are in none keep their row."""
    found: dict[str, Errors] = {}
    for name, errors in parameters.items():
        match = BLOCK.match(name)
        row = found.setdefault(match[0] if match else name, {})
        for check, error in errors.items():
            _keep_worst(row, check, error)
    return found


def _of_phase(phase: dict[str, Any], columns: Mapping[str, str]) -> Errors:
    worst = phase.get("worst", {})
    return {
        title: (*(worst[kind][name] for name in ("error", "bound", "step")), phase["phase"], "")
        for kind, title in columns.items() if kind in worst
    }  # fmt: skip


def _heat_rows(rows: Mapping[str, Errors], columns: Iterable[str]) -> list[dict[str, Any]]:
    titles = list(columns)
    return [{"name": name, "cells": [_heat_cell(each.get(title)) for title in titles]} for name, each in rows.items()]


def _heat_cell(error: FoundError | None) -> dict[str, Any]:
    if error is None:
        return {"level": "none", "text": "", "title": "not compared"}
    level = bisect_left(list(LEVELS), share_of_bound(error))
    text = "inf" if error[0] is None else f"{error[0]:.0e}" if error[0] else "0"
    title = f"{error[-1]}: {_describe_error(error)}".removeprefix(": ")
    return {"level": level, "text": f"{text}{'!' if level == len(LEVELS) - 1 else ''}", "title": title}


def _describe_error(error: FoundError) -> str:
    value, bound, step, phase = error[:4]
    place = f", step {step}" if step else ""
    return f"error {inf if value is None else value:.1e}, bound {bound:.1e}, in phase {phase}{place}"


def _facts(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("model", "dataset", "device", "workers", "precision", "configuration"):
        if name in result:
            yield name, str(result[name])
    yield "arithmetic", ", ".join(result["arithmetic"] or ["unknown"])
    yield "versions", ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    for name, reason in result["skipped"].items():
        yield f"phase {name}", f"left out: {reason}"
    if result["not_run"]:
        yield "not run", f"{', '.join(result['not_run'])}, because an earlier phase differs"

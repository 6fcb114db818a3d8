"""Figures of the report: their sentences and tables follow the records, and swap when two records are swapped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

from distexp.report.data.metrics import COMMUNICATION
from distexp.report.data.overview import Overview
from distexp.report.data.rows import load_rows
from distexp.report.figures import build_figures
from distexp.report.figures.base import Figure, Panel, render_files
from distexp.report.losses import describe_same_training
from distexp.report.overview_table import build_overview_table
from distexp.report.traces import load_traces
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Predicted
from tests.helpers.records import add_parts, record, write
from tests.helpers.report_sweeps import enrich, growing_sweep, with_traces, write_traces, zero_sweep

Sweep = Callable[..., Path]


def overview(path: Path) -> Overview:
    return Overview.from_rows(load_rows([path])[0])


def figures(path: Path, *, with_files: bool = False) -> dict[str, Figure]:
    """Return the figures of a sweep by name. Their files are seldom needed, and take most of the time."""
    runs = overview(path)
    with nullcontext() if with_files else patch.object(Figure, "drawn", lambda figure: figure):
        return {figure.name: figure for figure in build_figures(runs, load_traces(runs))}


def text_of(path: Path, name: str) -> str:
    """Return captions, sentences and rows of a figure; the cells of a row are separated by two spaces."""
    figure = figures(path)[name]
    rows = ["  ".join(row) for table in figure.tables for row in table.rows]
    return "\n".join([figure.caption, *figure.sentences, *rows])


def sentence_words(path: Path) -> list[int]:
    """Return the length of each sentence of all figures, which can be drawn."""
    found = figures(path, with_files=True).values()
    assert all(figure.svg and figure.png for figure in found if figure.panels)
    return [len(text.split()) for figure in found for text in figure.sentences]


LEFT_OUT = "As in the table, the phase profile is not counted."
OFFLOAD = "bloom_560m  1  true  false  {0}x"
STRONG = "Strong scaling, 1 to 8 workers: {0}x as fast (ideal: 8x), efficiency {1}."


@pytest.mark.parametrize(
    ("sweep", "swapped", "name", "texts"),
    [
        (zero_sweep, (0, 1), "memory_throughput", (OFFLOAD.format("1.82"), OFFLOAD.format("0.55"))),
        (zero_sweep, (0, 1), "memory_throughput", ("-38.0% (19,220 MiB)", "+61.3% (31,000 MiB)")),
        (growing_sweep, (0, 5), "scaling", (STRONG.format("5.20", "65%"), STRONG.format("0.19", "2%"))),
        (growing_sweep, (1, 3), "scaling", ("2 x 1  170.0  0.89", "2 x 1  190.0  1.12")),
    ],
)
def test_results_swap_when_two_records_are_swapped(
    tmp_path: Path, sweep: Sweep, swapped: tuple[int, int], name: str, texts: tuple[str, str]
) -> None:
    before, after = texts
    one, other = text_of(sweep(tmp_path / "a"), name), text_of(sweep(tmp_path / "b", swap=swapped), name)
    assert before in one, one
    assert after not in one
    assert after in other, other
    assert before not in other


def test_sentences_are_short(tmp_path: Path) -> None:
    counts = sentence_words(zero_sweep(tmp_path / "a")) + sentence_words(growing_sweep(tmp_path / "b"))
    assert counts
    assert max(counts) <= 20


def test_memory_throughput_has_a_front_per_model_and_names_runs_out_of_memory(tmp_path: Path) -> None:
    figure = figures(zero_sweep(tmp_path))["memory_throughput"]
    layers = figure.panels[0].chart.to_dict(validate=False)["layer"]
    front = next(layer["data"]["values"] for layer in layers if layer["mark"].get("interpolate"))
    assert [sum(point["front"] == n for point in front) for n in (0, 1)] == [6, 5]
    assert "Red crosses: runs out of memory" in figure.caption
    assert "bloom_3b  1  true  false  oom_gpu without it  -" in text_of(tmp_path, "memory_throughput")


def test_memory_throughput_names_runs_that_were_predicted_not_to_fit(tmp_path: Path) -> None:
    runs = [record(n, strategy=name, speed=100.0 + n, peak=1000.0) for n, name in enumerate(("ddp", "fsdp", "single"))]
    runs[2].status, runs[2].predicted = "invalid", Predicted(peak_allocated_mib=99_000.0)
    with_prediction = figures(with_traces(tmp_path / "a", runs))["memory_throughput"].caption
    assert "Not run, because the memory was predicted not to suffice: 2." in with_prediction
    runs[2].predicted = None
    assert "Not run" not in figures(with_traces(tmp_path / "b", runs))["memory_throughput"].caption


def test_differences_within_the_noise_make_no_front(tmp_path: Path) -> None:
    """The large run is faster by 5 %, but its speed has a noise of 9 %."""
    runs = [
        record(n, strategy=name, speed=speed, peak=peak)
        for n, (name, speed, peak) in enumerate((("ddp", 105.0, 3000.0), ("fsdp", 100.0, 1000.0)))
    ]

    def front(path: Path, error: float) -> list[str]:
        for run in runs:
            run.metrics.speed_error = {"relative": error, "blocks": 10.0}
        drawn = figures(with_traces(path, runs))["memory_throughput"]
        layers = drawn.panels[0].chart.to_dict(validate=False)["layer"]
        return [point["run"] for layer in layers if layer["mark"].get("interpolate")
                for point in layer["data"]["values"]]  # fmt: skip

    assert front(tmp_path / "exact", 0.001) == ["1", "0"]
    assert front(tmp_path / "noisy", 0.04) == [], "a front of one run is no line"
    captions = [figures(tmp_path / name)["memory_throughput"].caption for name in ("exact", "noisy")]
    assert ["Differences within the noise do not count." in caption for caption in captions] == [True, False]
    assert ["Pareto front" in caption for caption in captions] == [True, False]


def test_energy_has_a_front_of_its_own(tmp_path: Path) -> None:
    runs = [
        record(n, strategy=name, speed=speed, peak=9.0)
        for n, (name, speed) in enumerate((("ddp", 90.0), ("fsdp", 60.0)))
    ]
    assert "energy_throughput" not in figures(with_traces(tmp_path / "without", runs))
    for run, joules in zip(runs, (0.5, 0.25), strict=True):
        run.metrics.energy = {"j_per_sample": joules}
    figure = figures(with_traces(tmp_path / "with", runs))["energy_throughput"]
    line, points = layers_of(figure.panels[0])[:2]
    assert (values_of(line, "run"), values_of(points, "cost")) == (["1", "0"], [0.5, 0.25])
    assert "Pareto front: no other run is both more economical and faster." in figure.caption


def test_disturbed_runs_have_no_sentence_about_scaling(tmp_path: Path) -> None:
    path = growing_sweep(tmp_path)
    runs = [row.record for row in load_rows([path])[0]]
    runs[0].metrics.step_time_s, runs[0].metrics.train_steps_per_second = {"p50": 0.1}, 5.0
    figure = build_figures(Overview.from_records(runs), [])
    assert [one.sentences for one in figure if one.name == "scaling"] == [()]


def test_weak_scaling_compares_the_work_per_second(tmp_path: Path) -> None:
    text = text_of(growing_sweep(tmp_path, weak=True), "scaling")
    assert "Weak scaling of the data, 1 to 8 workers: 5.20x the work per second (ideal: 8x), efficiency 65%." in text
    panels = figures(tmp_path)["scaling"].panels
    assert [panel.title for panel in panels] == [
        "Weak scaling of the data: relative time",
        "Weak scaling of the data: efficiency",
    ]


def test_a_growing_model_counts_as_work(tmp_path: Path) -> None:
    """The same samples/s on four times the parameters and workers is ideal, not a quarter."""
    runs: list[RunRecord] = []
    for number, (workers, layers) in enumerate(((1, 3), (2, 6), (4, 12))):
        run = record(number, cluster__workers_per_node=workers, model__num_layers=layers, dataset__train_size=500,
                     speed=100.0 / (1 + number / 4))  # fmt: skip
        runs.append(enrich(run, parameters=1_000_000 * layers))
        run.metrics.total_steps = None
    series = overview(with_traces(tmp_path, runs)).series
    assert [scaling.title for scaling in series] == ["Weak scaling of the model"]
    assert [round(point.efficiency, 3) for point in series[0].points] == [1.0, 0.8, 0.667]


def test_packed_rows_count_their_samples(tmp_path: Path) -> None:
    """Ten steps of rows with four samples each."""
    runs = []
    for number, workers in enumerate((1, 2)):
        run = record(number, cluster__workers_per_node=workers, dataset__train_size=800, dataset__packing=True)
        runs.append(enrich(run))
        run.metrics.steps_per_epoch, run.metrics.total_steps = 50 // workers, 10
    (series,) = overview(with_traces(tmp_path, runs)).series
    assert [point.samples for point in series.points] == [160, 320]
    assert series.title == "Weak scaling of the data"


def test_mixed_scaling_is_neither_strong_nor_weak(tmp_path: Path) -> None:
    sizes = {1: 500, 2: 500, 4: 2000}
    runs = [
        record(n, cluster__workers_per_node=w, dataset__train_size=size) for n, (w, size) in enumerate(sizes.items())
    ]
    text = text_of(with_traces(tmp_path, runs), "scaling")
    assert "Data scaling: neither the total work nor the work per worker is constant." in text
    assert "Data scaling, 1 to 4 workers: total work 4.00x, work per worker 1.00x, efficiency" in text


def test_a_growing_model_with_less_work_per_worker_is_named(tmp_path: Path) -> None:
    """As with scaling=weak_model_workshop, where the embedding does not grow."""
    runs = [
        enrich(record(n, cluster__workers_per_node=workers, dataset__train_size=500), parameters=parameters)
        for n, (workers, parameters) in enumerate(((1, 1_000_000), (2, 1_400_000)))
    ]
    for run in runs:
        run.metrics.total_steps = None
    figure = figures(with_traces(tmp_path, runs))["scaling"]
    assert [panel.title for panel in figure.panels] == ["Model scaling: efficiency"]
    assert "Model scaling: neither the total work nor the work per worker is constant." in figure.caption
    assert figure.sentences[0].startswith("Model scaling, 1 to 2 workers: ")


def test_each_configuration_has_its_own_series(tmp_path: Path) -> None:
    runs = [
        record(4 * n + k, strategy=name, cluster__workers_per_node=workers, speed=speed * workers / (1 + k * n / 2))
        for n, (name, speed) in enumerate((("ddp", 100.0), ("fsdp", 50.0))) for k, workers in enumerate((1, 2))
    ]  # fmt: skip
    series = {scaling.name: scaling for scaling in overview(with_traces(tmp_path, runs)).series}
    assert round(series["strategy=ddp"].points[-1].efficiency, 3) == 1.0
    assert round(series["strategy=fsdp"].points[-1].efficiency, 3) == 0.667


def test_equal_numbers_of_workers_on_one_node_and_on_several_are_compared(tmp_path: Path) -> None:
    tables = figures(growing_sweep(tmp_path))["scaling"].tables
    assert [table.title for table in tables] == [
        "Work, efficiency and memory",
        "Equal numbers of workers on few nodes and on more",
    ]
    assert tables[1].rows == (
        ("-", "2", "1 x 2", "190.0", "2 x 1", "170.0", "0.89"),
        ("-", "4", "1 x 4", "340.0", "2 x 2", "300.0", "0.88"),
    )
    assert "scaling" not in figures(zero_sweep(tmp_path / "other"))


Shares = Mapping[int, tuple[float | None, float | None]]


def with_communication(path: Path, shares: Shares) -> Path:
    """Write runs with these numbers of workers, and their fractions of communication: total and not overlapped."""
    runs = []
    for number, (workers, (share, exposed)) in enumerate(shares.items()):
        run = record(number, cluster__workers_per_node=workers, dataset__train_size=500, speed=100.0 * workers)
        run.metrics.communication = {"share": share, "exposed_share": exposed}
        runs.append(run)
    return with_traces(path, runs)


@pytest.mark.parametrize(
    ("shares", "cells"),
    [
        ({1: (0.0, 0.0), 2: (0.12, 0.04), 4: (0.234, 0.09)}, [("0", "0"), ("12", "4"), ("23", "9")]),
        ({1: (0.0, 0.0), 2: (0.234, 0.09), 4: (0.12, 0.04)}, [("0", "0"), ("23", "9"), ("12", "4")]),
        ({1: (0.0, None), 2: (0.31, None), 4: (None, None)}, [("0",), ("31",), ("-",)]),
    ],
)
def test_the_scaling_table_shows_communication(tmp_path: Path, shares: Shares, cells: list[tuple[str, ...]]) -> None:
    path = with_communication(tmp_path, shares)
    table = figures(path)["scaling"].tables[0]
    columns = ["communication (%)", "not overlapped (%)"][: len(cells[0])]
    assert list(table.header[-len(columns) :]) == columns
    assert [row[-len(columns) :] for row in table.rows] == cells
    runs = overview(path)
    assert COMMUNICATION in {metric.name for metric in runs.metrics()}
    assert runs.rows[1].metrics[COMMUNICATION] == pytest.approx(100 * (shares[2][0] or 0))


def test_communication_that_was_not_measured_is_not_shown(tmp_path: Path) -> None:
    for path in (growing_sweep(tmp_path / "a"), with_communication(tmp_path / "b", {1: (None, None), 2: (None, None)})):
        assert not any("communication" in title for table in figures(path)["scaling"].tables for title in table.header)
        assert COMMUNICATION not in {metric.name for metric in overview(path).metrics()}


def offloaded_sweep(path: Path) -> Path:
    runs = [
        add_parts(enrich(record(n, strategy="deepspeed", offload__enabled=n == 1)), parameters=0.1) for n in range(2)
    ]
    assert runs[1].built is not None
    runs[1].built.offload = "optimizer"
    return with_traces(path, runs)


def test_the_parts_of_the_memory_are_next_to_the_total(tmp_path: Path) -> None:
    figure = figures(offloaded_sweep(tmp_path))["memory_parts"]
    (table,) = figure.tables
    parts = ("parameters", "gradients", "optimizer states", "activations")
    assert table.header == ("run", "offload", *parts, "sum", "not offloaded", "peak of all processes")
    measured = ("0.101", "0.101", "0.202", "2.000", "2.404")
    assert table.rows == (
        ("0", "false", *measured, "2.404", "4,000"),
        ("1", "true", *measured, "2.101", "4,000"),  # stage 2: the gradients go with the optimizer
    )
    assert "memory_parts" not in figures(zero_sweep(tmp_path / "other"))


def test_parts_without_activations_have_a_dash(tmp_path: Path) -> None:
    runs = [add_parts(enrich(record(0)), parameters=0.1, activations=None)]
    (table,) = figures(with_traces(tmp_path, runs))["memory_parts"].tables
    assert table.rows == (("0", "0.101", "0.101", "0.202", "-", "0.404", "4,000"),)


def test_equal_and_different_losses_are_reported(tmp_path: Path) -> None:
    same = [enrich(record(n, strategy=name, peak=1000.0)) for n, name in enumerate(("ddp", "fsdp"))]
    text = text_of(with_traces(tmp_path / "a", same), "losses")
    assert "Same training: losses of 2 runs (global batch 8) are equal at every logged step." in text
    other = tmp_path / "b"
    with_traces(other, same[:1])
    (other / "1").mkdir()
    same[1].write(other / "1")
    write_traces(other / "1", same[1], gap=0.03)
    text = text_of(other, "losses")
    assert "Different losses: 2 runs (global batch 8) differ by up to 2.9%, at step " in text
    assert "random numbers" not in text
    assert same[1].built is not None
    same[1].built.dropout = 0.1  # of the architecture
    same[1].write(other / "1")
    advice = "With dropout or skipped paths, strategies draw other random numbers. To compare them, set "
    for keys, hint in ((["dropout"], "model.dropout=0."), (["options"], "the rates of the model to 0.")):
        for run in same:
            run.config["model"]["keys"] = keys
            run.write(other / str(run.run.number))
        assert advice + hint in text_of(other, "losses")
    assert "of run 0 (strategy=ddp) and run 1 (strategy=fsdp)." in text


@pytest.mark.parametrize("degree", ["tensor", "context"])
def test_workers_that_share_rows_and_stored_activations_train_the_same(degree: str, tmp_path: Path) -> None:
    """Half as many groups have their own rows, so a group has twice the rows of a worker in the same global batch."""
    stored = {"train__activation_checkpointing": "selective", "train__micro_batch_size": 8}
    runs = [enrich(record(0, train__micro_batch_size=4)), enrich(record(1, **{f"parallel__{degree}": 2}, **stored))]
    path, console = with_traces(tmp_path, runs), Console(width=200)
    text = text_of(path, "losses")
    assert "Same training: losses of 2 runs (global batch 8) are equal at every logged step." in text
    with console.capture() as capture:
        console.print(build_overview_table(runs, path))
    assert "Same training: losses of 2 runs (global batch 8)" in capture.get()
    assert "batch sizes differ" not in capture.get()


def test_runs_with_other_kernels_are_compared(tmp_path: Path) -> None:
    """As with kernels=fast, whose values depend on the strategy."""
    options = {"train__compute_weights": "step", "train__logits": "targets", "model__attention": "sdpa"}
    fast = {"kernels__name": "fast", "train__loss": "chunked", "dataset__cache": "cpu", "train__compile": "blocks"}
    runs = [
        enrich(record(0)),
        enrich(record(1, strategy="fsdp", **options)),
        enrich(record(2, strategy="fsdp", **fast)),
    ]
    text = text_of(with_traces(tmp_path / "fast", runs), "losses")
    assert "Same training: losses of 3 runs (global batch 8) are equal at every logged step." in text
    own = [enrich(record(0)), enrich(record(1, train__loss="own"))]
    assert "losses of 2 runs" not in text_of(with_traces(tmp_path / "own", own), "losses")


def test_other_evaluation_losses_are_not_the_same_training(tmp_path: Path) -> None:
    same = [enrich(record(n, strategy=name, peak=1000.0)) for n, name in enumerate(("ddp", "fsdp"))]
    same[1].metrics.eval_losses = [1.06 * loss for loss in same[1].metrics.eval_losses]
    text = text_of(with_traces(tmp_path / "a", same), "losses")
    assert "Same training losses, but other evaluation losses: 2 runs (global batch 8) are equal in training" in text
    assert "differ by up to 5.7% in the evaluation at step " in text
    assert "Batch norms" not in text
    for run in same:
        assert run.built is not None
        run.built.channels_last = False
    assert "Batch norms, if the model has any, use the samples of one worker" in text_of(
        with_traces(tmp_path / "b", same), "losses"
    )


def test_an_evaluation_loss_that_is_not_finite_is_no_same_training(tmp_path: Path) -> None:
    """As with train.on_nan=record: a record has null for it."""
    runs = [enrich(record(n, strategy=name, peak=1000.0)) for n, name in enumerate(("ddp", "fsdp"))]
    runs[1].metrics.eval_losses = [*runs[1].metrics.eval_losses[:-1], float("nan")]
    text = text_of(with_traces(tmp_path, runs), "losses")
    assert "Different losses: 2 runs (global batch 8). One of run 0" in text
    assert "has no finite evaluation loss." in text


def test_the_terminal_shows_whether_runs_are_the_same_training(tmp_path: Path) -> None:
    runs = [enrich(record(n, strategy=name, peak=1000.0)) for n, name in enumerate(("ddp", "fsdp"))]
    path, console = with_traces(tmp_path, runs), Console(width=200)
    for table in (build_overview_table(runs, path), build_overview_table(runs)):
        with console.capture() as capture:
            console.print(table)
        is_compared = "Same training: losses of 2 runs (global batch 8) are equal at every" in capture.get()
        assert is_compared == (table.overview.rows[0].path is not None)


@pytest.mark.parametrize(
    ("lines", "start"),
    [
        ([{"step": 901, "loss": 9.0}], ""),
        ([{"step": 901, "loss": "x"}], ""),
        ([None], "Same training: losses of 2 runs (global batch 8) are equal at every logged step."),
        ([None, {"step": 1, "loss": None}], "Different losses: 2 runs (global batch 8). At step 1 one of run 0"),
        ([None, {"step": 901, "loss": 1.0}], "Same training: losses of 2 runs (global batch 8) are equal at every com"),
    ],
    ids=["no common steps", "damaged", "equal", "not finite", "more steps"],
)
def test_losses_are_compared_only_at_common_steps(
    lines: list[dict[str, Any] | None], start: str, tmp_path: Path
) -> None:
    """The second run has other lines than the first one; None stands for those of the first one."""
    runs = [enrich(record(n, strategy=name, peak=1000.0)) for n, name in enumerate(("ddp", "fsdp"))]
    path = with_traces(tmp_path, runs)
    first = (path / "0" / "metrics.jsonl").read_text()
    other = "".join(first if line is None else f"{json.dumps(line)}\n" for line in lines)
    (path / "1" / "metrics.jsonl").write_text(other)
    found = list(describe_same_training(overview(path)))
    assert [text[: len(start)] for text in found] == [start] * bool(start)


def test_all_steps_of_all_runs_are_compared_also_those_that_are_not_drawn(tmp_path: Path) -> None:
    runs = [enrich(record(n, train__activation_budget=(n + 1) / 20, peak=1000.0)) for n in range(12)]
    path = with_traces(tmp_path, runs)
    lines = [{"step": step, "loss": 2.0} for step in range(1, 1001)]
    for run in runs:
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (path / str(run.run.number) / "metrics.jsonl").write_text(text)
    assert [*describe_same_training(overview(path))] == [
        "Same training: losses of 12 runs (global batch 8) are equal at every logged step."
    ]
    lines[502]["loss"] = 2.5
    (path / "6" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (found,) = describe_same_training(overview(path))
    assert found.startswith("Different losses: 12 runs (global batch 8) differ by up to 20%, at step 503 of run 0")
    assert "and run 6" in found
    losses = figures(path)["losses"]
    assert losses.sentences == (found,)
    assert losses.finding == "Losses differ"


def test_repeats_are_compared_with_the_runs_of_the_same_seed(tmp_path: Path) -> None:
    runs = [enrich(record(n, strategy=("ddp", "fsdp")[n % 2], train__seed=42 + n // 2, peak=1000.0)) for n in range(6)]
    runs[0].status = "failed"
    path = with_traces(tmp_path, runs)
    same = "Same training: losses of 4 runs (2 seeds, global batch 8) are equal at every logged step."
    assert [*describe_same_training(overview(path))] == [same]
    for line in ((file := path / "5" / "metrics.jsonl").read_text()).splitlines()[:1]:
        file.write_text(file.read_text().replace(line, json.dumps(json.loads(line) | {"loss": 99.0})))
    (found,) = describe_same_training(overview(path))
    assert found.startswith("Different losses: 4 runs (2 seeds, global batch 8)")
    assert "at step 1 of run 4" in found


def test_losses_of_different_global_batches_are_not_compared(tmp_path: Path) -> None:
    runs = [enrich(record(n, train__micro_batch_size=4 * (n + 1))) for n in range(2)]
    assert figures(with_traces(tmp_path, runs))["losses"].sentences == ()


def losses_of(path: Path, gaps: Sequence[float]) -> Figure:
    """Write a sweep whose losses differ by relative gaps from the first run's, and return the figure of losses."""
    runs = [enrich(record(n, train__learning_rate=(n + 1) / 10_000, peak=1000.0)) for n in range(len(gaps))]
    write(path, *runs)
    for run, gap in zip(runs, gaps, strict=True):
        run.metrics.eval_losses = [loss * (1 + gap) for loss in (2.5, 2.1)]
        run.write(path / str(run.run.number))
        write_traces(path / str(run.run.number), run, gap=gap)
    return figures(path)["losses"]


@pytest.mark.parametrize(("evaluates", "step"), [(True, 60), (False, 20)])
def test_an_evaluation_is_drawn_after_its_epoch(evaluates: bool, step: int, tmp_path: Path) -> None:
    """One of three epochs was evaluated: the last one, or the first one if evaluations were switched off later."""
    run = enrich(record(0, train__evaluate=evaluates))
    run.metrics.total_steps, run.metrics.train_losses, run.metrics.eval_losses = 60, [2.5, 2.2, 2.0], [2.1]
    _, rings = layers_of(figures(with_traces(tmp_path, [run]))["losses"].panels[0])
    assert values_of(rings, "step") == [step]


def values_of(layer: dict[str, Any], name: str) -> list[Any]:
    return [row[name] for row in layer["data"]["values"]]


def layers_of(panel: Panel) -> list[dict[str, Any]]:
    layers: list[dict[str, Any]] = panel.chart.to_dict(validate=False)["layer"]
    return layers


def test_coinciding_losses_are_drawn_as_differences(tmp_path: Path) -> None:
    figure = losses_of(tmp_path, [0, 0, 5e-5])
    assert figure.subtitle == "All curves coincide; drawn: difference to run 0 (learning_rate=0.0001)"
    assert "Equal to it at every step: run 1." in figure.caption
    first, second = (panel.title for panel in figure.panels)
    assert first == "run 0 (learning_rate=0.0001)"
    assert second.startswith("run 2 (learning_rate=0.0003): at most 0.005%, at step ")
    line, rings = layers_of(figure.panels[1])
    assert values_of(line, "percent") == pytest.approx([0.005] * 40, rel=1e-3)
    assert values_of(rings, "percent") == pytest.approx([0.005] * 2, rel=1e-3)
    assert values_of(rings, "step") == [20, 40]
    domain = line["encoding"]["y"]["scale"]["domain"]
    assert domain == pytest.approx([-0.01, 0.01]), "as wide as the tolerance"
    assert [entry.label for entry in figure.legend] == ["training loss", "evaluation loss"]


def test_equal_losses_are_one_curve(tmp_path: Path) -> None:
    figure = losses_of(tmp_path, [0, 0, 0])
    assert figure.subtitle == "All curves coincide; drawn: run 0 (learning_rate=0.0001)"
    assert figure.caption == "Equal to it at every step: runs 1, 2."
    assert [panel.title for panel in figure.panels] == ["run 0 (learning_rate=0.0001)"]


def test_overlapping_losses_get_a_panel_each(tmp_path: Path) -> None:
    figure = losses_of(tmp_path, [0, 0.002, 0.3])
    assert not figure.subtitle
    assert [panel.title for panel in figure.panels] == [f"run {n} (learning_rate=0.000{n + 1})" for n in range(3)]
    others, line, rings = layers_of(figure.panels[1])
    assert set(values_of(others, "run")) == {"run 0 (learning_rate=0.0001)", "run 2 (learning_rate=0.0003)"}
    assert set(values_of(line, "run") + values_of(rings, "run")) == {"run 1 (learning_rate=0.0002)"}
    labels = ["training loss", "training loss of the other runs", "evaluation loss"]
    assert [entry.label for entry in figure.legend] == labels


def test_losses_far_apart_share_a_chart_with_a_legend_of_all_marks(tmp_path: Path) -> None:
    figure = losses_of(tmp_path, [0, 0.5])
    assert len(figure.panels) == 1
    line, rings = layers_of(figure.panels[0])
    assert line["encoding"]["color"]["scale"]["domain"] == [
        "run 0 (learning_rate=0.0001)", "run 1 (learning_rate=0.0002)",
    ]  # fmt: skip
    assert rings["encoding"]["shape"]["scale"]["domain"] == ["evaluation loss"]
    assert rings["encoding"]["shape"]["legend"] is not None


def test_the_axis_of_losses_does_not_exaggerate(tmp_path: Path) -> None:
    """Losses from 6.92 to 6.95 hardly fall, and the chart shows that."""
    run = enrich(record(0))
    run.metrics.eval_losses = [6.93]
    path = with_traces(tmp_path, [run])
    lines = [json.dumps({"step": step, "loss": 6.95 - 0.03 * (step - 1) / 9}) for step in range(1, 11)]
    (path / "0" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    low, high = layers_of(figures(path)["losses"].panels[0])[0]["encoding"]["y"]["scale"]["domain"]
    assert low < 6.3
    assert high > 7.6


def test_the_longest_wait_for_data_is_reported(tmp_path: Path) -> None:
    for slow, other in ((0, 1), (1, 0)):
        runs = [enrich(record(n, strategy=name, peak=1000.0)) for n, name in enumerate(("ddp", "fsdp"))]
        runs[slow].metrics.data_wait_s, runs[other].metrics.data_wait_s = 0.6, 0.3
        text = text_of(with_traces(tmp_path / str(slow), runs), "step_times")
        assert f"Longest wait for data: 20.0% of the runtime, run {slow}." in text
        assert "Dot: median. Bar: up to the 90th percentile." in text


def test_the_highest_peak_and_its_phase_are_those_of_the_trace(tmp_path: Path) -> None:
    runs = [enrich(record(0, peak=5000.0)), enrich(record(1, strategy="fsdp", peak=4000.0))]
    text = text_of(with_traces(tmp_path, runs), "gpu_memory")
    assert "Highest peak: 5,000 MiB in phase train, run 0 (strategy=ddp)." in text
    assert "Shades: phases of the run. White: its processes start or end." in text


def test_memory_without_a_sample_in_any_phase_is_drawn_without_shades(tmp_path: Path) -> None:
    """Vega draws an empty list of colors in infinite size, and no file can be written."""
    path = with_traces(tmp_path, [enrich(record(0))])
    trace = path / "0" / "memory" / "node0.csv"
    trace.write_text(re.sub(",(setup|warmup|train|eval),", ",,", trace.read_text()))
    figure = figures(path)["cpu_memory"]
    assert len(list(render_files([figure], tmp_path))) == 2
    assert "Shades" not in figure.caption


def test_the_highest_peak_is_that_of_the_table(tmp_path: Path) -> None:
    """The profiler needs memory itself. On a GPU it keeps it, so the evaluation after it does not count either."""
    runs = [enrich(record(0, peak=5000.0))]
    path = with_traces(tmp_path, runs)
    trace = path / "0" / "memory" / "node0.csv"
    later = "1040.0,profile,{0},0,9000.0,143771,90,500,,,,,,,,,\n1041.0,eval,{0},0,{1},143771,90,500,,,,,,,,,\n"
    trace.write_text(trace.read_text() + later.format("gpu", 8000.0) + later.format("cpu", 7000.0))
    text = text_of(path, "gpu_memory")
    assert f"Highest peak: 5,000 MiB in phase train, run 0.\n{LEFT_OUT}" in text
    assert f"Highest peak: 7,000 MiB in phase eval, run 0.\n{LEFT_OUT}" in text_of(path, "cpu_memory")


def test_the_step_times_of_lines_with_warm_up_or_profiled_steps_are_not_drawn(tmp_path: Path) -> None:
    run = enrich(record(0, train__measure_after_step=5, train__log_every=4))
    run.metrics.communication = {"share": 0.1, "first_step": 20}
    path = with_traces(tmp_path, [run])
    lines = [json.dumps({"step": step, "loss": 1.0, "step_time_s": step / 1000}) for step in (4, 8, 12, 16, 20, 22)]
    (path / "0" / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    def drawn() -> list[float]:
        return [row["ms"] for row in layers_of(figures(path)["step_times"].panels[0])[0]["data"]["values"]]

    assert drawn() == [12.0, 16.0]


def test_the_labels_of_steps_are_whole_numbers(tmp_path: Path) -> None:
    """Vega places ticks between the steps 10 and 12."""
    path = with_traces(tmp_path, [enrich(record(0))])
    lines = [json.dumps({"step": step, "loss": 3.0 - step / 10}) for step in (10, 12)]
    (path / "0" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (svg,) = (text for file, text in render_files([figures(path)["losses"]], tmp_path) if file.suffix == ".svg")
    labels = set(re.findall(rb">(1[0-2][.\d]*)</text>", svg))
    assert {b"10", b"12"} <= labels <= {b"10", b"11", b"12"}


def test_nodes_with_different_peaks_are_reported(tmp_path: Path) -> None:
    runs = [enrich(record(0, cluster__nodes=2, peak=5000.0))]
    path = with_traces(tmp_path, runs)
    sampled = path / "0" / "memory" / "node1.csv"
    assert "different peaks" not in text_of(path, "gpu_memory")
    sampled.write_text(sampled.read_text() + "1031.0,eval,gpu,0,9000.0,143771,90,500,,,,,,,,,\n")
    text = text_of(path, "gpu_memory")
    assert "The nodes of run 0 have different peaks: 9,000 MiB on node 1, 5,000 MiB on node 0." in text


def test_the_effect_of_offloading_shows_no_difference_within_the_noise(tmp_path: Path) -> None:
    runs = [record(n, strategy="deepspeed", offload__enabled=bool(n), speed=100.0 - 20 * n) for n in range(2)]
    for number, run in enumerate(runs):
        run.memory["cpu"] = [{"node": 0, "peak_mib": 900.0 + 50 * number, "average_mib": 900.0, "mode_mib": 900.0}]
    write(tmp_path, *runs)
    (table,) = figures(tmp_path)["memory_throughput"].tables
    assert table.title == "Effect of offloading"
    (row,) = table.rows
    assert row[-1] == "~0% (950 MiB)"

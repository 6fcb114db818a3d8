"""The sentences under the figures: each follows the numbers, and turns when two records are swapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from distexp.report.data.metrics import COMMUNICATION
from distexp.report.data.overview import Overview
from distexp.report.data.rows import load_rows
from distexp.report.findings.base import Finding
from distexp.report.findings.growth import growth_findings, pairs_table
from distexp.report.findings.traces import loss_findings, memory_findings, step_findings
from distexp.report.findings.tradeoff import tradeoff_findings
from distexp.report.traces import load_traces
from distexp.runs.record import RunRecord
from tests.helpers.records import record
from tests.helpers.report_sweeps import enrich, growing_sweep, leave_traces, with_traces, zero_sweep

Sweep = Callable[..., Path]


def overview(path: Path) -> Overview:
    return Overview.from_rows(load_rows([path])[0])


def said(findings: Iterable[Finding]) -> str:
    return "\n".join(f"{finding.question or ''} {finding.text}" for finding in findings)


def tradeoffs(path: Path) -> str:
    return said(tradeoff_findings(overview(path)))


def grown(path: Path) -> str:
    return said(growth_findings(overview(path)))


def over_time(path: Path) -> str:
    traces = load_traces(overview(path))
    return said([*memory_findings(traces, "gpu"), *loss_findings(traces), *step_findings(traces)])


STAGE = "With model=bloom_560m, offload=false, zero_stage={0} has the lowest GPU memory at peak, 21,000 MiB"
OFFLOAD = "With model=bloom_560m, zero_stage=1, offload=true against false: the same training takes {0}x the time"
SPEED = "From 1 to 8 workers the same work becomes {0}x as fast, where 8x is ideal: efficiency {1}"


@pytest.mark.parametrize(
    ("sweep", "swapped", "tell", "texts"),
    [
        (zero_sweep, (0, 4), tradeoffs, (STAGE.format(3), STAGE.format(1))),
        (zero_sweep, (0, 1), tradeoffs, (OFFLOAD.format("1.82"), OFFLOAD.format("0.55"))),
        (zero_sweep, (0, 1), tradeoffs, ("31,000 to 19,220 MiB (-38.0%)", "19,220 to 31,000 MiB (+61.3%)")),
        (zero_sweep, (0, 7), over_time, ("step takes 69.2 ms in run 0 (", "step takes 69.2 ms in run 7 (")),
        (growing_sweep, (0, 5), grown, (SPEED.format("5.20", "65%"), SPEED.format("0.19", "2%"))),
        (growing_sweep, (1, 3), grown, ("costs 10.5% of the speed: 170.0", "gains 11.8% of speed: 190.0")),
    ],
)
def test_a_sentence_turns_when_two_records_are_swapped(
    tmp_path: Path, sweep: Sweep, swapped: tuple[int, int], tell: Callable[[Path], str], texts: tuple[str, str]
) -> None:
    before, after = texts
    one, other = tell(sweep(tmp_path / "a")), tell(sweep(tmp_path / "b", swap=swapped))
    assert before in one, one
    assert after not in one
    assert after in other, other
    assert before not in other


def test_the_front_is_that_of_each_model(tmp_path: Path) -> None:
    text = tradeoffs(zero_sweep(tmp_path))
    assert "Of model=bloom_560m, 6 of 6 configurations lie on the front" in text
    assert "Of model=bloom_3b, 5 of 5 configurations lie on the front" in text
    assert "Run 6 (model=bloom_3b, zero_stage=1, offload=false) ran out of memory" in text
    assert "offload=true against false: true completes where false ended oom_gpu" in text


def test_weak_scaling_is_judged_by_the_time_of_a_workers_share(tmp_path: Path) -> None:
    text = grown(growing_sweep(tmp_path, weak=True))
    assert "do the samples/s remain constant? They should grow with the workers" in text
    assert "from 1 to 8 workers the work done in a second grew 5.20x, where 8x is ideal" in text
    assert "each worker's share took 1.54x the time: efficiency 65%" in text
    assert "GPU memory at peak stays stable from 1 to 8 workers" in text


def test_a_growing_model_counts_as_work(tmp_path: Path) -> None:
    """The same samples/s on four times the parameters and workers is ideal, not a quarter."""
    runs: list[RunRecord] = []
    for number, (workers, layers) in enumerate(((1, 3), (2, 6), (4, 12))):
        run = record(number, cluster__workers_per_node=workers, model__num_layers=layers, dataset__train_size=500,
                     speed=100.0 / (1 + number / 4))  # fmt: skip
        runs.append(enrich(run, parameters=1_000_000 * layers))
        run.metrics.total_steps = None
    series = overview(with_traces(tmp_path, runs)).series
    assert [each.kind for each in series] == ["weak"]
    assert [round(point.efficiency, 3) for point in series[0].points] == [1.0, 0.8, 0.667]


def test_what_is_neither_strong_nor_weak_is_called_so(tmp_path: Path) -> None:
    sizes = {1: 500, 2: 500, 4: 2000}
    runs = [
        record(n, cluster__workers_per_node=w, dataset__train_size=size) for n, (w, size) in enumerate(sizes.items())
    ]
    text = grown(with_traces(tmp_path, runs))
    assert "Neither strong nor weak scaling: from 1 to 4 workers the work (samples x parameters) changes 4.00x" in text


def test_configurations_scale_apart(tmp_path: Path) -> None:
    runs = [
        record(4 * n + k, strategy=name, cluster__workers_per_node=workers, speed=speed * workers / (1 + k * n / 2))
        for n, (name, speed) in enumerate((("ddp", 100.0), ("fsdp", 50.0))) for k, workers in enumerate((1, 2))
    ]  # fmt: skip
    series = {each.name: each for each in overview(with_traces(tmp_path, runs)).series}
    assert round(series["strategy=ddp"].points[-1].efficiency, 3) == 1.0
    assert round(series["strategy=fsdp"].points[-1].efficiency, 3) == 0.667


def test_equal_worlds_on_one_node_and_on_several_are_paired(tmp_path: Path) -> None:
    table = pairs_table(overview(growing_sweep(tmp_path)))
    assert table is not None
    assert table.rows == (
        ("-", "2", "1 x 2", "190.0", "2 x 1", "170.0", "0.89"),
        ("-", "4", "1 x 4", "340.0", "2 x 2", "300.0", "0.88"),
    )
    assert pairs_table(overview(zero_sweep(tmp_path / "other"))) is None


Shares = Mapping[int, tuple[float | None, float | None]]


def talking(path: Path, shares: Shares) -> Path:
    """Runs of these numbers of workers, with shares of communication in all and exposed."""
    runs = []
    for number, (workers, (share, exposed)) in enumerate(shares.items()):
        run = record(number, cluster__workers_per_node=workers, dataset__train_size=500, speed=100.0 * workers)
        run.metrics.communication = {"share": share, "exposed_share": exposed}
        runs.append(run)
    return with_traces(path, runs)


HIDDEN = "not hidden behind computing)"


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ({1: (0.0, 0.0), 2: (0.12, 0.04), 4: (0.234, 0.09)}, f"At 4 workers 23% of a step was communication "
         f"(9% {HIDDEN}, at 2 workers 12% (4% {HIDDEN}."),
        ({1: (0.0, 0.0), 2: (0.234, 0.09), 4: (0.12, 0.04)}, f"At 4 workers 12% of a step was communication "
         f"(4% {HIDDEN}, at 2 workers 23% (9% {HIDDEN}."),
        ({1: (0.0, None), 2: (0.31, None), 4: (None, None)}, "At 2 workers 31% of a step was communication."),
    ],
)  # fmt: skip
def test_the_share_of_communication_is_told(tmp_path: Path, shares: Shares, text: str) -> None:
    path = talking(tmp_path, shares)
    assert f"How much of a step is communication? {text}" in grown(path)
    drawn = overview(path)
    assert COMMUNICATION in {figure.name for figure in drawn.metrics()}
    assert drawn.rows[1].metrics[COMMUNICATION] == pytest.approx(100 * (shares[2][0] or 0))


def test_nothing_is_told_of_communication_that_was_not_measured(tmp_path: Path) -> None:
    for path in (growing_sweep(tmp_path / "a"), talking(tmp_path / "b", {1: (None, None), 2: (None, None)})):
        assert "communication" not in grown(path)
        assert COMMUNICATION not in {figure.name for figure in overview(path).metrics()}


def test_curves_that_part_are_said_to(tmp_path: Path) -> None:
    same = [enrich(record(n, strategy=name, peak=1000.0)) for n, name in enumerate(("ddp", "fsdp"))]
    assert "follow the same losses: at each step drawn they are equal" in over_time(with_traces(tmp_path / "a", same))
    other = tmp_path / "b"
    with_traces(other, same[:1])
    (other / "1").mkdir()
    same[1].write(other / "1")
    leave_traces(other / "1", same[1], gap=0.03)
    text = over_time(other)
    assert "do not follow the same losses exactly" in text
    assert "2.91% apart" in text


def test_the_peak_and_its_phase_are_those_of_the_trace(tmp_path: Path) -> None:
    text = over_time(
        with_traces(tmp_path, [enrich(record(0, peak=5000.0)), enrich(record(1, strategy="fsdp", peak=4000.0))])
    )
    assert "The highest peak is that of run 0 (strategy=ddp): 5,000 MiB" in text
    assert "s after the start in phase train" in text
    assert "The lowest is that of run 1 (strategy=fsdp): 4,000 MiB, 80% of that." in text

"""Tests of ``benchmarks/forecast.py``: its configurations, and the errors of a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.commands import select, sweep_name
from benchmarks.forecast import Row, add_rows, in_turns, main, preflight_run, runs, table, warm_runs
from tests.helpers.runs import resolve_cell


def test_the_configurations_on_one_gpu_and_on_two_are_the_same() -> None:
    one, two = list(runs(1)), list(runs(2))
    assert len({run.name for run in one}) == 24
    assert [run.name for run in one] == [run.name for run in two]


def test_configurations_that_compile_run_once_before_they_are_profiled() -> None:
    compiled = {run.name for run in runs(1) if "kernels=fast" in run.overrides and "zero_stage=3" not in run.overrides}
    assert {run.name for run in warm_runs()} == compiled
    assert len(compiled) == 9
    for run in select(list(warm_runs()), "ddp fast 4"):
        assert resolve_cell(*run.overrides).train.profile_steps == 0


def test_a_configuration_is_complete_before_the_next_one_starts() -> None:
    names = [run.name for run in in_turns(["ddp reference 4", "zero_stage=2 fast 16"])]
    assert names == [
        *("ddp reference 4 on one", "ddp reference 4 on several"),
        *("zero_stage=2 fast 16 warm", "zero_stage=2 fast 16 on one", "zero_stage=2 fast 16 on several"),
    ]


def test_the_several_gpus_are_those_of_the_command() -> None:
    one, several = in_turns(["ddp reference 4"], gpus=4)
    assert (one.workers, several.workers) == (4, 4)
    assert "cluster.workers_per_node=1" in one.overrides
    assert "cluster.workers_per_node=4" in several.overrides
    threads = [text for run in (one, several) for text in run.overrides if text.startswith("cluster.cpus_per_worker=")]
    assert len(set(threads)) == 1
    assert "cluster.workers_per_node=4" in preflight_run(4).overrides


@pytest.mark.parametrize(
    ("only", "name"),
    [
        ("", "runs"),
        ("zero_stage=3 fast", "runs_zero_stage-3-fast"),
        ("ddp reference 4, full_shard", "runs_ddp-reference-4_full_shard"),
    ],
)
def test_the_folder_of_a_sweep_has_no_character_of_hydra(only: str, name: str) -> None:
    assert sweep_name("runs", only) == name


A, B = Row("a", 90.0, 100.0, 104.0, 95.0, 110.0), Row("b", 50.0, 100.0, 80.0, 70.0, 90.0)


def test_the_table_has_the_errors_and_the_share_inside_of_the_interval() -> None:
    text = table([A, B], 3)
    assert "| a | 90.0 | 100.0 | 104.0 | +4.0% | 95.0 to 110.0 | yes |" in text
    assert "2 of 3 configurations. Median error 12.0% (bound 5%), worst 20.0% (15%), inside 50% (90%)." in text


def test_several_commands_extend_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results" / "rows.json"
    zero = Row("zero_stage=3 fast 4", *[1.0] * 5)
    add_rows(path, [zero])
    add_rows(path, [A, B])
    ddp = Row("ddp reference 4", 90.0, 100.0, 100.0, 95.0, 110.0)
    assert add_rows(path, [ddp, Row("a", *[2.0] * 5)]) == [ddp, zero, Row("a", *[2.0] * 5), B]
    assert main(["table", str(path)]) == [ddp, zero, Row("a", *[2.0] * 5), B]
    assert "4 of 24 configurations. Median error 0.0% (bound 5%), worst 20.0%" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("table",), ("table", "none.json")])
def test_a_table_needs_a_file(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"give one file|write one with --json none\.json"):
        main(list(arguments))


def test_a_text_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--only 'ddpp' is in no name: use a part of ddp reference 4, "):
        main(["--only", "ddpp", "--gpus", "2", "--results", str(tmp_path)])


@pytest.mark.parametrize("gpus", ["0", "1"])
def test_a_forecast_needs_several_gpus(gpus: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"--gpus {gpus} is too few: use at least 2"):
        main(["--gpus", gpus, "--results", str(tmp_path)])

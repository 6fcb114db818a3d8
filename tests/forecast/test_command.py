"""Tests of ``distexp forecast``, with step times that follow a formula."""

from __future__ import annotations

import copy
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distexp.compose.composition import Cell
from distexp.config import Config, ConfigError, ForecastConfig, StrategyConfig
from distexp.config.overrides import parse, plain_value
from distexp.forecast import __main__ as arguments
from distexp.forecast import size_rows
from distexp.forecast.__main__ import main
from distexp.forecast.command import print_forecast, what_if
from distexp.forecast.communication import Forecast, Target
from distexp.forecast.profiled_run import read_profiled_run
from distexp.forecast.size_rows import default_sizes
from distexp.guard.config_files import remember_file
from distexp.plan.estimate import Estimate
from distexp.runs.predictions import read_errors, read_forecasts
from distexp.runs.record import RunRecord
from tests.helpers.forecasts import formula, profiled_record, write_profiled
from tests.helpers.planning import FormulaPlanner, composed
from tests.helpers.records import record, write


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(size_rows, "forecast_steps", formula)
    monkeypatch.setattr(sys, "argv", list(sys.argv))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return write_profiled(tmp_path / "sweep", profiled_record())


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    """Return 1, 2 and 4 nodes of 2 workers, as Hydra composes them."""
    shared = ("command=plan", "strategy=ddp", "cluster.device=cpu", "cluster.workers_per_node=2")
    with composed(shared, *((f"cluster.nodes={count}",) for count in (1, 2, 4))) as (found, _):
        return found


def forecast(sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    settings = ForecastConfig(**{"memory": "off", **options})
    print_forecast(read_profiled_run(sweep / "0"), cells, settings, FormulaPlanner())
    return capsys.readouterr().out


def as_json(sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(forecast(sweep, cells, capsys, output="json"))
    return found


def changed(cells: Sequence[Cell], change: Callable[[Config], object]) -> list[Cell]:
    """Return the cells with other values of their configurations."""
    found = copy.deepcopy(list(cells))
    for cell in found:
        assert cell.config is not None
        change(cell.config)
    return found


def test_the_command_composes_the_run_with_other_sizes(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ("cluster.nodes=1,2,3", "cluster.workers_per_node=2", "train.global_batch_size=64")
    assert main([str(sweep), *typed, "forecast.memory=off", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # A global batch of 64 is 4 micro-batches of 8 on each of 2 workers, and 2 on each of 4.
    assert [(row["workers"], row["micro_batches"], row["samples_per_step"]) for row in found] == [
        (2, 4, 64.0), (4, 2, 64.0), (6, None, None),
    ]  # fmt: skip
    assert found[0]["step_time_s"] == pytest.approx(0.34)
    # The same global batch on all sizes: 0.34 s with 2 workers, 0.2 s with 4. The profiled run had another batch.
    assert [row["efficiency"] for row in found[:2]] == pytest.approx([1.0, 0.34 / 0.2 / 2])
    assert found[2]["step_time_s"] is None
    assert "train.global_batch_size=64 is no multiple" in found[2]["reason"]


def test_a_run_with_a_preset_of_a_folder_is_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_profiled(tmp_path / "sweep", profiled_record(0, "experiment=mine"))
    preset = tmp_path / "my conf" / "experiment" / "mine.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text("# @package _global_\nhydra: {run: {dir: fixed}}\n")  # A forecast makes no directory.
    command = {"words": ["experiment=mine", "--config-dir", "my conf"], "directory": str(tmp_path)}
    (sweep / "command.json").write_text(json.dumps(command))
    remember_file(sweep / "command.json")
    sizes = ("cluster.nodes=1", "forecast.memory=off")
    assert main([str(sweep), *sizes]) == 2
    message, _, option = capsys.readouterr().err.partition(": add ")
    assert message == f"distexp: experiment=mine of {sweep}/0 is an option of another folder"
    assert shlex.split(option) == ["--config-dir", f"{tmp_path}/my conf"]
    assert main([str(sweep), *shlex.split(option), *sizes]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("typed", "is_set"),
    [("forecast.memory=off", False), ("plan.gpu=a100-80gb", False), ("forecast.memory=predict", True),
     ("plan.timeout_s=60", True)],
)  # fmt: skip
def test_the_memory_of_the_gpu_is_that_of_the_profiled_run_if_it_is_needed(
    typed: str, is_set: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distexp.system.cgroups.visible_gpus", tuple)
    profiled = profiled_record(cluster__device="cuda", peak=8192.0)
    assert profiled.environment is not None
    profiled.environment.gpu_total_mib = 143_771
    run = read_profiled_run(write_profiled(tmp_path / "gpu", profiled) / "0")
    found = arguments.forecast_arguments(run, [typed], as_json=False)
    assert any(text == "plan.gpu_memory_gb=140.4" for text in found) == is_set


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_the_path_of_a_preflight_may_have_quotes(quote: str, tmp_path: Path) -> None:
    run = read_profiled_run(write_profiled(tmp_path / "run", profiled_record()) / "0")
    found = arguments.forecast_arguments(run, [f"forecast.preflight={quote}/tmp/a b{quote}"], as_json=False)
    assert "forecast.preflight='/tmp/a b'" in found


@pytest.mark.parametrize("value", ["it's, (1).jsonl", "a,b.jsonl"])
def test_a_run_with_any_path_in_a_folder_of_any_name_is_forecast(value: str, tmp_path: Path) -> None:
    profiled = profiled_record()
    profiled.run.overrides = ["dataset=text", f"dataset.path={value}"]
    run = read_profiled_run(write_profiled(tmp_path / f'"{value}"', profiled) / "0")
    typed = parse(arguments.forecast_arguments(run, [], as_json=False))
    values = {override.get_key_element(): plain_value(override.value()) for override in typed}
    assert values["dataset.path"] == value
    assert values["forecast.run"] == str(run.directory)


def test_the_folder_of_a_run_may_have_the_name_of_an_override(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = write_profiled(tmp_path / 'lr=0.1 "it\'s"', profiled_record())
    assert main([str(sweep), "cluster.nodes=1", "forecast.memory=off", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_the_answer_comes_first_and_each_size_has_a_row(
    sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = forecast(sweep, cells, capsys).splitlines()
    # 100 ms with 2 workers and 160 ms with 8: efficiency 100 / 160, and 10 % either way.
    assert lines[0] == "8 workers: 62% efficiency (57% to 69%), 400.0 samples/s; limited by the all-reduce."
    size_rows = [line.split() for line in lines if line.startswith("    ") and " to " in line]
    assert [(row[0], row[2], row[4], row[5], row[9]) for row in size_rows] == [
        ("1", "2", "16", "100.0", "160.0"), ("2", "4", "32", "120.0", "266.7"), ("4", "8", "64", "160.0", "400.0"),
    ]  # fmt: skip
    assert "Efficiency: ideal time / real time, relative to 1 x 2 workers." in lines
    assert "Beyond the measured range, 4 x 2 workers: 4 x the workers of the profiled run (2)." in lines


def test_a_narrow_terminal_keeps_what_matters(
    sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = forecast(sweep, cells, capsys)
    title = next(line for line in text.splitlines() if "ms/step" in line)
    assert len(title) <= 80
    assert all(name in title for name in ("nodes", "samples/s", "ciency"))
    assert "Hidden columns" not in text, "they continue below"


def test_json_has_the_same_rows(sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(sweep, cells, capsys)
    assert [round(row["step_time_s"], 6) for row in found] == [0.1, 0.12, 0.16]
    assert found[2]["low_s"] == pytest.approx(0.144)
    assert found[2]["exposed_communication_share"] == pytest.approx(0.5)
    assert found[2]["efficiency"] == pytest.approx(0.625)


def test_an_efficiency_above_100_percent_needs_less_work_per_worker(
    sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flat(run_dir: Path, targets: Sequence[Target], machine: object, trusted: Sequence[str] = ()) -> list[Forecast]:
        """Return 100 ms for 1 and 4 nodes, and 90 ms for 2; 10 % either way."""
        steps = [0.09 if target.nodes == 2 else 0.1 for target in targets]
        return [
            Forecast(target, step_s, 0.9 * step_s, 1.1 * step_s)
            for target, step_s in zip(targets, steps, strict=True)
        ]  # fmt: skip

    monkeypatch.setattr(size_rows, "forecast_steps", flat)
    replicas = [row["efficiency_high"] for row in as_json(sweep, cells, capsys)]
    assert replicas == pytest.approx([1.0, 1 / 0.9, 1.0])

    def shard(config: Config) -> None:
        config.strategy = StrategyConfig("distexp.strategies.fsdp.FSDP", "fsdp")
        config.fsdp.sharding = "full_shard"

    found = as_json(sweep, changed(cells, shard), capsys)
    assert [row["efficiency_high"] for row in found] == pytest.approx([1.0, 1 / 0.81, 1 / 0.9])
    assert [row["efficiency_low"] for row in found] == pytest.approx([1 / 1.1, 1 / 0.99, 1 / 1.1])


def test_an_impossible_size_is_a_row_with_its_reason(
    sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]
) -> None:
    found = [cells[0], replace(cells[1], config=None, errors=["one is wrong", "two is wrong"])]
    text = forecast(sweep, found, capsys)
    assert text.startswith("2 workers: 100% efficiency")
    assert text.splitlines()[0].endswith(" 1 of 2 sizes has no forecast: see below.")
    assert "2 x 2: one is wrong | two is wrong" in text
    with pytest.raises(ConfigError, match="one is wrong"):
        forecast(sweep, found[1:], capsys)


def test_a_size_with_other_layers_is_not_forecast(
    sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]
) -> None:
    def scale(config: Config) -> None:
        config.model.num_layers = 2 * config.cluster.nodes

    found = as_json(sweep, changed(cells, scale), capsys)
    assert "reason" not in found[0]
    assert "model.num_layers=4 instead of 2 (scaling=fixed): not forecast, profile a run" in found[1]["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cluster.nodes=0",), "cluster.nodes=0 must be a whole number from 1"),
        (("cluster.nodes=two",), "cluster.nodes=two must be a whole number from 1"),
        (("cluster.nodes=4096",), "makes 8,192 workers, but a forecast has at most 4,096"),
        (("nodes=1,2",), "distexp: nodes is not a key: write cluster.nodes=1,2\n"),
        (("strategy=fsdp",), "strategy=fsdp changes what a worker computes"),
        (("parallel.tensor=4",), "parallel.tensor=4 cluster.workers_per_node=4 profile=true"),
        (("parallel.tensor=0",), "leave it out. This training cannot be profiled with it either: parallel.tensor"),
        (("parallel.expert=2",), "leave it out. This training cannot be profiled with it either: parallel.expert=2"),
        (("cluster.device=cuda",), "cluster.device=cuda changes what a worker computes"),
        (("scaling=fixed,weak_data",), "scaling=fixed,weak_data has several values"),
        (("hydra.run.dir=x",), "hydra.run.dir=x has no effect, because a forecast makes no directory: leave it out"),
        (
            ("train.gradient_accumulation_steps=2", "train.global_batch_size=64"),
            "steps=2 has no effect: train.global_batch_size=64 sets the accumulation: leave one of the two out",
        ),
        (("--multirun",), "--multirun is not an option of forecast"),
        (("another",), "2 directories"),
    ],
)
def test_errors_have_value_limit_and_hint(
    sweep: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main([str(sweep), *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_the_accumulation_of_a_run_with_a_global_batch_needs_another_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = write_profiled(tmp_path, profiled_record(0, "train.global_batch_size=32", train__global_batch_size=32))
    typed = (str(sweep), "cluster.nodes=1", "forecast.memory=off", "train.gradient_accumulation_steps=4", "--json")
    assert main(typed) == 2
    message = "train.global_batch_size=32 sets the accumulation: leave it out, or add train.global_batch_size=null\n"
    assert message in capsys.readouterr().err
    assert main([*typed, "train.global_batch_size=null"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["micro_batches"] == 4


def test_runs_that_cannot_be_forecast_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert "none does not exist: give the directory of a run" in capsys.readouterr().err
    plain = write(tmp_path / "plain", record(0, overrides=("strategy=ddp",)))
    assert main([str(plain)]) == 2
    assert "has no profile for a forecast: run it with distexp strategy=ddp profile=true" in capsys.readouterr().err
    (plain / "command.json").write_text('{"words": ["strategy=ddp", "-cd=conf"]}')
    assert main([str(plain)]) == 2
    assert "strategy=ddp profile=true --config-dir conf\n" in capsys.readouterr().err
    failed = write(tmp_path / "failed", record(0, status="failed"))
    assert main([str(failed)]) == 2
    assert "because the run is failed: give a completed run" in capsys.readouterr().err
    several = write_profiled(tmp_path / "several", profiled_record(0), profiled_record(1, "train.seed=1"))
    assert main([str(several)]) == 2
    error = capsys.readouterr().err
    assert "has 2 profiled runs: give one of them:\n" in error
    assert f"{several}/1 (profile=true train.seed=1)" in error
    assert main([]) == 2
    assert "no sweep below multirun_outputs/" in capsys.readouterr().err


def test_without_a_run_the_newest_sweep_is_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, age_s in {"a": 0, "b": 3600, "c": 7200}.items():
        sweep = write_profiled(tmp_path / "multirun_outputs" / "distexp" / name, profiled_record())
        for path in sweep.rglob("*"):
            changed_at = path.stat().st_mtime - age_s
            os.utime(path, (changed_at, changed_at))
    assert main(["cluster.nodes=1", "forecast.memory=off"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("newest sweep: multirun_outputs/distexp/a\n")
    assert printed.out.startswith("2 workers: 100% efficiency")


def test_the_size_of_the_data_of_the_profiled_run_does_not_stop_weak_scaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = write_profiled(tmp_path / "sized", profiled_record(0, "dataset.train_size=64"))
    assert main([str(sweep), "cluster.nodes=1,2", "scaling=weak_data", "forecast.memory=off", "--json"]) == 0
    assert [row["workers"] for row in json.loads(capsys.readouterr().out)] == [2, 4]


def test_a_batch_that_cannot_be_shared_has_a_hint(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(sweep), "cluster.nodes=1,3", "train.global_batch_size=64", "forecast.memory=off")
    assert main(arguments) == 0
    assert "batch grow with the workers: train.global_batch_size=null." in capsys.readouterr().out


def test_a_disturbed_profile_is_a_warning(
    tmp_path: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]
) -> None:
    run = profiled_record()
    run.metrics.train_steps_per_second = 1 / 0.2
    sweep = write_profiled(tmp_path / "disturbed", run)
    warning = "The profiled run was disturbed (its mean step took 2.0 times as long as its median step), so"
    assert warning in forecast(sweep, cells, capsys)
    print_forecast(read_profiled_run(sweep / "0"), cells, ForecastConfig(memory="off", output="json"), FormulaPlanner())
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)) == len(cells)
    assert warning in printed.err


@pytest.mark.parametrize(("without_core_ms", "warns"), [(10.0, False), (50.0, True)])
def test_workers_that_waited_for_a_core_are_a_warning(
    without_core_ms: float, warns: bool, tmp_path: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]
) -> None:
    run = profiled_record()
    run.metrics.step_breakdown = [{"rank": 0, "step_ms": 100.0, "without_core_ms": without_core_ms}]
    sweep = write_profiled(tmp_path / "waiting", run)
    warning = "The workers waited for a free CPU core for 50% of the profiled step, so the forecast may be wrong."
    assert (warning in forecast(sweep, cells, capsys)) == warns


def test_more_workers_than_cores_are_named(
    sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "This machine has 4 CPU cores. A forecast assumes a core for each worker"
    for cores, is_named in ((4, True), (8, False)):
        monkeypatch.setattr("distexp.system.cgroups.cpu_count", lambda cores=cores: cores)
        assert (text in forecast(sweep, cells, capsys)) == is_named


def test_another_users_run_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_profiled(tmp_path / "foreign", profiled_record(0, "trusted_packages=[evil]"))
    (sweep / "command.json").write_text('{"words": [], "directory": "/", "cells": 1, "changed": true}')
    assert main([str(sweep)]) == 2
    assert "'trusted_packages=[evil]', which could run code" in capsys.readouterr().err


def test_without_sizes_powers_of_two_fill_a_node_and_then_nodes() -> None:
    assert default_sizes(8) == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8)]
    assert default_sizes(6) == [(1, 1), (1, 2), (1, 4), (1, 6), (2, 6), (4, 6), (8, 6)]
    assert default_sizes(1)[-1] == (64, 1)


def test_energy_and_price_follow_from_the_measured_power(
    tmp_path: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]
) -> None:
    run = profiled_record(peak=1000.0)
    # 2 GPUs: 100 W idle each; 10 J per sample are 160 J per step, of which 20 J are idle: 70 J per GPU are busy.
    run.metrics.energy = {"j_per_sample": 10.0, "idle_w": 200.0}
    sweep = write_profiled(tmp_path / "gpu", run)
    priced = changed(cells, lambda config: setattr(config.cluster, "price_per_gpu_hour", 3.6))
    assert as_json(sweep, priced, capsys)[2]["price_per_million_samples"] is None, "a run on CPUs has no price"
    found = as_json(sweep, changed(priced, lambda config: setattr(config.cluster, "device", "cuda")), capsys)
    assert found[0]["j_per_sample"] == pytest.approx(10.0)
    assert found[2]["j_per_step"] == pytest.approx(8 * (100 * 0.16 + 70))
    # 8 GPUs for 0.16 s and 64 samples, at 0.001 per second of a GPU.
    assert found[2]["price_per_million_samples"] == pytest.approx(8 * 0.16 / 64 * 0.001 * 1e6)


def test_memory_is_that_of_the_planner(sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]) -> None:
    text = forecast(sweep, cells, capsys, memory="predict")
    assert text.count(" GiB  ") == 3
    assert "Memory was not predicted before" in forecast(sweep, cells, capsys, memory="cached")


def test_a_verdict_on_several_nodes_is_about_one_node(
    sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]
) -> None:
    def on_cpus(config: Config) -> Estimate:  # A node needs 3 GiB, so all simulated nodes of a local run need more.
        host_mib = 3_000.0
        needed = host_mib * config.cluster.nodes
        return Estimate(step_mib=needed, host_mib=host_mib, error_bound=0.0, on_cpu=True)

    nodes_of_4_gb = changed(cells, lambda config: setattr(config.plan, "host_memory_gb", 4.0))
    arguments = (read_profiled_run(sweep / "0"), nodes_of_4_gb)
    print_forecast(*arguments, ForecastConfig(memory="predict", output="json"), FormulaPlanner(on_cpus))
    assert [row["memory"]["verdict"] for row in json.loads(capsys.readouterr().out)] == ["fits"] * 3
    print_forecast(*arguments, ForecastConfig(memory="predict"), FormulaPlanner(on_cpus))
    assert "Memory and verdict: of one node. Assumed: each node has 4.0 GiB." in capsys.readouterr().out


def test_forecasts_are_kept_and_repeated_ones_replaced(
    sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]
) -> None:
    forecast(sweep, cells[:2], capsys)
    forecast(sweep, cells[1:], capsys)
    kept = read_forecasts(sweep / "0")
    assert [forecast.workers for forecast in kept] == [2, 4, 8]
    assert kept[2].step_time_s == pytest.approx(0.16)
    (sweep / "0" / "forecast.json").write_text('{"schema": 1, "forecasts": [{"nodes": "x"}]}')
    assert read_forecasts(sweep / "0") == []


def test_a_measured_run_counts_once(sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]) -> None:
    write(sweep, profiled_record(1, step_s=0.15, run_id=cells[1].id, cluster__nodes=2))
    for _ in range(2):
        text = forecast(sweep, cells, capsys)
        assert "-20.0%" in text
        assert "Median error of 1 forecast on this kind of machine: 20.0%. In the interval: 0 of 1." in text
        assert "Their errors do not widen the intervals." in text
    assert len(read_errors("cpu of unknown")) == 1
    found = as_json(sweep, cells, capsys)
    assert (found[1]["measured_step_time_s"], found[1]["error"]) == (0.15, pytest.approx(-0.2))
    assert found[2]["high_s"] == pytest.approx(1.1 * 0.16), "one bad error widens nothing"


def test_errors_of_three_forecasts_widen_later_intervals(
    sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]
) -> None:
    for number, step_s in ((1, 0.15), (2, 0.15), (3, 0.6)):
        profiled = write_profiled(sweep.parent / str(number), profiled_record())
        write(profiled, profiled_record(1, step_s=step_s, run_id=cells[1].id, cluster__nodes=2))
        profile = RunRecord.read(profiled / "0" / "record.json")
        profile.run.started_at = f"2026-01-0{number}"
        profile.write(profiled / "0")
        forecast(profiled, cells[:2], capsys)
    # 0.15 instead of 0.12 s: 1.25 times as long. The worst one, 0.6 s, does not count.
    found = as_json(sweep, cells, capsys)
    assert found[2]["low_s"] == pytest.approx(0.16 / 1.25)
    assert found[2]["high_s"] == pytest.approx(0.16 * 1.25)
    assert "at least from the forecast / 1.25 to the forecast x 1.25." in forecast(sweep, cells, capsys)
    own = as_json(sweep.parent / "1", cells[:2], capsys)[1]
    assert own["high_s"] == pytest.approx(1.1 * 0.12), "its own error does not widen it, and the two others are too few"


def test_a_forecast_for_another_network_is_no_error_of_the_tool(
    sweep: Path, cells: Sequence[Cell], capsys: pytest.CaptureFixture[str]
) -> None:
    write(sweep, profiled_record(1, step_s=0.15, run_id=cells[1].id, cluster__nodes=2))
    found = json.loads(forecast(sweep, cells, capsys, output="json", network="infiniband-ndr-400g"))
    assert found[1]["error"] is None
    assert read_errors("cpu of unknown") == []
    assert [forecast.what_if for forecast in read_forecasts(sweep / "0")] == [
        "",
        *["forecast.network=infiniband-ndr-400g"] * 2,
    ]
    assert as_json(sweep, cells, capsys)[1]["error"] == pytest.approx(-0.2), "the forecast of this machine is kept too"
    assert len(read_forecasts(sweep / "0")) == 5
    assert len(read_errors("cpu of unknown")) == 1


@pytest.mark.parametrize(("gpu", "assumed"), [(None, ""), ("H200", "forecast.preflight=")])
def test_bandwidths_of_another_machine_are_an_assumption(tmp_path: Path, gpu: str | None, assumed: str) -> None:
    measured = profiled_record(1)
    assert measured.environment is not None
    measured.environment.gpu_name = gpu
    folder = write(tmp_path / "preflight", measured) / "1"
    assert what_if(ForecastConfig(preflight=str(folder)), profiled_record(), 1).startswith(assumed)
    assert bool(what_if(ForecastConfig(preflight=str(folder)), profiled_record(), 1)) == bool(assumed)
    assert what_if(ForecastConfig(preflight=str(tmp_path)), profiled_record(), 1), "without a record"


def test_help_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "usage: distexp forecast [RUN]" in capsys.readouterr().out

"""Tests of a custom strategy that states what forecasts and searches ask: it takes part as those of distexp do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distexp.choose.candidate import Candidate, label, row_label
from distexp.choose.predictions.rough_forecast import MachineSpeeds, Work, rough_step_s
from distexp.config import ConfigError
from distexp.forecast.communication import Target
from distexp.forecast.profiled_run import read_measured_step
from distexp.forecast.steps import forecast_steps
from distexp.runs.record import RunRecord
from distexp.runs.step_files import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Collective,
    Parameters,
    Segment,
    StepModel,
    write_step_model,
)
from distexp.strategies.base import recorded_strategy
from tests.helpers.records import record
from tests.helpers.runs import resolve_cell, run_distexp
from tests.helpers.searches import FakeLauncher, run_search
from tests.helpers.toy_strategy import CONF, TOY, AllReduce, OneReduction

TARGET = "tests.helpers.toy_strategy.AllReduce"
TRAINING = (
    *("model=gpt_tiny", "dataset=squad_sample", "dataset.train_size=160", "dataset.eval_size=8"),
    *("cluster.device=cpu", "train.global_batch_size=16", "train.max_steps=14", "train.log_every=1"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a profiled run of the toy on two workers, and one of ``single``."""
    folder = tmp_path_factory.mktemp("runs")
    for name, further in {
        "toy": (*TOY, "strategy=toy", "cluster.workers_per_node=2", "train.micro_batch_size=4", "profile=true"),
        "single": ("strategy=single", "train.micro_batch_size=8"),
    }.items():
        done = run_distexp(*further, *TRAINING, f"hydra.run.dir={name}", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_it_has_the_losses_of_single(runs: Path) -> None:
    toy, single = (RunRecord.read(runs / name / "record.json") for name in ("toy", "single"))
    assert toy.built is not None
    assert (toy.built.wrapper, toy.built.mesh) == ("all-reduce", [2, 1])
    assert toy.metrics.train_losses == pytest.approx(single.metrics.train_losses, rel=1e-5)
    assert toy.metrics.eval_losses == pytest.approx(single.metrics.eval_losses, rel=1e-5)


@pytest.mark.slow
def test_a_run_of_it_is_forecast(runs: Path) -> None:
    arguments = ("--json", "toy", *TOY[:2], "cluster.workers_per_node=2,4", "forecast.memory=off")
    done = run_distexp("forecast", *arguments, cwd=runs)
    assert done.returncode == 0, done.stdout + done.stderr
    own, four = json.loads(done.stdout)
    measured = RunRecord.read(runs / "toy" / "record.json").metrics.step_time_s or {}
    assert own["step_time_s"] == pytest.approx(measured["p50"], rel=0.01)
    # Which of them is faster depends on the measured time of a reduction, which is long on a busy machine.
    assert [row["workers"] for row in (own, four)] == [2, 4]
    assert four["samples_per_second"] == pytest.approx(16 / four["step_time_s"])
    assert four["step_time_s"] != own["step_time_s"]
    communication = read_measured_step(runs / "toy", ["tests"]).communication
    assert communication == OneReduction()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("plan", *TOY, "strategy=toy", "cluster.workers_per_node=2", *TRAINING), "toy one reduction"),
        (("explain", "toy"), "of the step"),
        (("report", "."), "toy one reduction"),
    ],
)
def test_the_other_commands_know_it(runs: Path, command: tuple[str, ...], shown: str) -> None:
    done = run_distexp(*command, cwd=runs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shown in " ".join(done.stdout.split())


def write_run(folder: Path) -> Path:
    """Write a profiled run of one worker, with two micro-batches and 1,000 parameters."""
    written = record(0, cluster__workers_per_node=1)
    written.config["strategy"].update(name="toy", _target_=TARGET)
    written.metrics.step_time_s = {"p50": 0.05, "p90": 0.05, "max": 0.05}
    written.write(folder)
    phases = [(phase, number) for number in (0, 1) for phase in (FORWARD, BACKWARD)]
    passes = [Segment(phase, number, 0.001, 0.01, 0.0101, 0.01005, 5) for phase, number in phases]
    items = (*passes, Segment(OPTIMIZER, 1, 0.001, 0.01, 0.0101, 0.01005, 5))
    model = StepModel(True, 1, 1, 2, 0.05, ((0.05,),), items, (Parameters("model", (600, 400)),))
    write_step_model(folder, model)
    return folder


def test_the_collectives_that_it_states_are_added_to_a_step_of_one_worker(tmp_path: Path) -> None:
    run = read_measured_step(write_run(tmp_path), ["tests"])
    found = run.communication.plan(list(run.model.items), run.model, 2)
    collectives = [(item.kind, item.bytes, item.phase) for item in found if isinstance(item, Collective)]
    assert collectives == [("all_reduce", 4000, BACKWARD), ("all_reduce", 4, OPTIMIZER)]
    one, two = forecast_steps(tmp_path, [Target(1, 1, 2, 8.0), Target(1, 2, 2, 16.0)], trusted=["tests"])
    assert two.step_time_s > one.step_time_s


def test_the_class_that_a_foreign_record_names_is_not_imported(tmp_path: Path) -> None:
    config = {"strategy": {"name": "toy", "_target_": TARGET}}
    assert isinstance(recorded_strategy(config, ["tests"]), AllReduce)
    assert recorded_strategy(config) is None
    with pytest.raises(ConfigError, match="the collectives of strategy=toy are not known: profile it on two workers"):
        read_measured_step(write_run(tmp_path))


def toy_candidate(*overrides: str) -> Candidate:
    config = resolve_cell("strategy=ddp", "cluster.device=cpu", "cluster.workers_per_node=2", *overrides)
    config.strategy = replace(config.strategy, name="toy", _target_=TARGET)
    return Candidate(("strategy=toy",), ("strategy=toy",), config.train.micro_batch, 2, config)


def test_tables_have_its_words() -> None:
    candidate = toy_candidate("train.micro_batch_size=4")
    assert label(candidate) == "toy one reduction, micro-batch 4 x 1, 2 workers"
    assert row_label(candidate) == "toy one reduction 4x1"


def test_a_search_tries_it_where_it_differs_from_single(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTEXP_TRUSTED_PACKAGES", "tests")
    launcher = FakeLauncher(speed=lambda config: 20.0 if config.strategy.name == "toy" else 10.0)
    space = ('choose.space=["strategy=single,ddp,toy"]', "choose.gpus=[1,2]", "kernels=reference")
    run_search(tmp_path, launcher, "cluster.device=cpu", "cluster.workers_per_node=2", *space, config_dir=CONF)
    tried = {(config.strategy.name, config.cluster.world_size) for config in launcher.ran}
    assert tried == {("single", 1), ("ddp", 2), ("toy", 2)}
    shown = capsys.readouterr().out
    assert "best throughput: toy one reduction, micro-batch" in shown
    assert "the losses equal those of single" in shown


def test_an_unknown_strategy_of_a_search_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    message = "strategy=number is not possible: use .*ddp, deepspeed, fsdp, single, toy"
    with pytest.raises(ConfigError, match=message):
        run_search(tmp_path, FakeLauncher(), 'choose.space=["strategy=number"]', "cluster.device=cpu", config_dir=CONF)


def test_its_launches_and_its_exposed_reduction_are_forecast() -> None:
    """DDP hides a part of its communication. The toy reduces after the backward pass."""
    speeds = MachineSpeeds(1e6, 1e6, link_gb_per_s=1.0, network_gb_per_s=1.0, launch_s=1e-3)
    toy = toy_candidate().config
    ddp = resolve_cell("strategy=ddp", "cluster.device=cpu", "cluster.workers_per_node=2")
    assert toy is not None
    launches, reduced = Work(0.0, 100.0, 0.0, 0.0), Work(0.0, 1000.0, 0.0, 1e8)
    assert rough_step_s(toy, launches, speeds) == rough_step_s(ddp, launches, speeds) == pytest.approx(0.14)
    assert rough_step_s(toy, reduced, speeds) == pytest.approx(1.4 + 0.4, rel=0.01)
    assert rough_step_s(ddp, reduced, speeds) == pytest.approx(1.4 + 0.04, rel=0.01)

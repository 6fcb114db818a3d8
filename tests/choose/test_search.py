"""Tests of the whole search, with trials that are never run."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from distexp.choose.trials import SearchState
from distexp.config import Config, ConfigError
from distexp.exceptions import SweepFailedError
from distexp.measure import run_energy
from distexp.plan.estimate import Estimate
from distexp.runs.run_dir import CHOICE
from distexp.system.cgroups import cpu_count
from tests.helpers.planning import FormulaPlanner, linear_estimate
from tests.helpers.remembered_loader import remember_compositions
from tests.helpers.searches import FakeLauncher, run_search, usual_loss, usual_speed

VALUES = ("strategy=ddp,fsdp", "sharding=full_shard", "offload=false", "train.micro_batch_size=2,4")
FEW = (f"choose.space={list(VALUES)}", "kernels=reference", "train.activation_checkpointing=false")


@pytest.fixture(autouse=True)
def _remembered_compositions(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_compositions(monkeypatch)


def document(folder: Path) -> dict[str, Any]:
    """Return the content of the file of a search."""
    content: dict[str, Any] = json.loads((folder / CHOICE).read_text())
    return content


def test_the_fastest_candidate_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second search in the directory repeats no trial, and prints the same result for users."""
    launcher, again = FakeLauncher(), FakeLauncher()
    run_search(tmp_path, launcher, *FEW, "choose.output=json", "choose.budget_min=20")
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= {"winner", "candidates", "gpu_seconds"}
    assert {"strategy=ddp", "train.micro_batch_size=4"} < set(found["winner"]["overrides"])
    assert found["winner"]["samples_per_second"] == pytest.approx(10 * 1.2 * 2 * 1.4)
    assert found["winner"]["peak_allocated_mib"] == 4000
    command = found["winner"]["command"]
    assert command.startswith("distexp model=bloom_tiny dataset=squad_sample train.global_batch_size=8 strategy=ddp ")
    assert command.endswith("cluster.workers_per_node=2 train.micro_batch_size=4")
    assert "choose." not in command
    assert (found["losses"]["equal"], found["losses"]["reference"].split(",")[0]) == (True, "single")
    assert {candidate["status"] for candidate in found["candidates"]} <= {"tried", "pruned"}
    assert found == document(tmp_path)
    config = launcher.ran[0]
    assert (config.train.log_every, config.train.measure_after_step, config.train.max_steps) == (1, 3, 8)
    assert {(config.command, config.cluster.timeout_min) for config in launcher.ran} == {("choose", 20.0)}
    assert {config.train.global_batch_size for config in launcher.ran} == {8}
    assert {config.train.seed for config in launcher.ran} == {42}
    run_search(tmp_path, again, *FEW)
    assert again.ran == []
    out = capsys.readouterr().out
    assert "best throughput: ddp, micro-batch 4 x 1, 2 workers: 33.6 samples/s at 3.9 GiB" in out
    # Without repeats of both, speeds on CPUs differ by noise up to a ratio of 1.8.
    assert "equal within the noise of ±84 % to fsdp full_shard, micro-batch 4 x 1, 2 workers" in out
    assert "the losses equal those of single" in out
    assert "or: ddp, micro-batch 2 x 2, 2 workers: equal speed within the noise of ±84 %, 50 % less memory" in out
    assert "worker-seconds, of which" in out
    assert f"distexp report {tmp_path}" in out
    assert "all configurations have 2 workers." in out
    assert "set choose.gpus=1,2\n" in out


@pytest.mark.parametrize("dropout", [(), ("model=gpt_tiny", "model.dropout=0.1")], ids=["one trial", "two trials"])
def test_the_check_of_the_losses_is_part_of_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dropout: tuple[str, ...]
) -> None:
    """A trial of two workers costs 40 GPU-seconds, and one of ``single`` 20. The noise asks for many repeats."""
    factors = cycle((0.7, 1.4, 1.0))
    launcher = FakeLauncher(speed=lambda config: usual_speed(config) * next(factors), seconds=20.0)
    run_search(tmp_path, launcher, *FEW, "choose.budget_min=2", *dropout)
    found = document(tmp_path)
    assert found["gpu_seconds"] == pytest.approx(220)
    assert found["check_gpu_seconds"] == pytest.approx(60 if dropout else 20)
    purposes = [trial["compares_losses"] for trial in found["trials"]]
    assert purposes == ([False] * 4 + [True] * 2 if dropout else [False] * 5 + [True])
    assert found["losses"]["equal"] is True
    out = capsys.readouterr().out
    assert "the budget of 240 worker-seconds (of which " in out
    assert ("and 60 for 2 trials that compared the losses" if dropout else "and 20 for 1 trial that compared") in out


def test_differences_within_the_noise_are_no_claims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal trials differ by a factor of two, more than the candidates."""
    factors = cycle((0.7, 1.4, 1.0))
    run_search(tmp_path, FakeLauncher(speed=lambda config: usual_speed(config) * next(factors)), *FEW)
    found, out = document(tmp_path), capsys.readouterr().out
    winner = next(each for each in found["candidates"] if each["overrides"] == found["winner"]["overrides"])
    steps = [trial["steps"] for trial in winner["measured"]["trials"]]
    assert steps[:2] == [5, 10]
    assert len(steps) > 2
    assert "equal within the noise of ±" in found["sentence"]
    count = len(found["equal"])
    assert count >= 1
    others = "1 other configuration" if count == 1 else f"{count} other configurations"
    assert f"not decided: {others} may be as good as the winner (= in the table)" in out
    assert sum(line.startswith("= ") for line in out.splitlines()) == count
    assert "strategy=ddp" in found["simplest"]
    assert ("or with the simplest of the equal" in out) == (found["simplest"] != found["winner"]["overrides"])
    alternatives = [line for line in out.splitlines() if line.startswith("or: ")]
    assert alternatives
    assert all("50 % less memory" in line for line in alternatives)


def test_a_winner_with_other_losses_is_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loss(config: Config, step: int) -> float:
        return usual_loss(config, step) * (1.001 if config.strategy.name == "ddp" else 1)

    run_search(tmp_path, FakeLauncher(loss=loss), *FEW)
    found = document(tmp_path)
    assert "sharding=full_shard" in found["winner"]["overrides"]
    assert {rejection["equal"] for rejection in found["rejected"]} == {False}
    out = capsys.readouterr().out
    assert "the losses DIFFER from those of single" in out
    assert "8 steps, largest relative difference 1.0e-03 (the bound is 1e-05)" in out
    assert "-" not in found["sentence"].replace("micro-batch", "")
    assert "or: ddp" not in out


def test_losses_that_differ_on_a_cpu_are_compared_again_with_equal_threads(tmp_path: Path) -> None:
    def loss(config: Config, step: int) -> float:
        return usual_loss(config, step) * (1 + 1e-3 * (config.cluster.cpus_per_worker or 0))

    launcher = FakeLauncher(loss=loss)
    run_search(tmp_path, launcher, *FEW)
    found = document(tmp_path)
    assert "strategy=ddp" in found["winner"]["overrides"]
    assert found["losses"]["equal"] is True
    threads = {config.cluster.cpus_per_worker for config in launcher.ran if config.strategy.name == "single"}
    assert len(threads) == min(2, cpu_count())


def test_an_interrupted_check_names_no_candidate_with_other_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C arrives in the check of the second best candidate, whose losses are compared without dropout."""

    def loss(config: Config, step: int) -> float:
        return usual_loss(config, step) * (1.001 if config.strategy.name == "ddp" else 1)

    arguments = (*FEW, "model=gpt_tiny", "model.dropout=0.1")
    complete = FakeLauncher(loss=loss)
    run_search(tmp_path / "complete", complete, *arguments)
    capsys.readouterr()
    with pytest.raises(KeyboardInterrupt):
        run_search(tmp_path / "cut", FakeLauncher(loss=loss, interrupt_after=len(complete.ran) - 1), *arguments)
    assert "best so far: fsdp full_shard" in capsys.readouterr().err


@pytest.mark.slow
def test_there_is_no_winner_if_all_losses_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loss(config: Config, step: int) -> float:
        return usual_loss(config, step) * (1.0 if config.strategy.name == "single" else 1.001)

    with pytest.raises(SweepFailedError):
        run_search(tmp_path, FakeLauncher(loss=loss), *FEW)
    assert "no winner: the losses of the 3 best configurations differ from the reference" in capsys.readouterr().out
    assert document(tmp_path)["winner"] is None
    images = ("model=resnet_tiny", "dataset=tinyimagenet_sample", "train.micro_batch_size=4")
    with pytest.raises(SweepFailedError):
        run_search(tmp_path / "images", FakeLauncher(loss=loss), *FEW, *images)
    assert "A batch norm may amplify rounding. To compare the gradients: distexp verify " in capsys.readouterr().out


def test_losses_of_a_custom_model_with_dropout_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No override switches its dropout off, so different losses are no error."""

    def loss(config: Config, step: int) -> float:
        return usual_loss(config, step) * (1.001 if config.strategy.name == "ddp" else 1)

    run_search(tmp_path, FakeLauncher(loss=loss, dropout=0.1), *FEW, "model=gpt_tiny")
    out = capsys.readouterr().out.replace("\n", " ")
    assert (
        "the losses were not compared: the model has a dropout rate of 0.1, with which each strategy draws other" in out
    )
    assert document(tmp_path)["winner"]["overrides"][0] == "strategy=ddp"


@pytest.mark.slow
def test_dropout_is_off_in_the_check_of_the_losses(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    run_search(tmp_path, launcher, *FEW, "model=gpt_tiny", "model.dropout=0.1")
    assert [config.model.dropout for config in launcher.ran[-2:]] == [0.0, 0.0]
    assert {config.strategy.name for config in launcher.ran[-2:]} == {"ddp", "single"}
    assert launcher.ran[0].model.dropout == 0.1
    assert document(tmp_path)["losses"]["equal"] is True


@pytest.mark.slow
def test_a_winner_that_fails_without_dropout_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(config: Config) -> str:
        return "failed" if config.model.dropout == 0.0 else ""

    launcher = FakeLauncher(fails=fails)
    run_search(tmp_path, launcher, *FEW, "model=gpt_tiny", "model.dropout=0.1")
    assert [config.strategy.name for config in launcher.ran if config.model.dropout == 0.0] == ["ddp"]
    reason = "the trial of ddp, micro-batch 4 x 1, 2 workers with model.dropout=0 failed: SomeError: it is failed"
    assert reason in capsys.readouterr().out.replace("\n", " ")


def test_without_predictions_nothing_slower_is_tried_if_the_plain_configurations_fit(tmp_path: Path) -> None:
    untraced, launcher = FormulaPlanner(lambda config: Estimate(notes=["not traced: it reads values"])), FakeLauncher()
    run_search(tmp_path, launcher, "choose.budget_min=60", "train.micro_batch_size=4", planner=untraced)
    assert untraced.count < 20
    assert {(config.offload.enabled, bool(config.train.activation_checkpointing)) for config in launcher.ran} == {
        (False, False)
    }
    assert {config.kernels.name for config in launcher.ran} == {"reference", "fast"}
    assert document(tmp_path)["winner"]["overrides"][0] == "strategy=ddp"
    reasons = [candidate["reason"] or "" for candidate in document(tmp_path)["candidates"]]
    assert sum(reason.startswith("offloading is slower, and not needed") for reason in reasons) > 3
    assert sum(reason.startswith("checkpointing is slower, and not needed") for reason in reasons) > 3


def test_without_predictions_checkpointing_is_tried_if_the_others_run_out_of_memory(tmp_path: Path) -> None:
    def fails(config: Config) -> str:
        return "" if config.train.activation_checkpointing else "oom_gpu"

    untraced = FormulaPlanner(lambda config: Estimate(notes=["not traced: it reads values"]))
    arguments = ("choose.budget_min=60", "offload=false", "kernels=reference", "train.micro_batch_size=4")
    run_search(tmp_path, FakeLauncher(fails=fails), *arguments, planner=untraced)
    assert "train.activation_checkpointing=true" in document(tmp_path)["winner"]["overrides"]


def test_a_reference_that_is_faster_than_forecast_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The budget ends before ``single`` is tried. It runs as the reference, and is the fastest."""

    def speed(config: Config) -> float:
        return usual_speed(config) * (4 if config.strategy.name == "single" else 1)

    def estimate(config: Config) -> Estimate:
        flops = 1e16 if config.strategy.name == "single" else 1e6
        return replace(linear_estimate(config), flops=flops, operations=100)

    launcher = FakeLauncher(speed=speed)
    arguments = ("choose.gpus=[1,2]", "choose.budget_min=0.001", "cluster.device=cpu", "plan.host_memory_gb=100")
    axes = "choose.space=['strategy=ddp,single','train.micro_batch_size=4']"
    run_search(tmp_path, launcher, axes, *FEW[1:], *arguments, planner=FormulaPlanner(estimate))
    assert [config.strategy.name for config in launcher.ran] == ["ddp", "single"]
    found = document(tmp_path)
    assert found["statement"].startswith("the budget of")
    assert {"strategy=single", "train.micro_batch_size=4"} < set(found["winner"]["overrides"])
    assert {candidate["status"] for candidate in found["candidates"]} == {"tried"}
    assert (found["losses"]["equal"], found["losses"]["reference"]) == (True, "ddp, micro-batch 4 x 1, 2 workers")
    out, err = capsys.readouterr()
    assert "The budget of the trials is 0.002 worker-minutes (choose.budget_min=0.001 x 2 workers)" in err
    assert "best throughput: single, micro-batch 4 x 2: 56.0 samples/s at 3.9 GiB, equal within the noise of ±" in out


def test_a_finished_search_has_the_same_winner_if_it_is_started_again(tmp_path: Path) -> None:
    """Its repeats of the reference are in the budget only once."""

    def speed(config: Config) -> float:
        return usual_speed(config) * (4 if config.strategy.name == "single" else 1)

    def estimate(config: Config) -> Estimate:
        flops = 1e9 if config.strategy.name == "single" else 1e6
        return replace(linear_estimate(config), flops=flops, operations=100)

    arguments = ("choose.gpus=[1,2]", "choose.budget_min=1.05", "cluster.device=cpu", "plan.host_memory_gb=100")
    axes = "choose.space=['strategy=ddp,single','train.micro_batch_size=4']"
    winners = []
    for launcher in (FakeLauncher(speed=speed, seconds=20.0), FakeLauncher()):
        run_search(tmp_path, launcher, axes, *FEW[1:], *arguments, planner=FormulaPlanner(estimate))
        winners.append(document(tmp_path)["winner"]["overrides"])
    assert launcher.ran == []
    assert winners[0] == winners[1]
    assert "strategy=single" in winners[0]


def test_single_is_the_reference_if_it_is_no_candidate(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    run_search(tmp_path, launcher, "sharding=full_shard", *FEW[1:], "choose.space=['train.micro_batch_size=4']")
    assert launcher.ran[-1].strategy.name == "single"
    assert document(tmp_path)["losses"]["reference"].startswith("single")


def test_the_reference_has_the_largest_micro_batch_that_fits(tmp_path: Path) -> None:
    """One worker cannot shard, so ``single`` with the micro-batch of the winner does not fit."""

    def formula(config: Config) -> Estimate:
        is_large = config.strategy.name == "single" and config.train.micro_batch == 4
        return replace(linear_estimate(config), step_mib=1e9 if is_large else 1_000.0)

    launcher, space = FakeLauncher(), f"choose.space={list(VALUES[-1:])}"
    run_search(tmp_path, launcher, "sharding=full_shard", *FEW[1:], space, planner=FormulaPlanner(formula))
    assert "train.micro_batch_size=4" in document(tmp_path)["winner"]["overrides"]
    assert document(tmp_path)["losses"]["reference"] == "single, micro-batch 2 x 4"
    assert (launcher.ran[-1].strategy.name, launcher.ran[-1].train.activation_checkpointing) == ("single", False)


def test_a_slow_first_start_does_not_end_the_search(tmp_path: Path) -> None:
    """The first trial imports the libraries: 100 of 240 GPU-seconds. By its cost alone no other batch fits in."""
    launcher = FakeLauncher(seconds=5.0, first_seconds=50.0)
    run_search(tmp_path, launcher, *FEW, "choose.budget_min=2")
    assert {config.strategy.name for config in launcher.ran} == {"ddp", "fsdp", "single"}
    assert len(launcher.ran) > 4
    assert document(tmp_path)["gpu_seconds"] <= 240


@pytest.mark.slow
def test_failing_trials_do_not_end_the_search(tmp_path: Path) -> None:
    def fails(config: Config) -> str:
        large = config.strategy.name == "fsdp" and config.train.micro_batch_size == 4
        return "failed" if config.strategy.name == "ddp" else "oom_gpu" if large else ""

    run_search(tmp_path, FakeLauncher(fails=fails), *FEW)
    found = document(tmp_path)
    assert set(found["winner"]["overrides"]) >= {"sharding=full_shard", "train.micro_batch_size=2"}
    reasons = {candidate["reason"] for candidate in found["candidates"] if candidate["status"] == "failed"}
    assert reasons == {"SomeError: it is failed", "SomeError: it is oom_gpu"}


def test_an_interrupted_search_repeats_no_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = FakeLauncher(interrupt_after=3), FakeLauncher()
    with pytest.raises(KeyboardInterrupt):
        run_search(tmp_path, first, *FEW)
    err = capsys.readouterr().err
    assert "predicting the memory of up to 4 configurations, which can take minutes" in err
    assert "The budget of the trials is 20 worker-minutes (choose.budget_min=10 x 2 workers)" in err
    assert "best so far: ddp, micro-batch 4 x 1, 2 workers: 33.6 samples/s at 3.9 GiB" in err
    assert "interrupted after 3 trials. They are kept. To continue: distexp resume" in err
    assert document(tmp_path)["finished"] is False
    run_search(tmp_path, second, *FEW)
    assert len(first.ran) == 3
    found = document(tmp_path)
    assert len(found["trials"]) == len(first.ran) + len(second.ran)
    assert {"strategy=ddp", "train.micro_batch_size=4"} < set(found["winner"]["overrides"])


def test_another_search_is_not_mixed_into_a_directory(tmp_path: Path) -> None:
    SearchState.open(tmp_path, ["model=bloom_tiny"]).write()
    assert SearchState.open(tmp_path, ["model=bloom_tiny"]).trials == []
    with pytest.raises(ConfigError, match="contains the search for 'model=bloom_tiny', and this one is for 'model=gpt"):
        SearchState.open(tmp_path, ["model=gpt_tiny"])
    (tmp_path / CHOICE).write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        SearchState.open(tmp_path, ["model=bloom_tiny"])


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_search(tmp_path / "none", FakeLauncher(), *FEW, "choose.dry_run=true")
    out = capsys.readouterr().out
    assert "planned trial" in out
    assert "4 configurations, of which 4 may be tried" in out
    assert "Nothing was started." in out
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (
            ["cluster=slurm"],
            "the memory of the GPUs is unknown, so trials may run out of it: name the GPU, as in plan.gpu=",
        ),
        (["cluster=slurm", "cluster.device=cpu"], "name that of a node, as in cluster.memory_gb=128"),
        (["cluster=slurm", "plan.gpu=a100-80gb"], ""),
        ([], ""),
    ],
)
def test_an_unknown_memory_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], hint: str
) -> None:
    run_search(tmp_path, FakeLauncher(), *FEW, *arguments, "choose.dry_run=true")
    error = capsys.readouterr().err
    assert hint in error
    assert ("is unknown" in error) == bool(hint)


@pytest.mark.parametrize(
    ("least", "typed", "planned"),
    [
        (2, (), {"parallel.tensor=2", "parallel.context=2"}),
        (4, (), {"parallel.tensor=4", "parallel.context=4"}),
        (1, (), {""}),
        (2, ("parallel.tensor=1",), {"offload=true"}),
    ],
)
def test_degrees_are_tried_by_default_if_nothing_fits_without_offloading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], least: int, typed: tuple[str, ...], planned: set[str]
) -> None:
    """A GPU of 20 GB runs the training if so many workers share it, or if its states are in CPU memory."""

    def estimate(config: Config) -> Estimate:
        fits = config.parallel.copies >= least or config.offload.enabled
        return replace(linear_estimate(config), step_mib=8_000.0 if fits else 80_000.0)

    options = ("cluster.workers_per_node=4", "cluster.device=cuda", "plan.gpu_memory_gb=20", "choose.dry_run=true")
    # A value is no key of ``parallel``.
    options += ("+cluster.environment.NOTE=parallel.first",)
    training = ("model=gpt_tiny", "dataset=synthetic", "train.micro_batch_size=1", "choose.output=json")
    space = 'choose.space=["strategy=fsdp","sharding=full_shard","kernels=reference"]'
    planner = FormulaPlanner(estimate)
    run_search(tmp_path, FakeLauncher(), *options, *training, space, *typed, planner=planner)
    found = json.loads(capsys.readouterr().out)
    names = ("parallel.", "offload=true")
    assert {
        " ".join(text for text in each["overrides"] if text.startswith(names)) for each in found["planned"]
    } == planned
    offloaded = [each for each in found["candidates"] if "offload=true" in each["overrides"]]
    reasons = [each["reason"] for each in offloaded if each["status"] == "pruned"]
    assert typed or any(reason.startswith("offloading is slower, and not needed") for reason in reasons)


@pytest.mark.slow
def test_a_dry_run_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_search(tmp_path, FakeLauncher(), *FEW, "choose.dry_run=true", "choose.output=json")
    found = json.loads(capsys.readouterr().out)
    assert found["planned_gpu_seconds"] > 0
    assert len(found["planned"]) == 2
    assert {candidate["status"] for candidate in found["candidates"]} == {"waiting"}


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the energy counters. It has none."""
    folder = tmp_path / "powercap"
    monkeypatch.setattr(run_energy, "POWERCAP", folder)
    return folder


def test_a_machine_that_does_not_measure_the_objective_ends_the_search(
    tmp_path: Path, powercap: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher, package = FakeLauncher(), powercap / "intel-rapl:0"
    package.mkdir(parents=True)
    for name, text in {"name": "package-0", "energy_uj": "5", "max_energy_range_uj": "9"}.items():
        (package / name).write_text(text)
    with pytest.raises(SweepFailedError):
        run_search(tmp_path / "search", launcher, *FEW, "choose.objective=energy")
    assert len(launcher.ran) == 1
    out = capsys.readouterr().out
    assert "no candidate has a result: the run measured no energy: use choose.objective=throughput" in out
    rows = [line.split() for line in out.splitlines() if line.split()[-1:] == ["5"]]
    assert [row[-4] for row in rows] == ["33.6"], "a completed trial has its throughput"


@pytest.mark.usefixtures("powercap")
def test_the_energy_of_cpus_without_a_counter_is_refused_as_objective(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    with pytest.raises(ConfigError, match=r"objective=energy: the energy of these CPUs cannot be read \(RAPL, .*: use"):
        run_search(tmp_path, launcher, *FEW, "choose.objective=energy")
    assert launcher.ran == []


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SweepFailedError):
        run_search(tmp_path, FakeLauncher(), *FEW, "cluster.device=cpu", "plan.host_memory_gb=2")
    out = capsys.readouterr().out
    assert "no candidate fits into the memory; the nearest one is" in out
    assert "cost of 0 trials" in out
    assert "distexp report" not in out, "there is nothing to look at"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["choose.objective=cost", "cluster=slurm"],
            "choose.objective=cost needs a price: set cluster.price_per_gpu_hour",
        ),
        (["choose.objective=cost"], "choose.objective=cost needs GPUs, because a run on CPUs has no price"),
        (["cluster.wait=false"], "choose decides by the results of its trials, so it waits"),
        (["choose.space=[nothing]"], "choose.space"),
    ],
)
def test_a_command_that_is_no_search_is_refused(tmp_path: Path, arguments: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        run_search(tmp_path, FakeLauncher(), *arguments, planner=FormulaPlanner())

"""The command ``distexp explain``: its output, its errors, and damaged records."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distexp.config import TrainConfig
from distexp.explain.__main__ import main
from distexp.forecast.__main__ import main as forecast
from distexp.measure.profiling.intervals import ProfileWindow
from distexp.training.inputs import StepPlan
from tests.helpers.profiled_records import COMMUNICATION_BOUND, COMPUTE_BOUND, GPU, LAUNCH_BOUND, profiled
from tests.helpers.records import record, write


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    first = profiled(COMPUTE_BOUND, COMPUTE_BOUND, **GPU)
    first.run.overrides.append("profile=True")  # as in earlier records
    return write(
        tmp_path,
        first,
        profiled(LAUNCH_BOUND, LAUNCH_BOUND, number=1, **GPU),
        record(2, overrides=("strategy=ddp", "train.profile_steps=0")),
        record(3, status="failed"),
        profiled(COMMUNICATION_BOUND, number=5, **GPU),
    )


def test_command_prints_all_profiled_runs(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep)]) == 0
    out = capsys.readouterr().out
    assert f"{sweep}/0: train.seed=0 profile=true\n" in out
    assert "rank 0" in out
    assert "rank 1" in out
    assert "Compute-bound: matrix kernels take 70%" in out
    assert "try: kernels=fast" in out
    assert "A larger global batch changes the training: train.gradient_accumulation_steps=2." in out
    text = out.split(f"{sweep}/1")[1].split(f"{sweep}/5")[0]
    (line,) = (line for line in text.splitlines() if line.startswith("GPU idle"))
    assert line.split()[-3:] == ["█" * 24, "55.00", "55.00"]
    assert main([str(sweep / "1"), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["explanation"]["loss"] == "launch_idle"
    assert run["explanation"]["try"] == ["kernels=fast"]
    assert [entry["rank"] for entry in run["step_breakdown"]] == [0, 1]


def test_command_compares_two_runs(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep / "0"), str(sweep / "1")]) == 0
    out = capsys.readouterr().out
    assert "train.seed=0" in out
    assert "A and B are equally fast" in out
    assert main([str(sweep / "0"), str(sweep / "1"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts_ms_per_sample"]["launch_idle"] == {"a": 5 / 8, "b": 55 / 8}
    assert found["b"]["explanation"]["loss"] == "launch_idle"


def test_a_number_is_a_run_of_the_newest_sweep(
    sweep: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    place = tmp_path_factory.mktemp("place")
    (sweep / "command.json").write_text("{}")
    monkeypatch.chdir(place)
    assert main(["0", "1"]) == 2
    assert "no sweep below multirun_outputs/" in capsys.readouterr().err
    newest = place / "multirun_outputs" / "distexp" / "newest"
    newest.parent.mkdir(parents=True)
    sweep.rename(newest)
    assert main(["0", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "newest sweep: multirun_outputs/distexp/newest\n"
    assert "A: multirun_outputs/distexp/newest/0: train.seed=0" in printed.out
    assert main(["7"]) == 2
    assert "the newest sweep, multirun_outputs/distexp/newest, has no run 7: it has run" in capsys.readouterr().err
    (place / "1").mkdir()
    assert main(["1"]) == 2
    assert "no readable record.json below 1" in capsys.readouterr().err, "a directory comes first"


def test_command_refuses_runs_without_a_profile(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sweep / "0" / "empty").mkdir()
    shutil.copytree(sweep / "0", torn := sweep / "torn")
    (torn / "record.json").write_text('{"run": ')
    for arguments, message in (
        ([str(sweep / "0"), str(torn)], f"no readable record.json below {torn}: {torn / 'record.json'} is not a JSON"),
        ([str(sweep / "2")], f"{sweep / '2'} has no profile: run it with distexp strategy=ddp profile=true"),
        ([str(sweep / "2"), str(sweep / "0")], "has no profile"),
        ([str(sweep), str(sweep / "0")], f"has 3 profiled runs: give one of them, such as {sweep / '0'}"),
        ([str(sweep / "3")], "has no profile, because the run is failed: give a completed run"),
        ([str(sweep / "4")], "no such directory. Give that of a run or a sweep"),
        ([str(sweep / "0" / "empty")], "give the directory of a run or a sweep"),
        ([str(sweep)] * 3, "3 directories: give one, or two to compare"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_command_to_profile_is_that_of_a_completed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = record(0, status="failed", overrides=("strategy=fsdp",))
    finished = record(1, overrides=("strategy=ddp", "model.name=my model", "offload=True"))
    folder = write(tmp_path, failed, finished)
    assert main([str(folder)]) == 2
    expected = "run it with distexp strategy=ddp 'model.name=my model' offload=true profile=true\n"
    assert capsys.readouterr().err.endswith(expected)
    finished.metrics.communication = {"note": "too few steps: train more steps"}
    folder = write(tmp_path / "noted", failed, finished)
    assert main([str(folder)]) == 2
    assert capsys.readouterr().err.endswith("has no profile: too few steps: train more steps\n")


def test_no_command_profiles_epochs_of_two_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = record(0, overrides=("train.max_steps=2",))
    short.metrics.total_steps, short.metrics.steps_per_epoch = 2, 2
    assert main([str(write(tmp_path, short))]) == 2
    advice = "use more samples, or a smaller global batch, and add profile=true\n"
    assert capsys.readouterr().err.endswith(f"its epochs have 2 steps, and a profile needs 3: {advice}")
    window = partial(ProfileWindow.of, TrainConfig(profile_steps=3), done=0)
    assert (window(total=50, per_epoch=2), window(total=50, per_epoch=3)) == (None, None)
    assert window(total=51, per_epoch=3) == ProfileWindow(49, 1)


@pytest.mark.parametrize(
    ("steps", "max_steps", "expected"),
    [
        ((4, 100), 4, "train.num_epochs=1 train.max_steps=9"),
        ((6, 6), None, "train.num_epochs=2"),
        ((8, 4), 8, "train.max_steps=11 train.num_epochs=3"),
        ((9, 100), 9, "train.max_steps=9 train.num_epochs=1"),
    ],
)
def test_command_to_profile_has_enough_steps(
    steps: tuple[int, int], max_steps: int | None, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``steps`` are those of the recorded training, and of an epoch."""
    total, per_epoch = steps
    epochs = -(-total // per_epoch)
    typed = (*((f"train.max_steps={max_steps}",) if max_steps else ()), f"train.num_epochs={epochs}")
    short = record(0, overrides=typed, train__max_steps=max_steps, train__num_epochs=epochs)
    short.metrics.total_steps, short.metrics.steps_per_epoch = total, per_epoch
    assert main([str(write(tmp_path, short))]) == 2
    assert capsys.readouterr().err.endswith(f"has no profile: run it with distexp {expected} profile=true\n")
    train = TrainConfig(profile_steps=3)
    for text in expected.split():
        setattr(train, text.partition("=")[0].removeprefix("train."), int(text.partition("=")[2]))
    assert StepPlan(train, per_epoch).profile_window(0) is not None


def test_command_to_profile_is_typed_where_the_run_was_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "my runs", record(0, overrides=("model.name=m/olmo2",)))
    (folder / "command.json").write_text(json.dumps({"words": [], "cells": 1, "directory": str(folder)}))
    command = "distexp model.name=m/olmo2 profile=true"
    for start in (main, forecast):
        assert start([str(folder / "0")]) == 2
        assert capsys.readouterr().err.endswith(f"run it with cd '{folder}' && {command}\n")
    monkeypatch.chdir(folder)
    assert main(["0"]) == 2
    assert capsys.readouterr().err.endswith(f"run it with {command}\n")


def test_command_to_profile_a_sweep_is_that_of_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, record(0, overrides=("zero_stage='1'",)), record(1, overrides=("zero_stage='2'",)))
    words = ["--multirun", "zero_stage='1','2'", 'sweep.cells=[["a=1"]]', "profile=false", "hydra.sweep.dir=sweep"]
    words += ["name='a,b'", "plan.space=['c=2']"]
    (folder / "command.json").write_text(json.dumps({"words": words, "cells": 2}))
    typed = (
        """distexp --multirun zero_stage=1,2 'sweep.cells=[["a=1"]]' "name='a,b'" "plan.space=['c=2']" profile=true\n"""
    )
    for directory, command in ((folder, typed), (folder / "1", "distexp zero_stage=2 profile=true\n")):
        assert main([str(directory)]) == 2
        assert capsys.readouterr().err.endswith(f"run it with {command}")
    (folder / "command.json").write_text(json.dumps({"words": ["--config-dir", "my conf", *words], "cells": 1}))
    assert main([str(folder / "1")]) == 2
    assert capsys.readouterr().err.endswith("run it with distexp zero_stage=2 profile=true --config-dir 'my conf'\n")
    for damaged in ("[]", '{"words": 1, "cells": 2}', '{"words": [], "cells": null}'):
        (folder / "command.json").write_text(damaged)
        assert main([str(folder)]) == 2
        assert capsys.readouterr().err.endswith("run it with distexp zero_stage=1 profile=true\n")


def test_damaged_records_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    communicating = profiled(COMMUNICATION_BOUND, **GPU)
    communicating.metrics.communication = {"by_collective": {"a": None}}
    launching = profiled(LAUNCH_BOUND, number=1, **GPU)
    empty = profiled({"matmul": 5.0}, number=2, **GPU)
    empty.metrics.step_breakdown[0]["matmul_ms"] = 0.0  # type: ignore[index]
    bare = profiled({"matmul": 5.0}, number=3, **GPU)
    bare.metrics.step_breakdown = [{"rank": 0, "step_ms": 5.0}]
    assert main([str(write(tmp_path, communicating, launching, empty, bare))]) == 0
    out = capsys.readouterr().out
    assert "no computation hides takes 45% of the step." in out
    assert "4,000 kernels per micro-batch" in out


@pytest.mark.parametrize(
    ("device", "p50", "is_noted"), [(GPU, 0.1, False), (GPU, 0.08, True), ({"peak": None}, 0.06, True)]
)
def test_a_profiled_step_that_differs_from_the_median_one_has_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: dict[str, Any], p50: float, is_noted: bool
) -> None:
    run = profiled(COMPUTE_BOUND, **device)
    run.metrics.step_breakdown[0]["includes_overhead"] = True  # type: ignore[index]
    run.metrics.step_time_s = {"p50": p50, "p90": p50, "max": p50}
    assert main([str(write(tmp_path, run))]) == 0
    note = f"The parts add up to 100.0 ms. The median of the steps that were not profiled is {1000 * p50:.1f} ms."
    out = capsys.readouterr().out
    assert (note in out) == is_noted
    assert ("because the batches have different sizes" in out) == (device == GPU), "on a CPU it is always included"


def test_a_note_states_how_long_the_profiled_step_of_a_cpu_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parts are scaled from 150 to 100 ms. Nothing was left out of some of them, as on a GPU."""
    run = profiled({"matmul": 100.0}, peak=None)
    run.metrics.step_time_s = {"p50": 0.1}
    assert run.metrics.step_breakdown is not None
    run.metrics.step_breakdown[0] |= {"profiled_step_ms": 150.0, "includes_overhead": True}
    run_dir = str(write(tmp_path, run))
    assert main([run_dir]) == 0
    out = capsys.readouterr().out
    note = "The profiled step took 150.0 ms, 50% more than the median of the other steps. "
    assert f"{note}The percentages are those of the profiled step. The times are scaled to that median." in out
    assert "The profiler made the step" not in out
    assert "The parts add up to" not in out
    assert main([run_dir, run_dir]) == 0
    assert f"{note}The times are scaled to that median." in capsys.readouterr().out, "no table with percentages"

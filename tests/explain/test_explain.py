"""Tests of ``distexp explain``: runs that are bound by one thing, what is advised, and the comparison of two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distexp.explain.__main__ import main
from distexp.explain.batch_advice import larger_global_batches
from distexp.explain.explanation import explain
from distexp.explain.profile_comparison import PerSample, ProfileComparison
from distexp.explain.step_profile import StepProfile
from distexp.runs.record import RunRecord
from distexp.runs.step_parts import PARTS
from distexp.worker import training_record
from tests.helpers.records import record, write

GPU = {"cluster__device": "cuda"}


def profiled(*ranks: dict[str, float], number: int = 0, **settings: Any) -> RunRecord:
    """Return a record with the parts of each rank, in ms. Without settings it is a run of DDP on GPUs of 140 GB."""
    settings = {"precision__name": "bf16", "peak": 1000.0, **settings}
    found = record(number, overrides=(f"train.seed={number}",), **settings)
    gpu = found.config["cluster"]["device"] == "cuda"
    found.metrics.step_breakdown = [
        {
            "rank": rank,
            "step_ms": sum(parts.values()),
            **{f"{name}_ms": parts.get(name, 0.0) for name in PARTS},
            "hidden_communication_ms": 1.0,
            "launches": 4000 if gpu else None,
        }
        for rank, parts in enumerate(ranks)
    ]
    return found


def with_memory(found: RunRecord, reserved_mib: float, constant_mib: float = 0.0) -> RunRecord:
    """Add the measured memory of a rank: the peak, and the part that does not grow with the micro-batch."""
    found.memory["torch"] = [{"rank": 0, "peak_reserved_mib": reserved_mib}]
    found.memory["parts"] = [{"rank": 0, "parameters_mib": constant_mib, "optimizer_states_mib": 0.0}]
    return found


def explanation(found: RunRecord) -> tuple[str, float, str, list[str]]:
    result = explain(found)
    assert result is not None
    return result.bottleneck, round(result.share, 3), result.sentence, result.alternatives


LAUNCH_BOUND = {"matmul": 20.0, "other_kernels": 20.0, "launch_idle": 55.0, "optimizer": 5.0}
COMMUNICATION_BOUND = {"matmul": 30.0, "other_kernels": 20.0, "exposed_communication": 45.0, "optimizer": 5.0}
DATA_BOUND = {"matmul": 30.0, "other_kernels": 20.0, "data_wait": 45.0, "optimizer": 5.0}
SIX_OVERHEADS = {
    **{"matmul": 40.0, "other_kernels": 6.0, "waiting": 9.5, "host": 8.5},
    **dict.fromkeys(("launch_idle", "optimizer", "exposed_communication", "data_wait"), 9.0),
}
COMPUTE_BOUND = {"matmul": 70.0, "other_kernels": 20.0, "launch_idle": 5.0, "optimizer": 5.0}


@pytest.mark.parametrize(
    ("parts", "bottleneck", "share", "words"),
    [
        (
            LAUNCH_BOUND,
            "launch_idle",
            0.55,
            "Launch-bound: the GPU is idle for 55% of the step, because the CPU ",
        ),
        (COMMUNICATION_BOUND, "exposed_communication", 0.45, "Communication-bound: communication that no computation "),
        (
            DATA_BOUND,
            "data_wait",
            0.45,
            "Data-bound: the training waits for its data for 45% of the step, with ",
        ),
        (COMPUTE_BOUND, "compute", 0.9, "Compute-bound: matrix kernels take 70% and other kernels 20% of the step."),
        (
            SIX_OVERHEADS,
            "compute",
            0.46,
            "No bottleneck: matrix kernels take 40% and other kernels 6% of the step, waiting for other ranks 9.5%",
        ),
        (
            {"matmul": 80.0, "optimizer": 20.0},
            "optimizer",
            0.2,
            "Clipping and the update of the weights take 20% of",
        ),
        (
            {"matmul": 60.0, "host": 40.0},
            "host",
            0.4,
            "Bound by the CPU: the CPU does other work than launching",
        ),
    ],
)
def test_the_bottleneck_has_its_name(parts: dict[str, float], bottleneck: str, share: float, words: str) -> None:
    found = explanation(profiled(parts, parts, **GPU))
    assert found[:2] == (bottleneck, share)
    assert found[2].startswith(words)
    assert found[2].endswith(".")


def test_a_run_without_a_profile_has_no_explanation() -> None:
    assert explain(record(0)) is None


def test_waiting_names_the_slow_rank_and_its_part() -> None:
    slow = {"matmul": 50.0, "data_wait": 42.0, "exposed_communication": 8.0}
    fast = {"matmul": 50.0, "data_wait": 2.0, "waiting": 40.0, "exposed_communication": 8.0}
    run = profiled(fast, slow, fast, fast, **GPU)
    run.environment.cpu_count = 32  # type: ignore[union-attr]
    bottleneck, share, sentence, alternatives = explanation(run)
    assert (bottleneck, share) == ("waiting", 0.3)
    assert "the ranks wait for rank 1 for 30% of the step" in sentence
    assert "it spends 40.0 ms more than the others on waiting for its data" in sentence
    assert alternatives == ["dataset.num_workers=2"]
    busy = {**slow, "data_wait": 2.0, "host": 40.0}
    bottleneck, _, sentence, alternatives = explanation(profiled(fast, busy, fast, fast, **GPU))
    assert (bottleneck, alternatives) == ("waiting", [])
    assert "on work of its CPU" in sentence
    launching = {**slow, "data_wait": 2.0, "launch_idle": 40.0}
    run = with_memory(profiled(fast, launching, fast, fast, train__micro_batch_size=2, **GPU), 20_000)
    assert "on launching kernels" in explanation(run)[2]
    assert explanation(run)[3] == ["train.micro_batch_size=4", "kernels=fast"]
    turns = {"matmul": 60.0, "waiting": 40.0}
    assert "no single rank is the cause" in explanation(profiled(turns, turns, **GPU))[2]


AHEAD = {"matmul": 15.0, "launch_idle": 5.0, "waiting": 75.0, "exposed_communication": 5.0}
BEHIND = {"matmul": 15.0, "launch_idle": 70.0, "optimizer": 10.0, "exposed_communication": 5.0}


@pytest.mark.parametrize(
    ("parts", "busy_ms", "excess"),
    [
        (BEHIND, (135.0, 150.0), None),
        (BEHIND, (150.0, 148.0), None),
        (BEHIND, (115.0, 150.0), "23.3 ms more than the others on launching kernels"),
        (BEHIND, (15.0, 150.0), "65.0 ms more than the others on launching kernels"),
        (BEHIND, (None, 150.0), "up to 65.0 ms more than the others on launching kernels"),
        (BEHIND, (135.0, None), "up to 65.0 ms more than the others on launching kernels"),
        ({**BEHIND, "launch_idle": 20.0, "host": 50.0}, (135.0, 150.0), "50.0 ms more than the others on work of"),
    ],
    ids=["as slow", "busier", "slower CPU", "much slower CPU", "unknown", "slowest unknown", "other work of the CPU"],
)
def test_a_rank_is_slow_only_if_its_cpu_is(
    parts: dict[str, float], busy_ms: tuple[float | None, float | None], excess: str | None
) -> None:
    """A step takes 100 ms, and 150 ms with the profiler. The GPU of rank 0 waits for rank 1 for 75 ms.

    If the CPU of rank 1 works for 35 of the 150 ms longer, this is 23.3 % of a step: 23.3 ms. No rank is slower by more
    than the difference of launch idle, 65 ms.
    """
    run = with_memory(profiled(AHEAD, parts, train__micro_batch_size=2, **GPU), 20_000)
    assert run.metrics.step_breakdown is not None
    for entry, busy in zip(run.metrics.step_breakdown, busy_ms, strict=True):
        entry |= {"profiled_step_ms": 150.0, "cpu_busy_ms": busy}
    found = explanation(run)
    if excess is not None:
        assert found[0] == "waiting"
        assert f"the ranks wait for rank 1 for 38% of the step, because it spends {excess}" in found[2]
        return
    assert found[0] == "launch_idle"
    assert found[1:] == (
        0.7,
        "Launch-bound: the GPU of rank 1 is idle for 70% of the step, because the CPU launches 4,000 kernels per "
        "micro-batch too slowly. The other ranks are as slow, but ahead: their GPUs wait in collectives.",
        ["train.micro_batch_size=8", "kernels=fast"],
    )


def test_a_larger_micro_batch_is_proposed_only_if_it_fits() -> None:
    """The GPU has 140 GB. 55 % of the step is idle, so a micro-batch three times as large would hide it: 4 times."""
    fast = {"kernels__name": "fast", "train__micro_batch_size": 2, **GPU}
    unknown = profiled(LAUNCH_BOUND, **fast)
    assert explanation(unknown)[3] == []
    assert explanation(with_memory(unknown, 20_000))[3] == ["train.micro_batch_size=8"]
    assert explanation(with_memory(unknown, 40_000))[3] == ["train.micro_batch_size=4"]
    assert explanation(with_memory(unknown, 100_000))[3] == []
    assert explanation(with_memory(unknown, 100_000, constant_mib=92_000))[3] == ["train.micro_batch_size=8"]
    limited = with_memory(profiled(LAUNCH_BOUND, cluster__gpu_memory_limit_gb=24, **fast), 20_000)
    assert explanation(limited)[3] == []
    assert explanation(with_memory(unknown, 32_100))[3] == ["train.micro_batch_size=4"], "CUDA and NCCL need memory"
    small = {"cluster__gpu_memory_limit_gb": 8, **fast, "train__micro_batch_size": 1}
    assert explanation(with_memory(profiled(LAUNCH_BOUND, **small), 1_800))[3] == ["train.micro_batch_size=2"]
    measured = with_memory(unknown, 30_000)
    measured.memory["parts"][0]["context_mib"] = 20_000.0
    assert explanation(measured)[3] == ["train.micro_batch_size=4"]
    accumulated = with_memory(profiled(LAUNCH_BOUND, train__gradient_accumulation_steps=2, **fast), 20_000)
    assert explanation(accumulated)[3] == ["train.micro_batch_size=4 train.gradient_accumulation_steps=1"]
    assert "2,000 kernels per micro-batch" in explanation(accumulated)[2]
    fixed = profiled(LAUNCH_BOUND, train__gradient_accumulation_steps=4, train__global_batch_size=16, **fast)
    assert explanation(with_memory(fixed, 20_000))[3] == ["train.micro_batch_size=8"]


def test_at_the_largest_micro_batch_of_a_training_a_larger_global_batch_is_proposed() -> None:
    """The accumulation cannot shrink, so the micro-batch grows only with the global batch."""
    for settings, proposed in (
        ({}, "train.micro_batch_size=8"),
        ({"train__gradient_accumulation_steps": 3}, "train.micro_batch_size=8"),
        ({"train__global_batch_size": 4}, "train.micro_batch_size=8 train.global_batch_size=16"),
    ):
        run = profiled(LAUNCH_BOUND, kernels__name="fast", train__micro_batch_size=2, **settings, **GPU)
        found = explain(with_memory(run, 20_000))
        assert found is not None
        assert found.alternatives == found.larger_batch == [proposed]
        assert found.to_json()["larger_global_batch"] == [proposed]
        full = explain(with_memory(run, 135_000))
        assert full is not None
        assert full.alternatives == [], "a larger micro-batch does not fit"


@pytest.mark.parametrize(
    ("settings", "proposed"),
    [
        ({}, ["kernels=fast"]),
        ({"kernels__name": "fast"}, []),
        ({"kernels__name": "fast", "train__compile": "model"}, ["train.compile=graphs"]),
        ({"train__compile": "blocks"}, []),
        ({"strategy": "deepspeed", "deepspeed__zero_stage": 3}, []),
        ({"strategy": "deepspeed", "deepspeed__zero_stage": 2}, ["kernels=fast"]),
    ],
)
def test_kernels_are_proposed_only_where_they_launch_less(settings: dict[str, Any], proposed: list[str]) -> None:
    assert explanation(profiled(LAUNCH_BOUND, **settings, **GPU))[3] == proposed


@pytest.mark.parametrize(
    ("settings", "proposed"),
    [
        ({}, ["ddp.communication=bf16", "train.gradient_accumulation_steps=2"]),
        ({"ddp__communication": "bf16"}, ["train.gradient_accumulation_steps=2"]),
        ({"train__global_batch_size": 64}, ["ddp.communication=bf16", "train.global_batch_size=128"]),
        ({"strategy": "fsdp"}, ["sharding=shard_grad_op", "train.micro_batch_size=8"]),
        ({"strategy": "fsdp", "fsdp__sharding": "shard_grad_op"}, ["train.micro_batch_size=8"]),
        ({"strategy": "deepspeed", "deepspeed__zero_stage": 3}, ["zero_stage=2", "train.micro_batch_size=8"]),
    ],
)
def test_advice_against_communication(settings: dict[str, Any], proposed: list[str]) -> None:
    run = with_memory(profiled(COMMUNICATION_BOUND, **settings, **GPU), 20_000)
    assert explanation(run)[3] == proposed
    full = with_memory(run, 128_000)
    full.built.parameters = 10**9  # type: ignore[union-attr]
    memory = ("sharding", "zero_stage", "train.micro_batch_size")
    assert explanation(full)[3] == [text for text in proposed if not text.startswith(memory)]


@pytest.mark.parametrize("steps", [None, 1, 2])
def test_more_accumulation_needs_two_steps_in_an_epoch(steps: int | None) -> None:
    for settings, text in (({}, "train.gradient_accumulation_steps=2"), ({"train__global_batch_size": 8},
                                                                         "train.global_batch_size=16")):  # fmt: skip
        run = profiled(COMMUNICATION_BOUND, **settings, **GPU)
        run.metrics.steps_per_epoch = steps
        assert (text in explanation(run)[3]) == (steps != 1)


@pytest.mark.parametrize(
    ("settings", "alternatives", "larger"),
    [
        ({}, ["ddp.communication=bf16", "train.gradient_accumulation_steps=2"], [1]),
        ({"train__global_batch_size": 8}, ["train.micro_batch_size=8", "train.global_batch_size=16"], [1]),
        ({"train__micro_batch_size": 2}, ["train.micro_batch_size=4", "kernels=fast"], [0]),
        ({"train__micro_batch_size": 2, "train__gradient_accumulation_steps": 2},
         ["train.micro_batch_size=4 train.gradient_accumulation_steps=1"], []),
    ],
)  # fmt: skip
def test_larger_global_batches_are_named(settings: dict[str, Any], alternatives: list[str], larger: list[int]) -> None:
    profile = StepProfile.of(profiled(LAUNCH_BOUND, **settings))
    assert profile is not None
    assert larger_global_batches(profile, alternatives) == [alternatives[position] for position in larger]


@pytest.mark.parametrize(
    ("cores", "limit", "hosts", "nodes", "proposed"),
    [
        (None, None, [], 1, None),
        (8, None, [], 1, None),
        (64, None, [], 1, 8),
        (64, 9.5, [], 1, None),
        (64, 14.0, [], 1, 6),
        (16, None, ["a", "b"], 2, 7),
        (16, None, ["a"], 2, None),
    ],
    ids=["unknown", "few", "many", "limit", "higher limit", "two machines", "simulated nodes"],
)
def test_advice_for_data_needs_free_cores(
    cores: int | None, limit: float | None, hosts: list[str], nodes: int, proposed: int | None
) -> None:
    run = profiled(DATA_BOUND, dataset__num_workers=4, cluster__nodes=nodes, **GPU)
    assert run.environment is not None
    run.environment.cpu_count, run.environment.cpu_limit = cores, limit
    expected = [f"dataset.num_workers={proposed}"] if proposed else []
    run.run.hosts = hosts
    assert explanation(run)[3] == expected
    run.run.hosts, run.run.attempts = [], [{"hosts": hosts}]  # during a run
    assert explanation(run)[3] == expected


@pytest.mark.parametrize(
    ("dataset", "proposed"),
    [
        ({"cache": "none"}, True),
        ({"cache": "gpu"}, False),
        ({"root": "/missing"}, False),
        ({"train_size": 10**8, "eval_size": 1}, False),
    ],
    ids=["small", "is kept", "unknown", "300 GB"],
)
def test_decoded_images_are_kept_only_if_they_fit(dataset: dict[str, Any], proposed: bool) -> None:
    settings = {f"dataset__{name}": value for name, value in {"keys": ["cache"], **dataset}.items()}
    assert explanation(profiled(DATA_BOUND, **settings, **GPU))[3] == ["dataset.cache=cpu"] * proposed


@pytest.mark.parametrize(
    ("settings", "proposed"),
    [({}, []), ({"precision__name": "fp32"}, ["precision=bf16"]), ({"precision__name": "fp32", "peak": None}, [])],
)
def test_advice_for_a_compute_bound_run(settings: dict[str, Any], proposed: list[str]) -> None:
    device = {} if "peak" in settings else GPU
    assert explanation(profiled(COMPUTE_BOUND, **settings, **device))[3] == proposed


def test_comparison_is_per_sample() -> None:
    """B has half of the samples: 4 per worker against 8, with two workers."""
    before = profiled(COMPUTE_BOUND, train__micro_batch_size=8, **GPU)
    after = profiled(LAUNCH_BOUND, train__micro_batch_size=4, **GPU)
    profiles = [StepProfile.of(each) for each in (before, after)]
    assert profiles[0] is not None
    assert profiles[1] is not None
    comparison = ProfileComparison(profiles[0], profiles[1])
    assert comparison.totals == PerSample(100 / 16, 100 / 8)
    assert comparison.per_sample("launch_idle") == PerSample(5 / 16, 55 / 8)
    sentence = comparison.sentence()
    assert sentence.startswith("B is 2.00 times slower than A, 12.500 ms instead of 6.250 ms per sample.")
    changes = "GPU idle: slow launches +6.562 ms, matrix kernels -1.875 ms."
    assert sentence.endswith(f"Largest changes: {changes}")
    assert ProfileComparison(profiles[1], profiles[0]).sentence().startswith("B is 2.00 times faster than A")
    assert "equally fast" in ProfileComparison(profiles[0], profiles[0]).sentence()


def test_comparison_uses_the_steps_that_were_not_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The profiler makes a step of B five times longer. But without it B is only twice as slow."""
    before, after = (profiled({"matmul": length}, number=n, peak=None) for n, length in enumerate((100.0, 1000.0)))
    before.metrics.step_time_s = {"p50": 0.1}
    after.metrics.step_time_s = {"p50": 0.2}
    folder = write(tmp_path, before, after)
    assert main([str(folder / "0"), str(folder / "1")]) == 0
    out = capsys.readouterr().out
    assert "B is 2.00 times slower than A" in out
    assert "\nB: The parts add up to 1,000.0 ms. The median of the steps that were not profiled is 200.0 ms." in out
    assert out.count("the profiler makes all parts longer") == 1
    assert main([str(folder / "0"), str(folder / "1"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["median_ms_per_sample"]["b"] == pytest.approx(2 * found["median_ms_per_sample"]["a"])


def test_parts_that_change_in_the_other_direction_explain_nothing() -> None:
    """B is slower by the median of its other steps, but its profiled steps are faster."""
    runs = [profiled({"matmul": length}, peak=None) for length in (100.0, 50.0)]
    for run, median_s in zip(runs, (0.1, 0.2), strict=True):
        run.metrics.step_time_s = {"p50": median_s}
    a, b = (StepProfile.of(run) for run in runs)
    assert a is not None
    assert b is not None
    sentence = ProfileComparison(a, b).sentence()
    assert sentence.startswith("B is 2.00 times slower than A")
    assert "The profiled steps do not show this: they take" in sentence
    assert "Largest changes" not in sentence


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


def test_command_refuses_runs_without_a_profile(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([str(sweep / "2")], f"{sweep / '2'} has no profile: run it with distexp strategy=ddp profile=true"),
        ([str(sweep / "2"), str(sweep / "0")], "has no profile"),
        ([str(sweep), str(sweep / "0")], f"has 3 profiled runs: give one of them, such as {sweep / '0'}"),
        ([str(sweep / "3")], "has no profile, because the run is failed: give a completed run"),
        ([str(sweep / "4")], "no readable record.json below"),
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


def test_damaged_records_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    communicating = profiled(COMMUNICATION_BOUND, train__gradient_accumulation_steps=0, **GPU)
    communicating.metrics.communication = {"by_collective": {"a": None}}
    launching = profiled(LAUNCH_BOUND, number=1, train__gradient_accumulation_steps=0, **GPU)
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


def test_an_error_of_the_explanation_keeps_the_record(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: RunRecord) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(training_record, "explain", fail)
    found = profiled(COMPUTE_BOUND, **GPU)
    training_record.add_explanation(found)
    assert found.metrics.explanation is None
    assert "no explanation: ZeroDivisionError: division by zero" in capfd.readouterr().err

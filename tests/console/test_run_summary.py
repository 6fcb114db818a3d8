"""Tests of the title and the panel of a run."""

from __future__ import annotations

from typing import Any

import pytest

from distexp.console.run_summary import run_title, summary_lines
from distexp.report.data.metrics import gpu_peak
from distexp.runs.record_sections import Predicted, RunError
from tests.helpers.records import add_parts, record
from tests.helpers.runs import make_spec


@pytest.mark.parametrize(
    ("overrides", "title"),
    [
        (("strategy=ddp",), "bloom_tiny on squad_sample, ddp, fp32, 2 cpu workers"),
        (("strategy=single",), "bloom_tiny on squad_sample, single, fp32, 1 cpu worker"),
        (("sharding=shard_grad_op",), "bloom_tiny on squad_sample, fsdp shard_grad_op, fp32, 2 cpu workers"),
        (
            ("zero_stage='2'", "offload='true'", "cluster.nodes=2"),
            "bloom_tiny on squad_sample, deepspeed ZeRO-2, offloaded, fp32, 4 cpu workers on 2 nodes",
        ),
        (("parallel.tensor=2",), "bloom_tiny on squad_sample, ddp, parallel.tensor=2, fp32, 2 cpu workers"),
        (
            ("sharding=full_shard", "parallel.context=2", "train.activation_checkpointing=selective"),
            "bloom_tiny on squad_sample, fsdp full_shard, parallel.context=2, selective activation checkpointing, "
            "fp32, 2 cpu workers",
        ),
        (("model=bloom_560m", "scale=tiny"), "tiny stand-in for bloom_560m on squad_sample, ddp, fp32, 2 cpu workers"),
        (("command=preflight",), "preflight with 2 cpu workers"),
    ],
)
def test_the_title_names_model_data_strategy_and_workers(overrides: tuple[str, ...], title: str) -> None:
    workers = () if "strategy=single" in overrides else ("cluster.workers_per_node=2",)
    assert run_title(make_spec("cluster.device=cpu", *workers, *overrides)) == title


def test_the_panel_has_scores_if_they_were_measured() -> None:
    run = record(0)
    run.run.duration_s = 4.0
    assert not {"answers", "eval top-5"} & {name for name, _ in summary_lines(run)}
    run.metrics.exact_match, run.metrics.f1 = 53.8, 72.8
    run.metrics.eval_accuracies, run.metrics.eval_top5_accuracies = [0.2, 0.3], [0.7, 0.9]
    lines = dict(summary_lines(run))
    assert lines["answers"] == "exact match 53.8%, F1 72.8%"
    assert lines["eval top-5"] == "70.0% -> 90.0%"


def test_the_panel_of_a_run_that_was_too_short_names_the_steps_that_it_needs() -> None:
    run = record(0)
    run.run.duration_s, run.metrics.train_samples_per_second = 4.0, None
    run.config.setdefault("train", {})["measure_after_step"] = 5
    text = dict(summary_lines(run))["throughput"]
    assert text == (
        "not measured: the first 5 steps and their speeds do not count (train.measure_after_step), and no later step "
        "was timed"
    )


def test_the_panel_names_shared_layers_and_stored_activations() -> None:
    run = record(0, train__activation_checkpointing="selective", parallel__tensor=2)
    run.run.duration_s = 4.0
    assert run.built is not None
    run.built.tensor = 2
    assert ", layers shared by 2 workers, selective activation checkpointing, " in dict(summary_lines(run))["built"]


def test_a_resumed_run_has_the_duration_of_its_latest_attempt() -> None:
    run = record(0)
    run.run.duration_s, run.metrics.train_runtime = 4.0, 3.0
    assert dict(summary_lines(run))["runtime"] == "3.0 s training and evaluation, 4.0 s in the workers"
    run.run.attempts, run.metrics.train_runtime = [{"resumed_from_step": None}, {"resumed_from_step": 9}], 13.0
    assert (
        dict(summary_lines(run))["runtime"]
        == "13.0 s training and evaluation, 4.0 s in the workers of the latest attempt"
    )


def test_the_panel_has_no_line_for_a_loss_that_was_not_evaluated() -> None:
    run = record(0)
    run.run.duration_s = 4.0
    run.metrics.train_losses = [2.0, 1.5]
    lines = dict(summary_lines(run))
    assert lines["train loss"] == "2.0000 -> 1.5000"
    assert "eval loss" not in lines
    run.metrics.eval_losses = [None]
    assert dict(summary_lines(run))["eval loss"] == "nan"


def test_the_panel_has_the_time_of_the_compilation() -> None:
    run = record(0)
    run.run.duration_s = 4.0
    assert "compilation" not in dict(summary_lines(run))
    run.metrics.compile = {"seconds": 8.06, "graphs": 1, "recompilations": 0, "cache_hits": 0}
    assert dict(summary_lines(run))["compilation"] == "8.1 s, 1 graph"
    run.metrics.compile = {"seconds": 2.0, "graphs": 4, "recompilations": 0, "cache_hits": 3}
    assert dict(summary_lines(run))["compilation"] == "2.0 s, 4 graphs, with the cache of earlier runs"


def test_the_panel_defines_its_share_of_communication() -> None:
    """It is another number than the exposed communication of ``distexp explain``, which is without the waiting."""
    run = record(0)
    run.run.duration_s = 4.0
    run.metrics.communication = {"share": 0.09, "exposed_share": None, "profiled_steps": 3}
    expected = "9% of the time of 3 profiled steps, including waiting for other ranks"
    assert dict(summary_lines(run))["communication"] == f"{expected} (profile/rank0.json.gz)"
    run.metrics.communication["exposed_share"] = 0.04
    hidden = " (4% not overlapped with compute)"
    assert dict(summary_lines(run))["communication"] == f"{expected}{hidden} (profile/rank0.json.gz)"


@pytest.mark.parametrize(
    ("device", "threads", "used", "wait_s", "share"),
    [
        ("cpu", 2, 30.0, 0.0, "30%"),
        ("cpu", 2, 95.0, 0.0, None),
        ("cpu", 2, 30.0, 5.0, None),
        ("cpu", 1, 15.0, 0.0, "30%"),
        ("cpu", 1, 30.0, 0.0, None),
        ("cpu", 2, None, 0.0, None),
        ("cuda", 2, 30.0, 0.0, None),
    ],
    ids=["busy", "idle", "waits for data", "one thread", "one thread that waits for others", "unknown", "GPU"],
)
def test_threads_on_busy_cores_have_a_hint(
    device: str, threads: int, used: float | None, wait_s: float, share: str | None
) -> None:
    run = record(0, cluster__device=device, cluster__cpus_per_worker=threads, cluster__workers_per_node=1)
    run.run.duration_s = 12.0
    assert run.environment is not None
    run.environment.cpu_count, run.environment.cpu_limit = 2, None
    run.metrics.train_runtime, run.metrics.data_wait_s = 10.0, wait_s
    run.metrics.total_steps, run.metrics.train_steps_per_second = 25, 2.0
    run.utilization["cpu"] = [{"node": 0, "average_pct": used, "phases": {} if used is None else {"train": used}}]
    text = dict(summary_lines(run)).get("busy cores", "")
    assert text.startswith(f"this run got {share} of the time of its CPU cores") == (share is not None)
    assert ("Try cluster.cpus_per_worker=1" in text) == (share is not None and threads > 1)
    assert ("Repeat it when they are done" in text) == (share is not None and threads == 1)
    run.config["cluster"]["environment"] = {"OMP_WAIT_POLICY": "PASSIVE"}
    assert ("busy cores" in dict(summary_lines(run))) == (share is not None and threads == 1)


def test_uneven_steps_have_a_line() -> None:
    """A run next to other programs had a median step of 20.5 ms, and a mean one of 138 ms."""
    run = record(0)
    run.run.duration_s, run.metrics.step_time_s = 4.0, {"p50": 0.02, "p90": 0.9, "max": 2.0}
    run.metrics.train_steps_per_second = 1 / 0.138
    assert dict(summary_lines(run))["uneven steps"].startswith("its mean step took 6.9 times as long as its median")
    run.metrics.train_steps_per_second = 1 / 0.028
    assert "uneven steps" not in dict(summary_lines(run)), "undisturbed runs have up to 1.4"


KEYS = ["padding", "packing", "bucketing"]
BLOOM, GPT, HF = (f"distexp.models.{name}.build" for name in ("bloom", "gpt", "hf"))


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, "model.attention=sdpa dataset.packing=true or dataset.padding=longest"),
        ({"model__attention": "sdpa"}, "dataset.packing=true or dataset.padding=longest"),
        ({"model___target_": GPT}, "dataset.packing=true or dataset.padding=longest"),
        ({"model___target_": HF}, "dataset.bucketing=true or dataset.padding=longest"),
        ({"model___target_": "my.model"}, "dataset.bucketing=true or dataset.padding=longest"),
        ({"model___target_": GPT, "dataset__padding": "longest"}, "dataset.packing=true"),
        ({"model___target_": GPT, "train__compile": "model"}, "dataset.packing=true"),
        ({"model___target_": HF, "train__compile": "model"}, None),
        ({"dataset__packing": True}, None),
        ({"dataset__bucketing": True}, None),
        ({"dataset__keys": []}, None),
    ],
)
def test_the_panel_names_the_options_of_a_run_with_much_padding(settings: dict[str, Any], options: str | None) -> None:
    run = record(0, **{"dataset__keys": KEYS, **settings})
    run.run.duration_s = 4.0
    run.metrics.padding_share, run.metrics.steps_per_epoch = 0.913, 20
    expected = None if options is None else f"91% of the tokens: try {options}"
    assert dict(summary_lines(run)).get("padding") == expected


def test_the_panel_names_no_packing_for_few_samples() -> None:
    run = record(0, dataset__keys=KEYS, model__attention="sdpa")
    run.run.duration_s = 4.0
    run.metrics.padding_share, run.metrics.steps_per_epoch = 0.9, 9
    expected = "90% of the tokens: try dataset.bucketing=true or dataset.padding=longest"
    assert dict(summary_lines(run))["padding"] == expected
    run.metrics.padding_share = 0.53
    assert "padding" not in dict(summary_lines(run)), "the share of the default run"


def test_the_panel_has_the_utilization_by_the_peak_and_by_the_ceiling() -> None:
    run = record(0)
    run.run.duration_s = 4.0
    metrics = run.metrics
    metrics.tflops_per_device, metrics.executed_tflops_per_device = 400.0, 600.0
    assert "model FLOPs" not in dict(summary_lines(run)), "nothing to compare with, as on a CPU"
    metrics.mfu, metrics.hfu = 0.4, 0.6
    lines = dict(summary_lines(run))
    assert lines["model FLOPs"] == (
        "400 TFLOP/s per worker, MFU 40.0%, matrix ceiling not measured: type distexp preflight once"
    )
    metrics.matrix_ceiling_tflops, metrics.mfu_of_ceiling, metrics.hfu_of_ceiling = 800.0, 0.5, 0.75
    lines = dict(summary_lines(run))
    assert lines["model FLOPs"] == "400 TFLOP/s per worker, MFU 40.0%, 50.0% of the matrix ceiling (800 TFLOP/s)"
    assert lines["executed FLOPs"] == "600 TFLOP/s per worker, HFU 60.0%, 75.0% of the matrix ceiling (800 TFLOP/s)"
    metrics.matrix_ceiling_tflops = 500.0
    lines = dict(summary_lines(run))
    assert lines["model FLOPs"].endswith("80.0% of the matrix ceiling (500 TFLOP/s)")
    assert lines["executed FLOPs"].endswith(
        "so the ceiling was probably measured on a busy machine: type distexp preflight again"
    )


def test_the_panel_has_the_prediction_and_its_error() -> None:
    run = record(0, cluster__device="cuda")
    run.run.duration_s = 4.0
    run.predicted = Predicted(peak_allocated_mib=990.0)
    assert dict(summary_lines(run))["prediction"] == "990 MiB allocated by torch"
    run.memory["torch"] = [{"rank": 0, "peak_allocated_mib": 1000.0}, {"rank": 1, "peak_allocated_mib": 900.0}]
    assert dict(summary_lines(run))["prediction"] == "990 MiB allocated by torch, measured 1,000 MiB (-1.0 %)"


def test_on_a_cpu_the_prediction_is_that_of_the_processes() -> None:
    run = record(0, cluster__device="cpu")
    run.run.duration_s = 4.0
    run.predicted = Predicted(peak_allocated_mib=14.0, host_peak_mib=550.0)
    run.memory["cpu"] = [{"node": 0, "peak_mib": 500.0, "phases": {"train": 500.0, "done": 911.0}}]
    lines = dict(summary_lines(run))
    assert lines["prediction"] == "550 MiB CPU memory, measured 500 MiB (+10.0 %)"
    assert lines["peak memory"] == "CPU of node 0 500 MiB"
    run.memory["cpu"][0]["peak_mib"] = None  # a run that is shorter than the interval of the samples
    assert "peak memory" not in dict(summary_lines(run))


def test_the_panel_has_the_parts_of_the_memory_of_one_worker() -> None:
    run = record(0)
    run.run.duration_s = 4.0
    assert "memory parts" not in dict(summary_lines(run))
    lines = dict(summary_lines(add_parts(run, parameters=0.1)))
    parts = "parameters 0.101, gradients 0.101, optimizer states 0.202, activations 2.000"
    assert lines["memory parts"] == f"{parts} MiB on one worker"


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ([1, 1], "X, 1,000"),
        ([2, 1], "X, 2 replicas, 1,000"),
        ([1, 2], "X, 2 shards"),
        ([2, 4], "X, 2 replicas of 4 shards"),
    ],
)
def test_the_panel_has_replicas_and_shards(mesh: list[int], text: str) -> None:
    run = record(0)
    run.run.duration_s = 4.0
    assert run.built is not None
    run.built.mesh = mesh
    assert dict(summary_lines(run))["built"].startswith(text)


def test_the_panel_shows_that_a_single_run_has_no_wrapper() -> None:
    run = record(0)
    run.run.duration_s = 4.0
    assert run.built is not None
    run.built.wrapper, run.built.mesh = "none", [1, 1]
    assert dict(summary_lines(run))["built"].startswith("no wrapper, 1,000 parameters")


def test_the_panel_names_a_small_model_as_stand_in() -> None:
    run = record(0, model__name="bloom_560m", scale__name="tiny")
    run.run.duration_s = 4.0
    assert "1,000 parameters (tiny stand-in for bloom_560m), AdamW" in dict(summary_lines(run))["built"]


def test_the_memory_of_other_programs_on_a_gpu_is_not_that_of_the_run() -> None:
    runs = [record(n, strategy=name, peak=9000.0 - 1000 * n) for n, name in enumerate(("ddp", "fsdp", "single"))]
    for run, own in zip(runs, (1500.0, 2500.0, None), strict=True):
        run.memory["gpu"], run.memory["torch"] = [run.memory["gpu"][0] | {"job_peak_mib": own}], []
        run.run.duration_s = 4.0
    panels = [dict(summary_lines(run))["peak memory"] for run in runs]
    assert ["1,500 MiB" in panels[0], "2,500 MiB" in panels[1], "7,000 MiB" in panels[2]] == [True] * 3
    assert [gpu_peak(run) for run in runs] == [1500.0, 2500.0, 7000.0]
    runs[2].memory["gpu"][0]["job_peak_mib"] = 6990.0  # as on a GPU of its own
    assert gpu_peak(runs[2]) == 7000.0


def test_the_panel_shortens_the_losses_of_many_epochs() -> None:
    run = record(0)
    run.run.duration_s = 4.0
    run.metrics.train_losses = run.metrics.eval_losses = [float(epoch) for epoch in range(1, 61)]
    assert dict(summary_lines(run))["eval loss"] == "1.0000 -> 2.0000 -> ... -> 58.0000 -> 59.0000 -> 60.0000"


def test_the_panel_has_the_error_with_its_phase_and_rank() -> None:
    run = record(0)
    run.run.duration_s = 4.0
    run.status, run.error = "failed", RunError("ValueError", "bad value", "train", 1)
    assert dict(summary_lines(run))["error"] == "ValueError in phase train: bad value (rank 1)"
    run.error = RunError("SIGKILL", "rank 1 was terminated by SIGKILL", "train", 1)
    assert dict(summary_lines(run))["error"] == "SIGKILL in phase train: rank 1 was terminated by SIGKILL"


def test_the_panel_has_the_highest_peak_of_a_recorded_step() -> None:
    run = add_parts(record(0), parameters=3.0)
    run.run.duration_s = 4.0
    assert "memory peak" not in dict(summary_lines(run))
    tensors = dict(summary_lines(run))["memory parts"]
    empty = dict.fromkeys(("logits_mib", "communication_mib"))
    for phase, activations in (("forward", 90.0), ("backward", 1200.0)):
        peak = {"parameters_mib": 30.0, "activations_mib": activations, "other_mib": 0.2, **empty}
        run.memory["parts"].append({"rank": 0, "phase": phase, "allocated_mib": 30.0 + activations, **peak})
    lines = dict(summary_lines(run))
    assert lines["memory peak"] == "1,230 MiB in the backward phase: parameters 30, activations 1,200"
    assert lines["memory parts"] == tensors, "the tensors do not depend on the recorded step"

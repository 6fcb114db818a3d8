"""The bottleneck of a run: its name, its share of the step, and its sentence."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from distexp.explain.explanation import explain
from distexp.launch import outcome
from distexp.runs.record import RunRecord
from distexp.strategies.base import Strategy
from tests.helpers.profiled_records import (
    COMMUNICATION_BOUND,
    COMPUTE_BOUND,
    DATA_BOUND,
    GPU,
    LAUNCH_BOUND,
    SIX_OVERHEADS,
    explanation,
    profiled,
)
from tests.helpers.records import record
from tests.helpers.runs import make_spec, run_distexp


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
    assert (found.bottleneck, found.share) == (bottleneck, share)
    assert found.sentence.startswith(words)
    assert found.sentence.endswith(".")


@pytest.mark.parametrize(("wait", "end"), [(4.0, "of the step."), (9.0, "The largest other part is data wait 9.0%.")])
def test_a_compute_bound_run_names_its_largest_other_part(wait: float, end: str) -> None:
    settings = {"dataset__keys": ["cache"], "dataset__train_size": 10, "dataset__eval_size": 1}
    found = explanation(profiled({"matmul": 100.0 - wait, "data_wait": wait}, **settings, **GPU))
    assert found.bottleneck == "compute"
    assert found.sentence.startswith("Compute-bound: ")
    assert found.sentence.endswith(end)
    assert found.alternatives == ["dataset.cache=cpu"] * (wait > 5)


def test_a_run_on_cpus_is_not_called_bound_by_the_cpu() -> None:
    parts = {"matmul": 60.0, "host": 40.0}
    found = explanation(profiled(parts, parts, peak=None))
    assert found.bottleneck == "host"
    assert found.sentence.startswith("The CPU spends 40% of the step outside of operators and collectives")


def test_a_run_without_a_profile_has_no_explanation() -> None:
    assert explain(record(0)) is None


def test_an_error_of_the_explanation_keeps_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: RunRecord, strategy: Strategy) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(outcome, "explain", fail)
    found = profiled(COMPUTE_BOUND, **GPU)
    found.write_result(tmp_path)
    found = outcome.finalize_run(make_spec(), tmp_path, {0: 0}, time.time())
    assert found.metrics.explanation is None
    assert "no explanation: ZeroDivisionError: division by zero" in capfd.readouterr().err


@pytest.mark.slow
def test_the_stored_explanation_knows_the_measured_memory(tmp_path: Path) -> None:
    """Its advice depends on the memory, so it is that of ``distexp explain``, which reads the record."""
    done = run_distexp("strategy=ddp", "scale=tiny", "train.profile_steps=3", f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    found = RunRecord.read(tmp_path / "run" / "record.json")
    expected = explain(found)
    assert expected is not None
    assert found.metrics.explanation == expected.to_json()


@pytest.mark.parametrize(
    ("schedule", "bubble"), [("gpipe", "27%"), ("1f1b", "27%"), ("interleaved", "16%"), ("zero_bubble", "0%")]
)
def test_the_bubble_of_a_pipeline_is_named_with_what_its_workers_waited(schedule: str, bubble: str) -> None:
    settings = {"parallel__pipeline": 4, "parallel__schedule": schedule, "train__gradient_accumulation_steps": 8}
    found = profiled(COMMUNICATION_BOUND, COMMUNICATION_BOUND, train__micro_batch_size=4, **settings)
    found.metrics.communication = {"by_collective": {"all_reduce": 0.1, "send": 0.1, "recv": 0.2}}
    sentence = explanation(found).sentence
    assert f"schedule={schedule} with 4 workers and 8 micro-batches is {bubble} of the step" in sentence
    assert "Sending and receiving between stages, which includes the bubble, takes 34%." in sentence
    smaller = "train.micro_batch_size=2 train.gradient_accumulation_steps=16"
    assert smaller in explanation(found).alternatives
    assert "bubble" not in explanation(profiled(COMMUNICATION_BOUND)).sentence
    measured = {
        **COMMUNICATION_BOUND,
        "exposed_communication": 0.0,
        "bubble": COMMUNICATION_BOUND["exposed_communication"],
    }
    bound = explanation(profiled(measured, measured, train__micro_batch_size=4, **settings))
    assert bound.bottleneck == "bubble"
    assert (
        f"is {bubble} of the step, if all stages take equally long. It was 45%, with the transfers." in bound.sentence
    )
    assert smaller in bound.alternatives

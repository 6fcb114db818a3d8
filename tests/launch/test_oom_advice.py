"""What would have fit, in the record of a run that was out of GPU memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distexp.console.run_summary import most_important_first, summary_lines
from distexp.launch.memory_check import apply_overrides, plan_command, predicted_change
from distexp.launch.outcome import finalize_run, start_attempt
from distexp.plan.planner import store_estimate
from distexp.report.data.overview import failure_notes
from distexp.report.data.rows import Row
from distexp.runs.attempts import write_error_file
from distexp.runs.record import RunRecord, RunSpec
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import MICRO_BATCH, RANK_ERROR
from distexp.runs.step_files import MicroBatchSearch
from tests.helpers.planning import linear_estimate
from tests.helpers.records import record
from tests.helpers.runs import make_spec, run_distexp

CELL = (
    "model=gpt_tiny", "strategy=single", "cluster.device=cpu", "measure.enabled=false", "train.micro_batch_size=8",
)  # fmt: skip
MEMORY: dict[str, Any] = {
    "requested_mib": 1200.0, "allocated_mib": 70_000.0, "reserved_mib": 74_000.0, "free_mib": 900.0,
    "total_mib": 81_920.0, "line": "x.py:3 in forward", "parts": {"parameters_mib": 2000.0, "rest_mib": 68_000.0},
    "largest": [
        {"mib": 980.0, "count": 2, "part": "rest", "line": "x.py:4 in forward"},
        {"mib": 500.0, "count": 1, "part": "parameters", "line": "head.weight"},
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path / "cache"))


def store(*overrides: str) -> None:
    config = make_spec(*CELL, *overrides).config
    store_estimate(config, linear_estimate(config))


def test_the_smallest_predicted_change_that_fits() -> None:
    """8 samples of 1 GB and 4 GB of states do not fit into 9 GB. Four samples do, and one more change is not needed."""
    config = make_spec(*CELL).config
    assert predicted_change(config, 9_000.0) == [], "nothing was predicted, and nothing is traced now"
    change = ("train.micro_batch_size=4", "train.gradient_accumulation_steps=2")
    store(*change)
    store("train.activation_checkpointing=true")
    assert predicted_change(config, 9_000.0) == list(change)
    assert predicted_change(config, 7_000.0) == ["train.activation_checkpointing=true"]
    assert predicted_change(config, 5_000.0) == []


def test_overrides_keep_the_types_of_the_configuration() -> None:
    config = make_spec(*CELL).config
    changed = apply_overrides(config, ("train.micro_batch_size=2", "train.logits=targets"))
    assert changed is not None
    assert (changed.train.micro_batch_size, changed.train.logits) == (2, "targets")
    assert config.train.micro_batch_size == 8
    assert apply_overrides(config, ("zero_stage=3",)) is None


def test_the_command_has_the_overrides_of_the_run_and_its_gpu() -> None:
    spec = make_spec(*CELL)
    spec.run.overrides = ["strategy=fsdp", "plan=check", "plan.search_timeout_s=5", "train.betas=[0.9, 0.99]"]
    assert (
        plan_command(spec, 81_920.0, 8)
        == "distexp plan strategy=fsdp 'train.betas=[0.9, 0.99]' plan.gpu_memory_gb=80.0"
    )


def test_the_record_of_a_run_has_the_report_of_its_worker(tmp_path: Path) -> None:
    spec = make_spec(*CELL)
    start_attempt(spec, tmp_path)
    (tmp_path / "command.json").write_text('{"words": ["--config-dir", "conf"]}')
    error = RunError("OutOfMemoryError", "CUDA out of memory.", "warmup", 0, memory=MEMORY)
    write_error_file(RANK_ERROR.path(tmp_path, 0, 0), error)
    finalize_run(spec, tmp_path, {0: 1}, started=1.0)
    written = RunRecord.read(tmp_path / "record.json")
    assert written.status == "oom_gpu"
    assert written.error is not None
    assert written.error.memory == {
        **MEMORY,
        "would_fit": [],
        "command": f"{plan_command(spec, 81_920.0, 8)} --config-dir conf",
    }
    assert "memory" in json.loads((tmp_path / "record.json").read_text())["error"]


AUTO = (*CELL[:-1], "train.micro_batch_size=auto", "train.global_batch_size=8")


@pytest.mark.parametrize(("chosen", "size"), [(4, 4), (None, 1)])
def test_the_advice_has_the_size_that_the_search_chose(tmp_path: Path, chosen: int | None, size: int) -> None:
    spec = make_spec(*AUTO, "strategy=single")
    spec.run.overrides = ["model=gpt_tiny", "train.micro_batch_size=auto", "train.global_batch_size=8"]
    change = "train.activation_checkpointing=true"
    store("train.global_batch_size=8", f"train.micro_batch_size={size}", change)
    found = fail(spec, tmp_path, MEMORY, MicroBatchSearch(chosen))
    assert found["would_fit"] == ([change] if chosen else [])
    assert found["command"] == (
        f"distexp plan model=gpt_tiny train.global_batch_size=8 train.micro_batch_size={size} plan.gpu_memory_gb=80.0"
    )


@pytest.mark.parametrize(
    ("memory", "kept"), [({}, True), ({**MEMORY, "free_mib": None}, True), ({**MEMORY, "total_mib": "x"}, False)]
)
def test_a_damaged_report_leaves_a_record(
    memory: dict[str, Any], kept: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail(make_spec(*CELL), tmp_path, memory) == (memory if kept else None)
    assert "has no advice in its record" in capsys.readouterr().err


def fail(spec: RunSpec, directory: Path, memory: dict[str, Any], search: MicroBatchSearch | None = None) -> Any:
    """End a run that was out of GPU memory, and return the report of its record."""
    start_attempt(spec, directory)
    if search is not None:
        search.write(directory / MICRO_BATCH)
    write_error_file(
        RANK_ERROR.path(directory, 0, 0), RunError("OutOfMemoryError", "CUDA out of memory.", memory=memory)
    )
    finalize_run(spec, directory, {0: 1}, started=1.0)
    written = RunRecord.read(directory / "record.json")
    assert written.status == "oom_gpu"
    assert written.error is not None
    return written.error.memory


def test_panel_and_report_describe_the_allocation() -> None:
    memory = {**MEMORY, "would_fit": [], "command": "distexp plan"}
    run = record(0, status="oom_gpu", error=RunError("OutOfMemoryError", "CUDA", "train", 0, memory=memory))
    lines = dict(summary_lines(run))
    assert lines["GPU memory"] == (
        "1,200 MiB requested at x.py:3 in forward, 900 of 81,920 MiB free, 70,000 allocated by torch, 74,000 reserved"
    )
    assert lines["in memory"] == "activations and temporaries 68,000, parameters 2,000"
    assert lines["largest"] == "2 x 980 MiB x.py:4 in forward, 500 MiB head.weight (parameters)"
    assert lines["would fit"] == "type distexp plan"
    assert [name for name, _ in most_important_first(summary_lines(run))][1:3] == ["GPU memory", "would fit"]
    memory["would_fit"] = ["train.micro_batch_size=4"]
    assert dict(summary_lines(run))["would fit"] == "train.micro_batch_size=4 (predicted before)"
    row = Row("0", run, {}, {"gpu_peak_mib": None, "torch_peak_allocated_mib": None})
    (note,) = failure_notes([row])
    assert "out of GPU memory in phase train; 1,200 MiB requested at x.py:3" in note
    assert note.endswith("head.weight (parameters); to fit: train.micro_batch_size=4 (predicted before)")
    run.error = RunError("OutOfMemoryError", "CUDA", "train", 0)
    (note,) = failure_notes([row])
    assert note.endswith("out of GPU memory in phase train"), "the allocation is unknown"


@pytest.mark.parametrize(
    "memory", [{"line": 3}, {"largest": "x", "parts": [1], "would_fit": 5}, {"largest": [None, {"mib": "x"}]}]
)
def test_a_damaged_report_is_shown_as_far_as_it_is_known(memory: dict[str, Any]) -> None:
    run = record(0, status="oom_gpu", error=RunError("OutOfMemoryError", "CUDA", "train", 0, memory=memory))
    assert "unknown MiB requested" in dict(summary_lines(run))["GPU memory"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("strategy=single",), ("strategy=fsdp",), ("zero_stage=2",), ("zero_stage=3", "offload=true")]
)
def test_a_run_on_a_gpu_that_is_too_small(options: tuple[str, ...], tmp_path: Path) -> None:
    """The limit lets a small model run out of memory on a large GPU."""
    done = run_distexp(
        *options, "model=gpt", "model.hidden_size=1024", "model.ff_dim=4096", "precision=bf16", "cluster.device=cuda",
        "cluster.workers_per_node=1", "cluster.gpu_memory_limit_gb=6", "train.micro_batch_size=128", "plan=off",
        "dataset.max_length=256", "dataset.train_size=512", "dataset.eval_size=8", "train.profile_steps=1",
        f"hydra.run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.rglob("record.json")
    written = RunRecord.read(path)
    assert written.status == "oom_gpu", done.stdout
    assert written.error is not None
    memory = written.error.memory
    assert memory is not None
    assert memory["requested_mib"] > memory["free_mib"] >= 0
    assert memory["reserved_mib"] + memory["requested_mib"] > memory["total_mib"]
    assert memory["total_mib"] < 6144, "the context counts for the limit"
    assert memory["allocated_mib"] == pytest.approx(sum(memory["parts"].values()), rel=0.01)
    offloaded = "offload=true" in options
    assert offloaded or memory["parts"].keys() & {"parameters_mib", "optimizer_states_mib"}
    assert memory["parts"]["rest_mib"] > 100
    assert any(".py:" in (entry["line"] or "") for entry in memory["largest"]), memory["largest"]
    assert ".py:" in memory["line"]
    assert memory["command"].startswith("distexp plan ")
    assert "MiB requested" in done.stdout

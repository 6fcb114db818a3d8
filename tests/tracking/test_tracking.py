"""Tests of the trackers with their real libraries: values that are read back equal those of the record."""

from __future__ import annotations

import json
import shlex
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distexp.config import TrackerConfig
from distexp.runs.record import RunRecord, RunSpec
from distexp.tracking import trackers as base
from distexp.tracking.trackers import tracked
from tests.helpers.runs import run_distexp

pytestmark = pytest.mark.slow

SETTINGS = ("model=gpt_tiny", "strategy=single", "train.max_steps=12", "train.num_epochs=1", "train.log_every=4")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for slow imports on a busy machine."""
    monkeypatch.setattr(base, "FINISH_TIMEOUT_S", 300.0)
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("tracking") / "my run"
    done = run_distexp(*SETTINGS, "tracker=tensorboard", f"hydra.run.dir='{folder}'")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done


def follow(folder: Path, tracker: TrackerConfig) -> list[str]:
    """Follow a finished run with another tracker; return its messages."""
    spec = RunSpec.read(folder)
    spec = replace(spec, config=replace(spec.config, tracker=tracker))
    spec.write(folder)
    with tracked(spec, folder) as messages:
        pass
    return messages


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_tensorboard_has_every_step_and_the_summary(run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, done = run
    assert f"tensorboard --logdir '{folder}/tensorboard'" in done.stdout
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [scalar.step for scalar in scalars] == [4, 8, 12]
    assert [scalar.value for scalar in scalars] == pytest.approx(losses(folder))
    metrics = RunRecord.read(folder / "record.json").metrics
    (mean,) = events.Scalars("summary/train/samples_per_second_mean")
    assert mean.value == pytest.approx(metrics.train_samples_per_second)
    (evaluated,) = events.Scalars("eval/loss")
    assert evaluated.value == pytest.approx(metrics.eval_loss)
    assert "config/text_summary" in events.Tags()["tensors"]


def test_trackio_has_every_step_and_the_summary(
    run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    messages = follow(run[0], TrackerConfig("trackio", "distexp.tracking.trackers.Trackio"))
    assert messages == ["trackio: trackio show --project distexp"]
    read = "import sys, trackio, json; runs = trackio.Api().runs('distexp'); print(json.dumps([r.name for r in runs]))"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    (name,) = json.loads(done.stdout.splitlines()[-1])
    assert RunRecord.read(run[0] / "record.json").run.id in name
    (database,) = (tmp_path / "store").glob("distexp*.db")
    with sqlite3.connect(database) as connection:
        rows = [json.loads(text) for (text,) in connection.execute("SELECT metrics FROM metrics ORDER BY step, id")]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == pytest.approx(losses(run[0]))
    assert rows[-1]["summary/completed"] == 1


def test_mlflow_has_parameters_metrics_and_files(
    run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    folder, uri = run[0], f"file://{tmp_path}/my store"
    messages = follow(folder, TrackerConfig("mlflow", "distexp.tracking.trackers.MLflow", uri=uri))
    assert messages == [f"mlflow: mlflow ui --backend-store-uri '{uri}'"]
    client = MlflowClient(uri)
    (experiment,) = [found for found in client.search_experiments() if found.name == "distexp"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["strategy.name"] == "single"
    assert [metric.value for metric in client.get_metric_history(found.info.run_id, "train/loss")] == pytest.approx(
        losses(folder)
    )
    record = RunRecord.read(folder / "record.json")
    assert found.data.metrics["summary/train_loss"] == pytest.approx(record.metrics.train_loss)
    assert {"record.json", "metrics.jsonl"} <= {file.path for file in client.list_artifacts(found.info.run_id)}


def test_wandb_is_offline_and_reports_the_upload_command(run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder = run[0]
    (message,) = [
        line for line in follow(folder, TrackerConfig("wandb", "distexp.tracking.trackers.Wandb")) if "sync" in line
    ]
    (typed,) = shlex.split(message.removeprefix("wandb: wandb sync "))
    run_folder = Path(typed)
    assert run_folder.parent == folder / "wandb"
    assert run_folder.name.startswith("offline-run-")
    (database,) = run_folder.glob("run-*.wandb")
    content = database.read_bytes()
    assert b"train/samples_per_second_mean" in content
    assert b"peak_cpu_mem_MB" in content


def test_failing_tracker_warns_once(
    run: tuple[Path, subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    unreachable = TrackerConfig("mlflow", "distexp.tracking.trackers.MLflow", uri="http://127.0.0.1:9")
    (message,) = follow(run[0], unreachable)
    assert message.startswith("warning: tracker=mlflow failed, and the run continued")

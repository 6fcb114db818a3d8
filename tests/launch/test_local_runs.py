"""Complete local commands, from the command line to the record."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distexp.config import ConfigError, DatasetConfig
from distexp.config.custom_code import PAGE
from distexp.console.screen import LiveRun, Screen
from distexp.data.squad_json import MAX_CHECKED_BYTES
from distexp.exceptions import InterruptedRunError
from distexp.launch.local.launcher import LocalLauncher
from distexp.launch.local.runner import run_locally
from distexp.launch.local.shared_start import SharedStart
from distexp.runs.events import last_value
from distexp.runs.record import RunRecord
from distexp.system.processes import collect_interrupts, handle_signals
from tests.helpers.runs import TIMEOUT_S, make_spec, run_distexp, run_module, start_distexp

SHORT = ("dataset.train_size=64", "dataset.eval_size=16", "train.num_epochs=1", "cluster.device=cpu")


CUSTOM_STRATEGY = """
from dataclasses import replace
from distexp.strategies.ddp import DDP

class Mine(DDP):
    def setup(self, blueprint, config, context):
        size = config.strategy.options["bucket_mb"]
        print(f"buckets of {size} MB")
        return super().setup(blueprint, replace(config, ddp=replace(config.ddp, bucket_cap_mb=size)), context)
"""


def only_run(folder: Path) -> Path:
    (record,) = folder.glob("multirun_outputs/distexp/*/0/record.json")
    return record.parent


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run ``python -m distexp`` in a new directory; return the run directory and the output."""
    folder = tmp_path_factory.mktemp("demo")
    done = start_distexp("cluster.device=cpu", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(folder), done.stdout


def test_the_demo_learns_and_writes_the_documented_files(demo: tuple[Path, str]) -> None:
    run_dir, _ = demo
    record = RunRecord.read(run_dir / "record.json")
    assert record.status == "completed"
    assert record.error is None
    assert record.metrics.train_losses[-1] < record.metrics.train_losses[0] / 2
    assert record.metrics.eval_losses[-1] < record.metrics.eval_losses[0]
    assert len(record.metrics.eval_losses) == len(record.metrics.train_losses) == 5
    for name in (".hydra/config.yaml", "spec.json", "metrics.jsonl", "events.jsonl", "logs/node0/rank1.log"):
        assert (run_dir / name).is_file(), name


def test_the_demo_records_its_metrics(demo: tuple[Path, str]) -> None:
    record = RunRecord.read(demo[0] / "record.json")
    metrics, built = record.metrics, record.built
    assert built is not None
    assert (built.wrapper, built.world_size, built.tokenizer) == ("DistributedDataParallel", 2, "byte(520)")
    assert (metrics.steps_per_epoch, metrics.total_steps) == (32, 160)
    assert metrics.train_samples_per_second is not None
    assert metrics.train_samples_per_second_overall is not None
    assert metrics.train_runtime is not None
    train = record.config["train"]
    samples = 160 * 2 * train["micro_batch_size"] * train["gradient_accumulation_steps"]
    assert metrics.train_samples_per_second_overall == pytest.approx(samples / metrics.train_runtime)
    measured = last_value(demo[0], "measured_samples")
    assert measured is not None
    assert measured < samples, "without the warm-up"
    assert measured / metrics.train_samples_per_second < metrics.train_runtime, "without the evaluations"
    assert metrics.step_time_s is not None
    assert 0 < metrics.step_time_s["p50"] <= metrics.step_time_s["p90"] <= metrics.step_time_s["max"]
    assert metrics.tflops_per_device is not None
    assert metrics.mfu is None, "the peak of a CPU is unknown"
    assert metrics.mfu_of_ceiling is None, "no preflight measured it"
    assert metrics.model_tflops_per_sample is not None
    assert metrics.executed_tflops_per_sample is not None
    assert 0 < metrics.model_tflops_per_sample < metrics.executed_tflops_per_sample, "batches have padding"
    expected = metrics.model_tflops_per_sample * metrics.train_samples_per_second / 2
    assert metrics.tflops_per_device == pytest.approx(expected)
    assert metrics.exact_match is None


def test_metrics_and_events_have_the_documented_format(demo: tuple[Path, str]) -> None:
    lines = [json.loads(line) for line in (demo[0] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(10, 161, 10))
    keys = {"step", "epoch", "loss", "grad_norm", "learning_rate", "step_time_s", "samples_per_second"}
    assert all(set(line) == keys for line in lines)
    events = [json.loads(line) for line in (demo[0] / "events.jsonl").read_text().splitlines()]
    phases = [event["phase"] for event in events if "phase" in event]
    assert phases == ["setup", "warmup", "train", "eval", *["train", "eval"] * 4, "done"]


def test_the_demo_prints_its_progress(demo: tuple[Path, str]) -> None:
    _, screen = demo
    for text in (
        "bloom_tiny on squad_sample, ddp, fp32, 2 cpu workers",
        "step 160/160",
        "epoch 5",
        "completed",
    ):
        assert text in screen
    assert len(screen.splitlines()) < 60


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run a sweep with invalid cells in a directory that the user chose; return the directory and the output."""
    folder = tmp_path_factory.mktemp("sweep") / "here"
    overrides = ("--multirun", "strategy=single,fsdp", "offload=true,false", "fsdp.forward_prefetch=1")
    short = (*SHORT, "model=gpt_tiny", "train.max_steps=2")
    done = run_distexp(*overrides, *short, f"hydra.sweep.dir={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_invalid_cells_get_records_and_the_others_run(sweep: tuple[Path, str]) -> None:
    records = [RunRecord.read(sweep[0] / str(number) / "record.json") for number in range(4)]
    assert [record.status for record in records] == ["invalid", "completed", "completed", "completed"]
    assert records[0].error is not None
    assert "offload=true is not supported by strategy=single" in records[0].error.message
    built = [record.built for record in records[1:]]
    assert [b.offload for b in built if b] == ["none", "parameters+gradients+optimizer", "none"]
    losses = [record.metrics.train_loss for record in records[2:]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert "invalid" in sweep[1]


@pytest.mark.slow
def test_torchrun_repeats_a_run_from_a_copy_of_its_spec(sweep: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    shutil.copy(sweep[0] / "3" / "spec.json", tmp_path / "copy")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "distexp.worker", "copy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    again, first = (RunRecord.read(p / "record.json") for p in (tmp_path / "copy", sweep[0] / "3"))
    assert again.metrics.train_losses == pytest.approx(first.metrics.train_losses, rel=1e-6)


@pytest.mark.slow
def test_new_cells_get_new_numbers(sweep: tuple[Path, str]) -> None:
    done = run_distexp("strategy=single", *SHORT, f"hydra.sweep.dir={sweep[0]}", "train.max_steps=1")
    assert done.returncode == 0, done.stderr
    assert RunRecord.read(sweep[0] / "4" / "record.json").run.number == 4
    assert RunRecord.read(sweep[0] / "3" / "record.json").run.number == 3


ONE_WORKER = ("strategy=single", *SHORT, "train.measure_after_step=1", "train.profile_steps=1", "hydra.run.dir=mine")


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run one worker in a directory that the user chose, with the last step profiled."""
    folder = tmp_path_factory.mktemp("one_worker")
    done = run_distexp(*ONE_WORKER, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "mine", done.stdout


def test_hydra_run_dir_is_used_for_one_run_only(one_worker: tuple[Path, str]) -> None:
    run_dir, _ = one_worker
    before = (run_dir / "record.json").read_text()
    assert RunRecord.read(run_dir / "record.json").status == "completed"
    again = run_distexp(*ONE_WORKER, cwd=run_dir.parent)
    assert again.returncode == 2
    assert "contains a run already" in again.stderr
    assert f"distexp resume {run_dir}" in again.stderr
    assert "not started" not in again.stdout
    other = run_module("distexp.resume", str(run_dir), "train.seed=7", cwd=run_dir.parent)
    assert other.returncode == 2
    assert f"{run_dir} contains a single run (hydra.run.dir), and the new overrides define" in other.stderr
    assert "train.resume" not in other.stderr, "it has no checkpoint"
    assert (run_dir / "record.json").read_text() == before


def test_a_sweep_names_the_folders_of_its_runs(tmp_path: Path) -> None:
    words = ("strategy=single", *SHORT, "train.max_steps=1", "hydra.sweep.dir=out")
    named = "hydra.sweep.subdir='run_${hydra.job.num}'"
    done = run_distexp("--multirun", "train.seed=1,2", *words, named, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = [RunRecord.read(tmp_path / "out" / f"run_{number}" / "record.json") for number in (0, 1)]
    assert [record.status for record in records] == ["completed"] * 2
    assert [record.config["train"]["seed"] for record in records] == [1, 2]
    again = run_distexp(*words, "hydra.sweep.subdir=run_0", cwd=tmp_path)
    assert again.returncode == 2
    assert "hydra.sweep.subdir=run_0 contains a run already" in again.stderr
    sweep_dir = again.stderr.rpartition("resume that run with distexp resume ")[2].strip()
    resumed = run_module("distexp.resume", sweep_dir, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "already completed" in resumed.stdout


def test_one_worker_has_no_communication(one_worker: tuple[Path, str]) -> None:
    run_dir, screen = one_worker
    found = RunRecord.read(run_dir / "record.json").metrics.communication
    assert found is not None
    assert (found["share"], found["by_collective"], found["note"]) == (0.0, {}, None)
    assert (run_dir / "profile" / "rank0.json.gz").stat().st_size > 1000
    # On a busy machine, a note about the disturbance takes the place of this row.
    assert "0% of the time of 1 profiled step, including" in screen or "communication," in screen
    assert "profiler_start" not in screen, "messages of the profiler are hidden"


def test_swept_keys_are_combined_with_each_cell_that_does_not_set_them(tmp_path: Path) -> None:
    cells = 'sweep.cells=[["strategy=ddp","train.seed=7"],["strategy=single"]]'
    swept = ("train.seed=1,2", "strategy=ddp,fsdp")
    overrides = ("--multirun", "precision=fp16", cells, *swept, *SHORT, f"hydra.sweep.dir={tmp_path}/out")
    done = run_distexp(*overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = [RunRecord.read(path) for path in sorted(tmp_path.glob("out/*/record.json"))]
    assert [record.status for record in records] == ["invalid"] * 3, "fp16 has no CPU kernels"
    assert [record.config["train"]["seed"] for record in records] == [7, 1, 2]
    assert [record.config["strategy"]["name"] for record in records] == ["ddp", "single", "single"]
    assert "warning: strategy=ddp,fsdp has no effect, because each cell of sweep.cells sets this key" in done.stderr


def test_a_preset_has_a_sweep_and_overrides_take_precedence(tmp_path: Path) -> None:
    overrides = ("experiment=deepspeed/zero_stages", "cluster.device=cpu")
    done = run_distexp(*overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    screen = " ".join(done.stdout.split())
    assert "needs GPUs, but this run is on cpu: add scale=tiny" in screen
    assert screen.count("runs 0, 1, 2, 3, 4, 5, 6, 7 invalid: ") == screen.count("needs GPUs, but") == 1
    assert "Samples/Second" not in screen, "a sweep of invalid cells has no exercise table"
    stages = [RunRecord.read(p).config["deepspeed"]["zero_stage"] for p in sorted(tmp_path.rglob("record.json"))]
    assert stages == [0, 0, 1, 1, 2, 2, 3, 3]
    narrowed = run_distexp(*overrides, "zero_stage=1,3", "offload=true", "hydra.sweep.dir=two", cwd=tmp_path)
    assert narrowed.returncode == 0, narrowed.stderr
    assert len(list(tmp_path.glob("two/*/record.json"))) == 2


@pytest.mark.slow
def test_a_custom_strategy_needs_a_yaml_file_and_a_module(tmp_path: Path) -> None:
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    (tmp_path / "conf" / "strategy" / "mine.yaml").write_text(
        "_target_: my_package.Mine\nname: mine\noptions: {bucket_mb: 7}\n"
    )
    (tmp_path / "my_package.py").write_text(CUSTOM_STRATEGY)
    overrides = ["--config-dir", "conf", "strategy=mine", "trusted_packages=[my_package]", *SHORT]
    overrides += ["model=gpt_tiny", "train.max_steps=2"]  # This model does not import transformers.
    script = Path(sys.executable).with_name("distexp")
    done = subprocess.run(
        [script, *overrides], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built = RunRecord.read(only_run(tmp_path) / "record.json").built
    assert built is not None
    assert (built.strategy, built.wrapper) == ("mine", "DistributedDataParallel")
    assert "buckets of 7 MB" in (only_run(tmp_path) / "logs" / "node0" / "rank0.log").read_text()


@pytest.mark.slow
def test_training_on_images_learns(tmp_path: Path) -> None:
    overrides = ("model=resnet_tiny", "dataset=tinyimagenet_sample", "strategy=ddp", "cluster.device=cpu")
    done = run_distexp(*overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    metrics = RunRecord.read(only_run(tmp_path) / "record.json").metrics
    assert max(metrics.eval_accuracies) > 0.5, "guessing gives 0.1"
    assert metrics.train_accuracies[-1] > metrics.train_accuracies[0]
    assert all(0 <= accuracy <= 1 for accuracy in metrics.train_accuracies)


@pytest.mark.slow
def test_training_on_official_squad_files(squad_files: DatasetConfig, tmp_path: Path) -> None:
    overrides = [
        "dataset=squad",
        f"dataset.train_path={squad_files.eval_path}",
        f"dataset.eval_path={squad_files.train_path}",
        "train.max_steps=3",
        "train.measure_after_step=1",
        "cluster.device=cpu",
    ]
    done = run_distexp(*overrides, "dataset.eval_size=16", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    record = RunRecord.read(only_run(tmp_path) / "record.json")
    assert record.metrics.steps_per_epoch == -(-810 // 16)
    assert "longer than dataset.max_length=512" in done.stdout


@pytest.mark.slow
def test_training_on_an_official_tinyimagenet_folder(tinyimagenet_folder: DatasetConfig, tmp_path: Path) -> None:
    overrides = [
        "model=resnet_tiny",
        "dataset=tinyimagenet",
        f"dataset.root={tinyimagenet_folder.root}",
        "strategy=ddp",
    ]
    small = ("train.max_steps=3", "train.measure_after_step=1", "dataset.eval_size=100", "cluster.device=cpu")
    done = run_distexp(*overrides, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    record = RunRecord.read(only_run(tmp_path) / "record.json")
    assert len(record.metrics.eval_accuracies) == 1
    assert record.metrics.steps_per_epoch == -(-2000 // 32)


def test_a_failed_run_reports_its_cause_and_exits_with_1(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"data": [{"paragraphs": 3}]}' + " " * MAX_CHECKED_BYTES)
    overrides = (
        "dataset=squad",
        f"dataset.train_path={broken}",
        f"dataset.eval_path={broken}",
        "cluster.device=cpu",
    )
    done = run_distexp(*overrides, cwd=tmp_path)
    assert done.returncode == 1
    record = RunRecord.read(only_run(tmp_path) / "record.json")
    assert record.status == "failed"
    assert record.error is not None
    assert str(broken) in record.error.message
    log = (only_run(tmp_path) / "logs" / "node0" / f"rank{record.error.rank}.log").read_text()
    assert f"ConfigError: {broken}" in log
    assert "TypeError: 'int' object is not iterable" in log, "the cause is printed too"
    assert "Traceback" not in log + done.stdout
    assert (record.error.phase, record.error.rank) in {("setup", 0), ("setup", 1)}
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "status", "cause"),
    [
        (BrokenPipeError(), "killed", "the program that read the output has ended, for example `head`"),
        (InterruptedRunError(signal.SIGTERM), "killed", "stopped by SIGTERM"),
        (OSError(5, "Input/output error", "/logs/x"), "failed", "the command failed: /logs/x: Input/output error"),
    ],
)
def test_what_stops_a_run_is_the_cause_in_its_record(
    error: BaseException, status: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(live: LiveRun) -> None:
        raise error

    monkeypatch.setattr(LiveRun, "refresh", stop)
    spec = make_spec("strategy=single", "cluster.device=cpu", "measure.enabled=false")
    with SharedStart() as shared_start, pytest.raises(type(error)):
        run_locally(spec, tmp_path, Screen(1, tmp_path), shared_start, LocalLauncher().agent_command)
    record = RunRecord.read(tmp_path / "record.json")
    assert record.error is not None
    assert (record.status, record.error.message) == (status, cause)


def test_a_launcher_without_a_command_is_the_cause_in_the_record(tmp_path: Path) -> None:
    spec = make_spec("strategy=single", "cluster.device=cpu", "measure.enabled=false")
    nothing: Any = lambda config, arguments: None  # noqa: E731
    with (
        SharedStart() as shared_start,
        pytest.raises(ConfigError, match=r"agent_command\(\) returned None instead of a"),
    ):
        run_locally(spec, tmp_path, Screen(1, tmp_path), shared_start, nothing)
    record = RunRecord.read(tmp_path / "record.json")
    assert record.error is not None
    assert record.error.message.endswith(
        f"launcher.LocalLauncher: agent_command() returned None instead of a list: return one, as in {PAGE}"
    )


def test_ctrl_c_while_the_record_is_written_is_not_lost() -> None:
    with handle_signals(signal.default_int_handler, signal.SIGINT):  # a test in the background ignores SIGINT
        with collect_interrupts() as late:
            signal.raise_signal(signal.SIGINT)
        assert late == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

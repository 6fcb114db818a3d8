"""What ``kernels=fast`` does with models that torch compiles only in part, not at all, or too slowly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distexp.config.schema import KernelsConfig
from distexp.resolve.compile_results import CompileResult, read_result, store_result
from distexp.resolve.run_id import run_id
from distexp.runs.events import read_phase_events
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import EVENTS, METRICS, RECORD
from distexp.system.files import read_entries
from tests.helpers.runs import HELPERS, make_spec, resolve_cell, run_distexp, run_ranks
from tests.helpers.toy_strategy import TOY

MODELS = "tests.helpers.uncompilable_models"
TRAINING = (
    *("dataset=squad_sample", "dataset.max_length=64", "dataset.train_size=64", "train.max_steps=3"),
    *("train.log_every=1", "train.evaluate=false", "cluster.device=cpu", *TOY),
)


class Trainings:
    """Trainings with one cache."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def run(self, *overrides: str, fails: bool = False) -> tuple[str, Path]:
        """Return the output and the folder of a training."""
        self.count += 1
        folder = self.folder / str(self.count)
        environment = {"DISTEXP_CACHE": str(self.folder / "cache")}
        done = run_distexp(*TRAINING, *overrides, f"hydra.run.dir={folder}", env=environment, timeout=300)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr, folder


@pytest.fixture
def trainings(tmp_path: Path) -> Trainings:
    return Trainings(tmp_path)


def losses(folder: Path) -> list[float]:
    """Return the loss of each step."""
    found = [entry["loss"] for entry in read_entries(folder / METRICS)]
    assert len(found) == 3
    return found


def has_tried(folder: Path) -> bool:
    """Return whether a run had trials."""
    return "compiling" in {event.phase for event in read_phase_events(folder / EVENTS)}


@pytest.mark.release
def test_a_model_that_is_no_graph_trains_with_compiled_blocks_and_the_next_run_knows_it(trainings: Trainings) -> None:
    model = ("model=gpt_tiny", f"model._target_={MODELS}.build_deciding", "cluster.workers_per_node=2")
    printed, first = trainings.run(*model, "strategy=compiling_ddp", "kernels=fast")
    line = "kernels=fast chose train.compile=blocks, because train.compile=model failed: Unsupported: Data-dependent"
    assert line in " ".join(printed.split())
    printed, second = trainings.run(*model, "strategy=compiling_ddp", "kernels=fast")
    assert line in " ".join(printed.split())
    assert [has_tried(folder) for folder in (first, second)] == [True, False]
    _, typed = trainings.run(*model, "strategy=compiling_ddp", "train.compile=blocks")
    assert losses(first) == losses(second) == losses(typed), "weights, data and dropout are those without a trial"
    records = [RunRecord.read(folder / RECORD) for folder in (first, second)]
    assert records[0].run.id == records[1].run.id
    for record in records:
        assert record.built is not None
        assert (record.built.compiled, record.config["train"]["compile"]) == ("blocks", "blocks")
        assert record.config["kernels"]["compile"] == "model"
        assert "Data-dependent" in record.config["kernels"]["compile_note"]
    printed, _ = trainings.run(*model, "strategy=compiling_ddp", "train.compile=model", fails=True)
    assert "Use train.compile=blocks, or kernels=fast" in " ".join(printed.replace("│", " ").split())


@pytest.mark.slow
def test_a_model_that_does_not_compile_trains_without(trainings: Trainings) -> None:
    model = ("model=gpt_tiny", f"model._target_={MODELS}.build_opaque", "cluster.workers_per_node=1")
    printed, first = trainings.run(*model, "strategy=compiling_single", "kernels=fast")
    line = "kernels=fast chose train.compile=false, because train.compile=blocks failed: TorchRuntimeError"
    assert line in " ".join(printed.split())
    _, second = trainings.run(*model, "strategy=compiling_single", "kernels=fast")
    assert [has_tried(folder) for folder in (first, second)] == [True, False]
    _, plain = trainings.run(*model, "strategy=single")
    assert losses(first) == losses(second) == losses(plain)


@pytest.mark.slow
def test_a_compilation_that_takes_too_long_ends_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path / "cache"))
    cell = ("model=gpt_tiny", "strategy=ddp", "cluster.workers_per_node=2", "train.compile=model")
    spec = make_spec(*TRAINING[: -len(TOY)], *cell)
    spec.config.kernels = KernelsConfig("fast", compile="model")  # as on GPUs
    run_dir = tmp_path / "run"
    (run_dir / "logs" / "node0").mkdir(parents=True)
    spec.write(run_dir)
    run_ranks(2, HELPERS / "impatient_ranks.py", str(run_dir))
    choices = [json.loads((run_dir / f"choice{rank}.json").read_text()) for rank in range(2)]
    assert choices == [[False, "train.compile=blocks failed: it was still compiling after 0 s"]] * 2
    stored = [read_result(spec.config, choice) for choice in ("model", "blocks")]
    assert [result.compiles for result in stored if result is not None] == [False, False]


def test_what_is_known_decides_for_the_architecture_and_not_for_a_typed_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path))
    gpus = ("kernels=fast", "cluster=slurm", "model=gpt_tiny", "cluster.workers_per_node=2")

    def compiled(*overrides: str) -> tuple[str, str]:
        config = resolve_cell(*gpus, *overrides)
        return config.train.compiled, config.kernels.compile_note

    first = resolve_cell(*gpus, "strategy=ddp")
    assert (first.train.compiled, first.kernels.compile) == ("model", "model")
    store_result(first, "model", CompileResult(False, "too many branches"))
    note = "train.compile=model failed: too many branches"
    assert compiled("strategy=ddp") == ("blocks", note)
    assert compiled("strategy=ddp", "train.micro_batch_size=2", "train.seed=3") == ("blocks", note)
    assert run_id(resolve_cell(*gpus, "strategy=ddp")) == run_id(first), "what compiles is no part of the training"
    assert compiled("strategy=ddp", "train.compile=model") == ("model", "")
    assert compiled("strategy=ddp", "model.num_layers=3") == ("model", "")
    assert compiled("sharding=full_shard") == ("blocks", "")
    store_result(first, "blocks", CompileResult(False, "no compiler"))
    assert compiled("strategy=ddp") == ("none", "train.compile=blocks failed: no compiler")
    assert compiled("sharding=full_shard") == ("none", "train.compile=blocks failed: no compiler")

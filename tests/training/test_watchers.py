"""Custom watchers (``measure.watchers``) in real trainings of two workers, with each trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.config import ConfigError
from distexp.measure.watcher import MeasuredSteps, Step, Watcher
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RANK_LOG
from distexp.training.watchers import Watchers, custom_watcher
from tests.helpers.runs import resolve_cell, run_distexp

NAME = "tests.helpers.watchers.Calls"
STEP = ["start_forward", "before_update"]
EXPECTED = [
    "follow", "start 0",
    "start_steps warmup", *STEP, "end_step 1 False True", "after_step 1",
    *STEP, "end_step 2 True False", "after_step 2",  # an evaluation follows
    "start_steps train", *STEP, "end_step 3 True True", "after_step 3",
    *STEP, "end_step 4 True False", "after_step 4", "stop",
]  # fmt: skip


def train(folder: Path, *overrides: str) -> RunRecord:
    """Train two epochs of two steps on two workers."""
    done = run_distexp(
        "model=gpt_tiny", "dataset=synthetic", "dataset.train_size=16", "dataset.eval_size=4", "dataset.max_length=16",
        "strategy=ddp", "cluster.workers_per_node=2", "cluster.device=cpu", "train.micro_batch_size=2",
        "train.gradient_accumulation_steps=2", "train.num_epochs=2", "train.measure_after_step=1",
        "trusted_packages=[tests]", f"measure.watchers=[{NAME},tests.helpers.watchers.Fails]",
        f"hydra.run.dir={folder}", *overrides,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return RunRecord.read(folder / "record.json")


@pytest.mark.parametrize("engine", ["native", "hf_trainer"])
def test_a_custom_watcher_sees_every_event_and_its_summary_is_in_the_record(engine: str, tmp_path: Path) -> None:
    record = train(tmp_path / "run", f"engine={engine}")
    found = record.metrics.watchers
    assert found is not None
    assert found.keys() == {NAME}, "the other one has no summary"
    assert found[NAME]["calls"] == [EXPECTED] * 2
    assert found[NAME]["steps"] == 3
    assert record.built is not None
    assert found[NAME]["elements"] == record.built.parameters
    log = RANK_LOG.path(tmp_path / "run", 0, 0).read_text()
    assert "note: tests.helpers.watchers.Fails has no summary: TypeError" in log
    assert record.memory["parts"][0]["activations_mib"] > 0
    assert record.metrics.slow_rank_watch == "on"
    assert len(record.metrics.step_times_by_rank or []) == 2


def test_code_of_a_package_that_is_not_trusted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"add trusted_packages=\[tests\] to allow code of that package"):
        resolve_cell("strategy=single", "cluster.device=cpu", f"measure.watchers=[{NAME}]")


def test_a_target_that_returns_no_watcher_is_named() -> None:
    with pytest.raises(ConfigError, match=r"measure.watchers: tests.helpers.watchers.not_a_watcher returned an object"):
        custom_watcher("tests.helpers.watchers.not_a_watcher")


def test_only_watchers_that_define_a_method_are_called() -> None:
    class Steps(Watcher):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def after_step(self, step: Step) -> None:
            self.seen.append(step.number)

    steps = Steps()
    watchers = Watchers([Watcher(), steps])
    watchers.start(0)
    watchers.after_step(Step(7, measured=True, next_measured=True))
    watchers.stop()
    assert steps.seen == [7]
    assert Watcher().summary(MeasuredSteps([], [], sizes_differ=False)) == {}

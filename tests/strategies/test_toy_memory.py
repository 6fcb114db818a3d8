"""What a strategy states about memory and advice: a toy strategy that only this file has is planned and explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from distexp.config import Config
from distexp.distributed.context import Context
from distexp.explain.__main__ import main as explain_command
from distexp.explain.explanation import explain
from distexp.launch.memory_check import predicted_change
from distexp.models.blueprint import Blueprint
from distexp.plan.estimate import CPU_ERROR_BOUND, make_estimate, reason_not_measured
from distexp.plan.fitting_change import candidate_overrides
from distexp.plan.planner import store_estimate
from distexp.runs.record import RunRecord
from distexp.runs.step_files import MicroBatchSearch
from distexp.strategies.base import DistributedModel, Strategy
from distexp.strategies.traits import Advice, CpuMemory, ProfiledStep
from distexp.worker.size_search import nothing_fits
from tests.helpers.planning import linear_estimate
from tests.helpers.printed_tables import printed, unwrapped
from tests.helpers.profiled_records import COMMUNICATION_BOUND, profiled
from tests.helpers.records import add_parts, record, write
from tests.helpers.runs import make_spec, resolve_cell, run_distexp, start_distexp

NOTE = "The toy keeps all gradients until it reduces them."


class Toy(Strategy):
    """Data parallelism that reduces all gradients in a few flat copies, one after the other."""

    cpu_memory: ClassVar[CpuMemory | None] = CpuMemory(50.0, reserve=1.0)
    setup_note: ClassVar[str] = "The toy needs memory during setup."

    def main_option(self, config: Config) -> str:
        """Return the number of copies."""
        return f"{config.strategy.options['copies']} copies"

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Require all workers."""
        workers = config.cluster.world_size
        return {"wrapper": "toy", "world_size": workers, "mesh": [workers, 1]}

    def setup(self, blueprint: Blueprint, config: Config, context: Context) -> DistributedModel:
        """Initialize the model, and reduce its gradients after the last micro-batch."""
        import torch
        import torch.distributed as dist

        from distexp.strategies.torch_model import Distribution, TorchModel

        model, copies = blueprint.model, config.strategy.options["copies"]
        blueprint.materialize(model)

        def reduce(gradients: list[torch.Tensor]) -> None:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient) / dist.get_world_size())

        @contextmanager
        def sync_context(last_micro: bool) -> Iterator[None]:
            yield
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            for start in range(copies if last_micro else 0):
                reduce(gradients[start::copies])

        def distribution() -> Distribution:
            return Distribution(wrapper="toy", mesh=[dist.get_world_size(), 1])

        return TorchModel(model, config, context, sync_context=sync_context, autocast=True, distribution=distribution)

    def keeps_states_whole(self, config: Config) -> bool | None:
        """Return true."""
        return True

    def smaller_states(self, config: Config, *, workers: int) -> tuple[str, ...]:
        """Return several smaller copies."""
        return ("strategy.options.copies=4",) if config.strategy.options["copies"] < 4 else ()

    def advice(self, bottleneck: str, step: ProfiledStep) -> Iterator[Advice]:
        """Yield more copies against any bottleneck."""
        if step.setting("strategy.options")["copies"] < 4:
            yield Advice("strategy.options.copies=4", f"the toy prefers them against {bottleneck}")

    def memory_note(self, config: Config) -> str:
        """Return the note of the report."""
        return NOTE


TOY = (
    *(f"strategy._target_={__name__}.Toy", "strategy.name=toy", "+strategy.options.copies=1"),
    *("trusted_packages=[tests]", "cluster.workers_per_node=2", "cluster.device=cpu"),
)
TINY = ("model=gpt_tiny", "train.micro_batch_size=8", "measure.enabled=false")
WIDE = (
    *("model=gpt", "model.hidden_size=512", "model.num_layers=4", "model.num_heads=8", "model.ff_dim=2048"),
    *("model.vocab_size=30000", "model.seq_length=64", "dataset.max_length=32", "train.micro_batch_size=2"),
    *("dataset=synthetic", "dataset.train_size=64", "dataset.eval_size=8"),
)


def test_its_options_are_among_the_changes_that_need_less_memory() -> None:
    config = resolve_cell(*TOY, *TINY)
    changes = list(candidate_overrides(config))
    assert ("strategy.options.copies=4",) in changes
    assert "strategy.options.copies=4" in changes[-1], "all together"
    assert not any("sharding=full_shard" in change for change in changes)
    assert "or choose strategy.options.copies=4 or train." in str(nothing_fits(config, MicroBatchSearch(None, [])))


def test_advice_after_running_out_of_memory_names_its_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path))
    config, smaller = (make_spec(*TOY, *TINY, f"strategy.options.copies={copies}").config for copies in (1, 4))
    store_estimate(smaller, linear_estimate(smaller))
    assert predicted_change(config, 20_000.0) == ["strategy.options.copies=4"]


def test_the_bounds_of_its_prediction_are_known() -> None:
    assert reason_not_measured(resolve_cell(*TOY, *TINY)) == ""
    found = make_estimate(resolve_cell(*TOY, *WIDE, "command=plan"))
    fewer = make_estimate(resolve_cell(*TOY, *WIDE, "command=plan", "strategy.options.copies=4"))
    assert found.traced
    assert found.error_bound is not None
    assert (found.host_mib or 0) > (fewer.host_mib or 0), "smaller copies"


def test_a_strategy_that_states_nothing_is_predicted_without_a_verdict() -> None:
    class Silent(Toy):
        cpu_memory = None

    config = resolve_cell(*TOY, *TINY)
    assert Silent().unmeasured_on_cpus(config) == "the memory of strategy=toy was not measured on CPUs"
    assert Strategy.smaller_states(Silent(), config, workers=2) == ("sharding=full_shard",)


def toy_record() -> RunRecord:
    """Return the record of a profiled run, as a run writes it."""
    found = profiled(COMMUNICATION_BOUND, number=1, strategy="toy", strategy__options={"copies": 1})
    spec = make_spec(*TOY, *TINY)
    found.config["strategy"]["_target_"] = spec.config.strategy._target_
    found.strategy = Toy().report_traits(spec.config)
    explained = explain(found, Toy())
    assert explained is not None
    found.metrics.explanation = explained.to_json()
    return found


def test_explanation_has_its_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = toy_record()
    assert explain(found).alternatives == [], "code that a record names is not run"  # type: ignore[union-attr]
    write(tmp_path, found)
    assert explain_command([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "try: strategy.options.copies=4\n" in out
    assert "  strategy.options.copies=4: the toy prefers them against exposed_communication\n" in out


def test_the_report_shows_its_label_and_its_notes() -> None:
    runs = [add_parts(record(0), parameters=0.1), add_parts(toy_record(), parameters=0.1)]
    for run in runs:
        run.memory["gpu"], run.metrics.total_steps = [], 30
        run.config["cluster"]["device"] = "cpu"
        run.memory["cpu"] = [{"node": 0, "peak_mib": 4300.0, "phases": {"setup": 4300.0, "train": 1400.0}}]
    text = unwrapped(printed(runs, width=200))
    assert "strategy=toy 1 copies" in text
    assert Toy.setup_note in text
    assert NOTE in text


@pytest.mark.slow
def test_a_run_of_it_is_predicted_explained_and_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # A peak of some milliseconds in a few steps: samples every half second can miss it on a busy machine.
    steps = ("train.measure_after_step=2", "train.profile_steps=2", "train.max_steps=8", "measure.interval_s=0.05")
    # Not a fork, which would share memory with the tests.
    done = start_distexp(*TOY, *WIDE, *steps, "plan=check", f"hydra.run.dir={run}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = RunRecord.read(run / "record.json")
    assert found.predicted is not None
    assert found.predicted.verdict == "fits"
    highest_mib = max(found.memory["cpu"][0]["phases"].values())
    assert found.predicted.host_peak_mib == pytest.approx(highest_mib, rel=CPU_ERROR_BOUND)
    assert found.strategy is not None
    assert (found.strategy.label, found.strategy.memory_note) == ("toy 1 copies", NOTE)
    assert found.metrics.explanation is not None
    assert "strategy.options.copies=4" in found.metrics.explanation["try"]
    run_distexp("report", str(tmp_path))
    assert NOTE in (tmp_path / "report" / "report.html").read_text()

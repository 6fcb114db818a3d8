"""Tests of the prediction of runs on CPUs, against measured runs and in the checks before a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distexp.config import Config, ConfigError
from distexp.launch.memory_check import predict_runs
from distexp.plan.estimate import CPU_ERROR_BOUND, Estimate, make_estimate, reason_not_measured, simulated_nodes
from distexp.plan.planner import cache_path
from distexp.plan.verdict import host_memory_mib
from tests.helpers.planning import FormulaPlanner, composed
from tests.helpers.runs import resolve_cell

CPU = ("cluster.device=cpu", "command=plan")
WIDE = (
    *("model=gpt", "model.hidden_size=512", "model.num_layers=4", "model.num_heads=8", "model.ff_dim=2048"),
    *("model.vocab_size=30000", "model.seq_length=64", "dataset.max_length=32", "train.micro_batch_size=2"),
    *("dataset=synthetic", "dataset.train_size=64"),
)
LONG = (
    *("model=gpt", "model.hidden_size=128", "model.num_layers=6", "model.num_heads=8", "model.ff_dim=512"),
    *("model.vocab_size=2000", "model.seq_length=256", "dataset.max_length=256", "train.micro_batch_size=16"),
    *("dataset=synthetic", "dataset.train_size=64"),
)


@pytest.mark.parametrize(
    ("overrides", "measured_mib"),
    [
        (("strategy=ddp", "cluster.workers_per_node=2"), 862),
        ((*WIDE, "strategy=single"), 1_520),
        ((*WIDE, "strategy=fsdp", "cluster.workers_per_node=2"), 2_544),
        ((*LONG, "strategy=ddp", "cluster.workers_per_node=2"), 1_655),
    ],
)
def test_error_is_within_its_bound(overrides: tuple[str, ...], measured_mib: float) -> None:
    """Compare with ``memory.cpu`` of runs; ``docs/results/plan.md`` has all of them."""
    found = make_estimate(resolve_cell(*CPU, *overrides))
    assert found.host_mib == pytest.approx(measured_mib, rel=CPU_ERROR_BOUND)
    assert (found.step_mib, found.peak_reserved_mib, found.on_cpu) == (found.host_mib, None, True)
    assert found.error_bound == max(CPU_ERROR_BOUND, round(200 / (found.host_mib or 1), 2))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("engine=hf_trainer", "engine=hf_trainer"),
        ("train.compile=blocks", "train.compile=blocks"),
        ("zero_stage=3", "zero_stage=3"),
        ("strategy=single", ""),
    ],
)
def test_only_measured_settings_get_a_verdict(override: str, reason: str) -> None:
    found = reason_not_measured(resolve_cell(*CPU, override))
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def needs_2_gb(config: Config) -> Estimate:
    """Return an estimate of 2 GiB per worker."""
    mib = 2_048.0 * config.cluster.world_size
    bound = None if reason_not_measured(config) else CPU_ERROR_BOUND
    return Estimate(
        peak_allocated_mib=2_000.0, step_mib=mib, host_mib=mib, phase="backward", error_bound=bound, on_cpu=True,
        notes=["no verdict: a reason"] if bound is None else [],
    )  # fmt: skip


def test_run_that_exceeds_the_memory_of_the_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ("cluster.device=cpu", "plan=check", "cluster.workers_per_node=2", "strategy=ddp")
    with composed([*shared, "plan.host_memory_gb=3"]) as (cells, make):
        with pytest.raises(
            ConfigError, match=r"the run needs 4\.0 GiB \(each worker: peak of 2\.0 GiB .*machine has 3\.0"
        ):
            predict_runs(cells, make, FormulaPlanner(needs_2_gb))
        assert "fewer workers, or a machine with more memory" in cells[0].errors[0]
    with composed([*shared, "plan.host_memory_gb=8"]) as (cells, make):
        predict_runs(cells, make, FormulaPlanner(needs_2_gb))
    predicted = cells[0].predicted
    assert predicted is not None
    assert (predicted.verdict, predicted.host_memory_mib, predicted.gpu_memory_mib) == ("fits", 8_192, None)
    assert capsys.readouterr().err == "distexp: searching for what fits\n"


def test_run_without_a_trusted_error_is_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ("cluster.device=cpu", "plan=check", "plan.host_memory_gb=1", "strategy=single", "engine=hf_trainer")
    with composed(shared) as (cells, make):
        predict_runs(cells, make, FormulaPlanner(needs_2_gb))
    assert cells[0].config is not None
    assert "it is not checked: no verdict: a reason" in capsys.readouterr().err


def test_memory_is_that_of_the_node() -> None:
    assert (host_memory_mib(resolve_cell(*CPU)) or 0) > 100, "that of this machine"
    slurm = ("cluster=slurm", "cluster.device=cpu", "command=plan")
    assert host_memory_mib(resolve_cell(*slurm)) is None
    assert host_memory_mib(resolve_cell(*slurm, "cluster.memory_gb=16")) == 16 * 1024
    assert simulated_nodes(resolve_cell(*CPU, "cluster.nodes=2", "strategy=ddp")) == 2
    assert simulated_nodes(resolve_cell(*slurm, "cluster.nodes=2", "strategy=ddp")) == 1


def test_cache_distinguishes_cpu_and_gpu() -> None:
    gpu = resolve_cell("command=plan", "strategy=single")
    cpu = resolve_cell(*CPU, "strategy=single", f"cluster.cpus_per_worker={gpu.cluster.cpus_per_worker}")
    assert cache_path(cpu) != cache_path(gpu)
    assert cache_path(cpu) == cache_path(replace(cpu))

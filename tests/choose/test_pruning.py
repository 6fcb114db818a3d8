"""Tests of the pruning by plan, with a memory that follows a formula, and of the order of the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from distexp.choose.axes import read_axes
from distexp.choose.candidate import Candidate, Objective, Status
from distexp.choose.predictions.pruning import prune_by_plan
from distexp.choose.predictions.rough_forecast import MachineSpeeds, Work, rough_step_s, set_forecasts
from distexp.choose.search import describe_no_winner
from distexp.choose.space import make_space
from distexp.config import Config
from distexp.plan.estimate import Estimate, node_peak_mib
from distexp.strategies.base import load_strategy
from tests.helpers.planning import composed
from tests.helpers.runs import resolve_cell

COMMAND = ("command=plan", "cluster.workers_per_node=2", "train.global_batch_size=32", "kernels=reference")
MIB_PER_GIB = 1024
STATES, SAMPLE = 8.0, 1.0


def needed_gb(config: Config) -> float:
    """Return the memory of a configuration: states by strategy, activations, and gradients that are added up."""
    shards = {"full_shard": 2.0, "shard_grad_op": 1.5}.get(config.fsdp.sharding or "", 1.0)
    states = STATES / (4.0 if config.offload.enabled else shards)
    sample = SAMPLE * (0.25 if config.train.activation_checkpointing else 1.0)
    return states + sample * int(config.train.micro_batch_size) + 0.1


def formula(config: Config) -> Estimate:
    needed = needed_gb(config) * MIB_PER_GIB
    activations = needed - (STATES / (4.0 if config.offload.enabled else 2.0)) * MIB_PER_GIB
    return Estimate(
        peak_allocated_mib=needed,
        step_mib=needed,
        parts={"parameters": needed - activations, "activations": activations},
        error_bound=0.02,
        flops=1e12,
        operations=100 * config.train.gradient_accumulation_steps + 50,
        optimizer_operations=50,
        written_mib=100.0,
    )


class Counted:
    """Estimates of the formula, with their number."""

    def __init__(self, estimate: Callable[[Config], Estimate | str] = formula) -> None:
        self.estimate, self.count = estimate, 0

    def __call__(self, configs: Sequence[Config]) -> list[Estimate | str]:
        self.count += len(configs)
        return [self.estimate(config) for config in configs]


SpaceOf = Callable[[float], list[Candidate]]


@pytest.fixture(scope="module", name="space_of")
def space_maker() -> SpaceOf:
    """Return the function that makes the candidates for the memory of a GPU in GB."""
    with composed(COMMAND) as ((cell,), make):
        space = ["strategy=ddp,fsdp", "sharding=full_shard,shard_grad_op", "train.activation_checkpointing=false,true"]
        whole = make_space(make, cell.overrides, (), read_axes(space, cell.overrides))

    def space_of(memory_gb: float) -> list[Candidate]:
        return [replace(candidate, config=with_memory(candidate.config, memory_gb)) for candidate in whole]

    return space_of


def with_memory(config: Config | None, memory_gb: float) -> Config:
    assert config is not None
    return replace(config, plan=replace(config.plan, gpu_memory_gb=memory_gb))


def prune(candidates: Sequence[Candidate], estimates: Counted, objective: Objective = Objective.THROUGHPUT) -> None:
    prune_by_plan(candidates, estimates, objective, at_a_time=2)


@pytest.mark.parametrize("memory_gb", [9.0, 12.5, 20.0, 80.0])
def test_few_predictions_decide_as_all_of_them_would(space_of: SpaceOf, memory_gb: float) -> None:
    candidates, estimates = space_of(memory_gb), Counted()
    prune(candidates, estimates)
    assert estimates.count <= len(candidates) * 0.4
    waiting = [candidate for candidate in candidates if candidate.status is Status.WAITING]
    assert waiting
    assert all(
        candidate.config and needed_gb(candidate.config) * 1.02 <= memory_gb
        for candidate in waiting
        if not candidate.too_close
    )
    assert all(candidate.config and needed_gb(candidate.config) * 0.98 <= memory_gb for candidate in waiting)
    slower = ("checkpointing is slower", "offloading is slower")
    for candidate in candidates:
        if candidate.status is Status.PRUNED and not candidate.reason.startswith(slower):
            assert candidate.config is not None
            assert needed_gb(candidate.config) * 0.98 > memory_gb
    assert any(candidate.reason.startswith(slower) for candidate in candidates)


@pytest.mark.parametrize("memory_gb", [9.0, 20.0, 80.0])
def test_a_machine_with_many_cores_decides_the_same_in_fewer_batches(space_of: SpaceOf, memory_gb: float) -> None:
    found, batches = [], []
    for at_a_time in (1, 64):
        candidates, sizes = space_of(memory_gb), list[int]()

        def estimate_all(configs: Sequence[Config], sizes: list[int] = sizes) -> list[Estimate | str]:
            sizes.append(len(configs))
            return [formula(config) for config in configs]

        prune_by_plan(candidates, estimate_all, Objective.THROUGHPUT, at_a_time=at_a_time)
        found.append([(candidate.status, candidate.too_close) for candidate in candidates])
        batches.append(len(sizes))
    assert found[0] == found[1]
    assert batches[1] <= 6
    assert batches[1] < batches[0] / 2


def test_accumulated_gradients_are_in_the_expected_memory_of_members_that_are_not_predicted(space_of: SpaceOf) -> None:
    gradients_mib = 2.0 * MIB_PER_GIB

    def accumulating(config: Config) -> Estimate:
        estimate = formula(config)
        sample = SAMPLE * (0.25 if config.train.activation_checkpointing else 1.0)
        parts = {"activations": sample * int(config.train.micro_batch_size) * MIB_PER_GIB}
        extra_mib = gradients_mib if config.train.gradient_accumulation_steps > 1 else 0.0
        return replace(estimate, parts=parts, peak_allocated_mib=(estimate.peak_allocated_mib or 0.0) + extra_mib)

    candidates = space_of(80.0)
    prune(candidates, Counted(accumulating))
    waiting = [candidate for candidate in candidates if candidate.status is Status.WAITING and candidate.config]
    assert any(candidate.estimate is None for candidate in waiting)
    for candidate in waiting:
        assert candidate.config is not None
        assert candidate.expected_mib == pytest.approx(accumulating(candidate.config).peak_allocated_mib)


def on_cpus(config: Config) -> Estimate:
    """Return the memory of both workers of a node, each with states of 1 GB and 1 GB for each sample."""
    step_mib = config.train.micro_batch * MIB_PER_GIB
    node_mib = node_peak_mib(config, MIB_PER_GIB, step_mib, parameters=0)
    return Estimate(
        peak_allocated_mib=MIB_PER_GIB + step_mib,
        step_mib=node_mib,
        host_mib=node_mib,
        parts={"parameters": MIB_PER_GIB, "activations": step_mib},
        error_bound=0.02,
        on_cpu=True,
    )


def test_on_cpus_the_tensors_of_all_workers_of_a_node_count(space_of: SpaceOf) -> None:
    cpus = [replace(candidate, config=on_a_node_of(candidate.config, memory_gb=6.0)) for candidate in space_of(80.0)]
    candidates = [candidate for candidate in cpus if candidate.family[0] == "strategy=ddp"]
    prune(candidates, Counted(on_cpus), Objective.MEMORY)
    waiting = [candidate for candidate in candidates if candidate.status is Status.WAITING]
    assert {candidate.micro_batch for candidate in waiting} == {1}
    for candidate in waiting:
        assert candidate.config is not None
        assert candidate.expected_mib == pytest.approx(on_cpus(candidate.config).host_mib)
    large = [replace(candidate, config=on_a_node_of(candidate.config, memory_gb=80.0)) for candidate in space_of(80.0)]
    prune(large, Counted(on_cpus), Objective.MEMORY)
    assert any(candidate.estimate is None for candidate in large)
    for candidate in large:
        assert candidate.config is not None
        assert candidate.expected_mib == pytest.approx(on_cpus(candidate.config).host_mib)


def test_on_cpus_ddp_is_not_left_out_because_fsdp_does_not_fit(space_of: SpaceOf) -> None:
    """FSDP keeps more of the tensors of each step there."""

    def more_for_fsdp(config: Config) -> Estimate:
        needed = (8.0 if config.strategy.name == "fsdp" else 3.0) * MIB_PER_GIB
        return Estimate(
            peak_allocated_mib=needed, step_mib=needed, host_mib=needed, on_cpu=True, error_bound=0.1,
            parts={"parameters": needed - 1, "activations": 1.0},
        )  # fmt: skip

    candidates = [
        replace(candidate, config=on_a_node_of(candidate.config, memory_gb=4.0)) for candidate in space_of(80.0)
    ]
    prune(candidates, Counted(more_for_fsdp))
    waiting = {candidate.family[0] for candidate in candidates if candidate.status is Status.WAITING}
    assert waiting == {"strategy=ddp"}


def on_a_node_of(config: Config | None, memory_gb: float) -> Config:
    assert config is not None
    cluster, plan = replace(config.cluster, device="cpu"), replace(config.plan, host_memory_gb=memory_gb)
    return replace(config, cluster=cluster, plan=plan)


def test_offloading_stays_if_nothing_fits_without(space_of: SpaceOf) -> None:
    candidates = space_of(3.6)
    prune(candidates, Counted())
    waiting = [candidate for candidate in candidates if candidate.status is Status.WAITING]
    assert waiting
    assert all(candidate.config and candidate.config.offload.enabled for candidate in waiting)


def test_for_memory_nothing_is_pruned_because_it_is_slower(space_of: SpaceOf) -> None:
    candidates = space_of(80.0)
    prune(candidates, Counted(), Objective.MEMORY)
    assert {candidate.status for candidate in candidates} == {Status.WAITING}
    least = min(candidates, key=lambda each: each.expected_mib or 0.0)
    assert least.config is not None
    assert needed_gb(least.config) == min(needed_gb(candidate.config) for candidate in candidates if candidate.config)


def test_if_nothing_fits_the_nearest_configuration_is_known(space_of: SpaceOf) -> None:
    candidates = space_of(1.0)
    prune(candidates, Counted())
    assert {candidate.status for candidate in candidates} == {Status.PRUNED}
    assert "the nearest one is" in (text := describe_no_winner(candidates))
    assert "offload=true" in text
    assert "train.micro_batch_size=1," in text
    assert "it fits on t4-16gb and larger" in text


def test_an_error_of_all_predictions_is_printed_and_ends_them(space_of: SpaceOf) -> None:
    candidates, missing, reports = space_of(12.0), Counted(lambda config: "no such file"), []
    prune_by_plan(candidates, missing, Objective.THROUGHPUT, at_a_time=2, report=reports.append)
    assert missing.count == 4
    assert reports == ["all of the first 4 predictions failed: no such file"]

    untraced, reports = Counted(lambda config: Estimate(notes=[f"not traced: {config.kernels.name}"])), []
    prune_by_plan(space_of(12.0), untraced, Objective.THROUGHPUT, at_a_time=2, report=reports.append)
    assert untraced.count <= 8
    assert {text.partition("failed: ")[2] for text in reports} <= {"not traced: reference", "not traced: fast"}

    def without_fsdp(config: Config) -> Estimate | str:
        return "cannot be traced" if config.strategy.name == "fsdp" else formula(config)

    candidates, some, reports = space_of(12.0), Counted(without_fsdp), []
    prune_by_plan(candidates, some, Objective.THROUGHPUT, at_a_time=2, report=reports.append)
    assert some.count > 4
    failed = sum(candidate.reason.endswith("cannot be traced") for candidate in candidates)
    assert reports[-1].endswith("failed: cannot be traced")
    assert failed > 0


def test_what_cannot_be_predicted_or_is_late_stays(space_of: SpaceOf) -> None:
    candidates = space_of(12.0)
    prune(candidates, Counted(lambda config: "no such file"))
    assert {candidate.status for candidate in candidates} == {Status.WAITING}
    assert candidates[0].reason == "its memory is not predicted: no such file"
    candidates, reports = space_of(12.0), []
    ticks = iter(range(100))
    prune_by_plan(
        candidates,
        Counted(),
        Objective.THROUGHPUT,
        at_a_time=1,
        limit_s=3,
        report=reports.append,
        clock=lambda: next(ticks),
    )
    assert reports[-1].startswith("time limit of the predictions reached after 2 configurations: the memory of")


def test_members_without_an_estimate_get_the_forecast_of_their_family(space_of: SpaceOf) -> None:
    candidates = space_of(80.0)
    prune(candidates, Counted())
    set_forecasts(
        candidates,
        lambda config: MachineSpeeds(
            tflops=100.0, memory_gb_per_s=1000.0, link_gb_per_s=100.0, network_gb_per_s=20.0, launch_s=1e-3
        ),
    )
    family = [
        candidate
        for candidate in candidates
        if candidate.family[0] == "strategy=ddp" and candidate.forecast_s is not None
    ]
    config = family[0].config
    assert config is not None
    times = {
        candidate.micro_batch: candidate.forecast_s or 0.0 for candidate in family if candidate.status is Status.WAITING
    }
    assert sorted(times) == [1, 2, 4, 8, 16]
    assert times[1] > times[2] > times[16]  # launches of each micro-batch
    assert times[1] - times[2] == pytest.approx(load_strategy(config).launch_factor(config) * 8 * 100 * 1e-3, rel=0.1)


WORK = Work(flops=1e13, operations=1000, written_bytes=1e9, parameters=1e9)
FAST, SLOW_LINK = (MachineSpeeds(100.0, 2000.0, link, network_gb_per_s=20.0) for link in (200.0, 5.0))
LAUNCHES = MachineSpeeds(1000.0, 2000.0, 200.0, network_gb_per_s=20.0, launch_s=1e-3)
ACCUMULATED = "train.gradient_accumulation_steps=8"
TWO = ("cluster.workers_per_node=2", "cluster.device=cpu", "precision=bf16")


@pytest.mark.parametrize(
    ("better", "worse", "speeds"),
    [
        (("strategy=ddp",), ("sharding=full_shard", ACCUMULATED), SLOW_LINK),
        (("sharding=shard_grad_op",), ("sharding=full_shard",), SLOW_LINK),
        (("zero_stage=1", ACCUMULATED), ("zero_stage=3", ACCUMULATED), FAST),
        (("sharding=shard_grad_op", ACCUMULATED), ("zero_stage=2", ACCUMULATED), SLOW_LINK),
        (("sharding=full_shard", "offload=true"), ("zero_stage=3", "offload=true"), LAUNCHES),
        (("zero_stage=2",), ("zero_stage=2", "offload=true"), FAST),
        (("sharding=full_shard",), ("sharding=full_shard", ACCUMULATED), FAST),
        (("strategy=ddp",), ("zero_stage=2",), LAUNCHES),
        (("zero_stage=2",), ("sharding=full_shard",), LAUNCHES),
        (("sharding=full_shard",), ("zero_stage=3",), LAUNCHES),
    ],
)
def test_the_forecast_orders_what_the_strategies_send(
    better: Sequence[str], worse: Sequence[str], speeds: MachineSpeeds
) -> None:
    first, second = (rough_step_s(resolve_cell(*TWO, *overrides), WORK, speeds) for overrides in (better, worse))
    assert first < second


def test_the_reserve_of_a_large_micro_batch_does_not_prune_a_small_one(space_of: SpaceOf) -> None:
    """With 16 samples the allocator needs 6 GB more than is allocated. With 2 samples it does not."""

    def with_reserve(config: Config) -> Estimate:
        estimate = formula(config)
        reserve = 6.0 * MIB_PER_GIB if config.train.micro_batch == 16 else 0.0
        return replace(estimate, step_mib=(estimate.step_mib or 0.0) + reserve)

    candidates = space_of(10.5)
    prune(candidates, Counted(with_reserve))
    ddp = [each for each in candidates if each.status is Status.WAITING and each.family[0] == "strategy=ddp"]
    assert 2 in {each.micro_batch for each in ddp}

"""Tests of the search on synthetic machines, compared with trying every candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, cycle, repeat
from typing import Any

import pytest

from distexp.choose.candidate import DEFAULT_RULES, Candidate, Objective, Status, Trial, rules_for
from distexp.choose.policy import Policy
from distexp.choose.ranking import PlannedTrial, SearchResult, margin_between, ranked
from distexp.choose.search import first_trials, prune_untried, search
from distexp.runs.record_sections import Predicted
from tests.helpers.landscapes import Landscape

SEEDS = 20
CHECKPOINT = "train.activation_checkpointing=true"


def run_search(machine: Landscape, objective: Objective = Objective.THROUGHPUT, **options: Any) -> SearchResult:
    return search(machine.candidates, machine.run, objective, **options)


@pytest.mark.parametrize(
    ("objective", "conditions"),
    [
        (Objective.THROUGHPUT, {}),
        (Objective.THROUGHPUT, {"noise": 0.1, "start_s": 20.0}),
        (Objective.ENERGY, {"hidden_limit": 34.0}),
        (Objective.THROUGHPUT, {"limit": 24.0, "forecast_error": 0.0}),
        (Objective.THROUGHPUT, {"forecast_error": 0.35}),
    ],
    ids=["usual", "noise and slow starts", "energy with cliffs", "small memory", "forecasts as on CPUs"],
)
def test_the_winner_is_within_5_percent_of_the_best_for_a_quarter_of_the_cost(
    objective: Objective, conditions: dict[str, float]
) -> None:
    rules = rules_for(on_cpus=conditions.get("forecast_error", 0.0) > 0.3)
    good = 0
    for seed in range(SEEDS):
        machine = Landscape(seed, **conditions)  # type: ignore[arg-type]
        found = run_search(machine, objective, rules=rules)
        assert found.winner is not None
        good += machine.regret(found.winner, objective) <= 0.05 and found.gpu_seconds <= machine.exhaustive_gpu_s() / 4
    assert good >= 0.95 * SEEDS


def test_without_forecasts_every_family_is_tried() -> None:
    machine = Landscape(8)
    for candidate in machine.candidates:
        candidate.forecast_s = None
    found = run_search(machine)
    assert found.winner is not None
    assert machine.regret(found.winner, Objective.THROUGHPUT) <= 0.05
    tried = {candidate.family for candidate in found.candidates if candidate.trials}
    assert tried == {candidate.family for candidate in machine.runnable()}


def test_every_candidate_ends_with_a_status_and_a_reason() -> None:
    machine = Landscape(1, hidden_limit=30.0)
    found = run_search(machine)
    assert {candidate.status for candidate in found.candidates} == {Status.PRUNED, Status.TRIED, Status.FAILED}
    assert all(candidate.reason for candidate in found.candidates if candidate.status is not Status.TRIED)
    assert found.gpu_seconds == pytest.approx(
        sum(t.gpu_seconds for candidate in found.candidates for t in candidate.trials)
    )
    ran_out = [candidate for candidate in found.candidates if candidate.status is Status.FAILED]
    larger = [candidate for candidate in found.candidates for failed in ran_out if candidate.family == failed.family]
    assert all(candidate.status is not Status.TRIED or candidate.micro_batch < failed.micro_batch for failed in ran_out
               for candidate in larger if candidate.family == failed.family)  # fmt: skip


def test_the_same_trials_give_the_same_search() -> None:
    first, second = Landscape(3), Landscape(3)
    results = run_search(first), run_search(second)
    order = [
        [(trial.candidate.overrides, trial.steps) for rung in found.rungs for trial in rung.trials] for found in results
    ]
    assert order[0] == order[1]


def test_close_finalists_are_repeated_with_more_steps_in_both_orders() -> None:
    candidates = [Candidate((name,), (name,), 1) for name in ("a=1", "a=2")]
    seconds = {candidates[0]: cycle((1.0, 1.1)), candidates[1]: cycle((1.02, 1.08))}

    def run(batch: Sequence[PlannedTrial]) -> list[Trial]:
        return [Trial(each.steps, "completed", samples_per_second=1 / next(seconds[each.candidate])) for each in batch]

    found = search(candidates, run, Objective.THROUGHPUT)
    finalists = [rung for rung in found.rungs if rung.name == "finalists"]
    assert len(finalists[0].trials) == 1, "the best one is repeated first"
    first, second = [rung for rung in finalists if len(rung.trials) == 2][:2]
    assert [trial.candidate for trial in first.trials] == [trial.candidate for trial in second.trials][::-1]
    assert first.trials[0].steps > found.rungs[0].trials[0].steps
    margin = margin_between(*ranked(found.candidates, Objective.THROUGHPUT)[:2], Objective.THROUGHPUT)
    assert margin is not None
    assert margin.interval is not None
    assert 0 <= margin.value < 1
    assert 0 < margin.interval[1] - margin.value < 0.2


def test_on_a_busy_machine_the_winner_was_repeated() -> None:
    """Equal trials differ by a factor of 2 to 3, so the best of all short trials is always a lucky one."""
    for seed in range(SEEDS):
        found = run_search(Landscape(seed, trial_noise=0.4))
        assert found.winner is not None
        assert not found.stopped
        assert len(found.winner.completed) > 1
        assert found.winner.longest_steps == max(each.longest_steps for each in found.candidates)


def test_a_lucky_trial_is_repeated_before_its_candidate_can_win() -> None:
    """The finalists are slower when they are repeated. Then the best candidate that was tried once is repeated."""
    speeds = {
        "a=1": chain((9.0,), repeat(3.0)), "a=2": chain((8.0,), repeat(3.0)), "a=3": repeat(6.0), "a=4": repeat(0.1),
    }  # fmt: skip

    def run(batch: Sequence[PlannedTrial]) -> list[Trial]:
        return [
            Trial(each.steps, "completed", samples_per_second=next(speeds[each.candidate.overrides[0]]))
            for each in batch
        ]

    found = search([Candidate((name,), (name,), 1) for name in speeds], run, Objective.THROUGHPUT)
    assert found.winner is not None
    assert found.winner.overrides == ("a=3",)
    repeats = {each.overrides[0]: len(each.trials) - 1 for each in found.candidates}
    assert min(repeats[name] for name in ("a=1", "a=2", "a=3")) >= 1
    assert repeats["a=4"] == 0


def test_a_winner_by_a_wide_margin_is_repeated_once_and_the_others_are_not() -> None:
    speeds = {"a=1": 9.0, "a=2": 7.0, "a=3": 6.0}

    def run(batch: Sequence[PlannedTrial]) -> list[Trial]:
        return [
            Trial(each.steps, "completed", samples_per_second=speeds[each.candidate.overrides[0]]) for each in batch
        ]

    found = search([Candidate((name,), (name,), 1) for name in speeds], run, Objective.THROUGHPUT)
    assert {each.overrides[0]: [trial.steps for trial in each.trials] for each in found.candidates} == {
        "a=1": [5, 10], "a=2": [5], "a=3": [5],
    }  # fmt: skip


def members(strategy: str, seconds: dict[int, float], forecasts: dict[int, float]) -> dict[Candidate, float]:
    """Return the members of a family by micro-batch, with their step times."""
    made = {}
    for size, step_s in seconds.items():
        candidate = Candidate(
            (strategy, f"train.micro_batch_size={size}"), (strategy,), size, forecast_s=forecasts[size]
        )
        made[candidate] = step_s
    return made


def search_steps(steps_s: dict[Candidate, float]) -> SearchResult:
    def run(batch: Sequence[PlannedTrial]) -> list[Trial]:
        return [Trial(each.steps, "completed", samples_per_second=64 / steps_s[each.candidate]) for each in batch]

    return search(list(steps_s), run, Objective.THROUGHPUT)


def test_the_measured_curve_of_one_family_leaves_out_micro_batches_of_another() -> None:
    """The forecasts are equal for all micro-batches. The first family measures that 8 is slower than 16."""
    flat = dict.fromkeys((8, 16), 1.0)
    first = members("strategy=ddp", {8: 1.5, 16: 1.0}, {8: 0.9, 16: 0.9})
    second = members("sharding=full_shard", {8: 1.55, 16: 1.03}, flat)
    found = search_steps({**first, **second})
    assert [len(each.trials) > 0 for each in first] == [True, True]
    assert [len(each.trials) > 0 for each in second] == [False, True]
    assert found.winner is list(first)[1]


def test_a_trial_that_contradicts_its_forecast_is_repeated_before_its_family_is_left_out() -> None:
    """The first trial of the best family runs next to other programs, which make it 8 times slower."""
    slow = members("strategy=ddp", {16: 1.6, 32: 1.5}, {16: 1.5, 32: 1.6})
    fast = members("strategy=single", {16: 1.0, 32: 0.9}, {16: 1.0, 32: 1.1})
    seconds = {**slow, **fast}
    disturbed = next(iter(fast))

    def run(batch: Sequence[PlannedTrial]) -> list[Trial]:
        factors = [8.0 if each.candidate is disturbed and not each.candidate.trials else 1.0 for each in batch]
        return [
            Trial(each.steps, "completed", samples_per_second=64 / factor / seconds[each.candidate])
            for each, factor in zip(batch, factors, strict=True)
        ]

    found = search(list(seconds), run, Objective.THROUGHPUT)
    assert found.winner is list(fast)[1]
    assert [trial.disturbed for trial in disturbed.trials[:2]] == [True, False]
    assert disturbed.score(Objective.THROUGHPUT) == pytest.approx(1 / 64)
    assert all(not trial.disturbed for each in slow for trial in each.trials)


def test_checkpointing_is_not_tried_if_its_forecast_is_worse_than_the_same_kernels_without() -> None:
    without = members("strategy=ddp", {16: 1.0}, {16: 1.0})
    with_it = {
        Candidate((*each.overrides, CHECKPOINT), (*each.family, CHECKPOINT), 32, forecast_s=1.3): 1.3
        for each in without
    }
    other = members("sharding=full_shard", {16: 1.2}, {16: 1.1})
    found = search_steps({**without, **with_it, **other})
    tried = {each.family for each in found.candidates if each.trials}
    assert tried == {("strategy=ddp",), ("sharding=full_shard",)}


def near_the_limit(strategy: str, size: int, forecast: float, required_mib: float = 990.0) -> Candidate:
    """Return a candidate that probably fits, on a GPU with 1,000 MiB."""
    found = Candidate((strategy, f"train.micro_batch_size={size}"), (strategy,), size, forecast_s=forecast)
    found.too_close, found.predicted = True, Predicted(required_mib=required_mib, gpu_memory_mib=1_000.0)
    return found


def test_a_member_near_the_limit_does_not_hide_another_one_of_its_family() -> None:
    """It is forecast to be slower than the best one, so its risk is not worth it. The other one has no risk."""
    first = members("strategy=ddp", {16: 1.0}, {16: 1.0})
    second = members("sharding=full_shard", {16: 0.85}, {16: 1.02})
    found = search_steps({**first, **second, near_the_limit("sharding=full_shard", 32, 1.01): 0.9})
    assert found.winner is next(iter(second))


def test_the_first_trial_is_the_best_forecast_that_certainly_fits() -> None:
    first = members("strategy=ddp", {16: 1.02}, {16: 1.02})
    slow = members("zero_stage=3", {16: 2.0}, {16: 2.0})
    near = near_the_limit("strategy=ddp", 32, 1.0)
    steps_s = {**first, near: 1.0, **slow}
    assert [each.candidate for each in first_trials(list(steps_s), Objective.THROUGHPUT)] == [*first, *slow]
    found = search_steps(steps_s)
    assert found.winner is near
    assert [each.trials for each in slow] == [()]


def test_a_family_that_probably_fits_is_tried_before_slower_ones() -> None:
    first = members("strategy=ddp", {16: 1.0}, {16: 1.0})
    slower = members("sharding=full_shard", {16: 1.1}, {16: 1.1})
    near = near_the_limit("strategy=single", 8, 0.95)
    found = search_steps({**first, near: 0.7, **slower})
    assert found.winner is near
    assert [each.trials for each in slower] == [()]


@pytest.mark.parametrize("on_slurm", [False, True])
def test_of_members_near_the_limit_those_that_probably_fit_are_tried(*, on_slurm: bool) -> None:
    """No member fits for certain. The larger ones have better forecasts, and probably do not fit."""
    steps_s: dict[Candidate, float] = {}
    for strategy in ("strategy=ddp", "sharding=full_shard", "zero_stage=1", "zero_stage=2"):
        steps_s[near_the_limit(strategy, 8, 1.0, required_mib=950.0)] = 1.0
        steps_s[near_the_limit(strategy, 16, 0.95, required_mib=1_040.0)] = 0.95

    def run(batch: Sequence[PlannedTrial]) -> list[Trial]:
        return [Trial(each.steps, "completed", samples_per_second=64 / steps_s[each.candidate]) for each in batch]

    found = search(list(steps_s), run, Objective.THROUGHPUT, rules=rules_for(on_slurm=on_slurm))
    assert {each.micro_batch for each in found.candidates if each.trials} == {8}


@pytest.mark.parametrize("zero_trial", [0, 1])
def test_a_counter_that_does_not_advance_does_not_end_a_search(zero_trial: int) -> None:
    """The best configuration has an energy of 0 in its first trial, or in its repeat."""
    best, other = (
        next(iter(members(strategy, {8: 1.0}, {8: forecast})))
        for strategy, forecast in (("zero_stage=2", 0.9), ("strategy=ddp", 1.0))
    )
    energies = {best: iter([0.0, 9.0, 9.0] if zero_trial == 0 else [9.0, 0.0, 9.0]), other: repeat(10.0)}

    def run(batch: Sequence[PlannedTrial]) -> list[Trial]:
        measured = [next(energies[each.candidate]) for each in batch]
        return [Trial(5, "completed", step_s=0.5, samples_per_second=128.0, j_per_sample=each) for each in measured]

    found = search([best, other], run, Objective.ENERGY)
    assert found.winner is (other if zero_trial == 0 else best)
    not_advanced = "its measured value is 0: the counter did not advance in so short a run"
    assert best.reason == (not_advanced if zero_trial == 0 else "")


def test_the_reason_of_a_faster_forecast_is_the_memory() -> None:
    tried = members("strategy=ddp", {16: 1.0}, {16: 1.0})
    near = near_the_limit("sharding=full_shard", 16, 0.97, required_mib=1_010.0)
    found = search_steps({**tried, near: 1.0})
    assert near.reason == "not tried: it probably does not fit"
    assert found.winner is next(iter(tried))


@pytest.mark.parametrize("forecast", [0.997, 1.001])
def test_the_reason_of_an_equal_forecast_shows_no_ratio(forecast: float) -> None:
    tried = members("strategy=ddp", {16: 1.0}, {16: 1.0})
    other = members("sharding=full_shard", {16: 1.0}, {16: forecast})
    for candidate in tried:
        candidate.status, candidate.trials = Status.TRIED, (Trial(5, "completed", samples_per_second=64.0),)
    prune_untried(Policy([*tried, *other], Objective.THROUGHPUT, DEFAULT_RULES), stopped="")
    assert [each.reason for each in other] == ["not tried: its forecast needs as much time as the best"]


@pytest.mark.parametrize(("forecast", "shown"), [(1.02, "1.02"), (1.26, "1.3"), (3.0, "3.0")])
def test_the_reason_of_a_slightly_slower_forecast_shows_that_it_is_slower(forecast: float, shown: str) -> None:
    tried = members("strategy=ddp", {16: 1.0}, {16: 1.0})
    other = members("sharding=full_shard", {16: 1.0}, {16: forecast})
    for candidate in tried:
        candidate.status, candidate.trials = Status.TRIED, (Trial(5, "completed", samples_per_second=64.0),)
    prune_untried(Policy([*tried, *other], Objective.THROUGHPUT, DEFAULT_RULES), stopped="")
    assert [each.reason for each in other] == [f"not tried: its forecast is {shown} times the time of the best"]


def test_the_time_of_launches_is_not_expected_of_larger_micro_batches() -> None:
    """Only a small micro-batch fits without checkpointing, and is slow because of its launches. The forecast is not."""
    without = members("strategy=single", {4: 1.65}, {4: 1.0})
    with_it = {
        Candidate((*family, f"train.micro_batch_size={size}"), family, size, forecast_s=1.25): step_s
        for family in [("strategy=single", CHECKPOINT)]
        for size, step_s in {32: 1.2, 64: 1.15}.items()
    }
    seconds = {**without, **with_it}

    def run(batch: Sequence[PlannedTrial]) -> list[Trial]:
        times = [seconds[each.candidate] for each in batch]
        return [
            Trial(each.steps, "completed", step_s=step_s, samples_per_second=64 / step_s)
            for each, step_s in zip(batch, times, strict=True)
        ]

    found = search(list(seconds), run, Objective.THROUGHPUT)
    assert found.winner is list(with_it)[1]


def test_launches_do_not_change_the_expected_memory() -> None:
    known = Candidate(("a=1",), ("a",), 4, expected_mib=100.0, forecast_s=1.0, status=Status.TRIED)
    known.trials = (Trial(5, "completed", step_s=2.0, peak_allocated_mib=110.0, samples_per_second=32.0),)
    other = Candidate(("a=2",), ("a",), 64, expected_mib=200.0, forecast_s=0.5)
    assert Policy([known, other], Objective.MEMORY, DEFAULT_RULES).scaled_forecast(other) == pytest.approx(220.0)
    assert Policy([known, other], Objective.THROUGHPUT, DEFAULT_RULES).scaled_forecast(other) == pytest.approx(
        0.5 / 32 * (1 + 4 / 64) / 2
    )


def test_trials_of_a_batch_are_in_the_order_of_what_they_can_share() -> None:
    found = run_search(Landscape(5))
    for rung in found.rungs:
        keys = [
            (candidate.workers, candidate.family[0].startswith("zero_stage"))
            for candidate in (trial.candidate for trial in rung.trials)
        ]
        assert rung.name == "finalists" or keys == sorted(keys)


def test_the_search_stops_at_its_budget_with_the_best_so_far() -> None:
    whole = run_search(Landscape(2))
    machine = Landscape(2)
    found = run_search(machine, budget_gpu_s=whole.gpu_seconds / 3)
    assert "the budget of" in found.stopped
    assert found.winner is not None
    assert found.gpu_seconds < whole.gpu_seconds / 2
    assert any("the budget of" in candidate.reason for candidate in found.candidates)


def test_a_search_leaves_the_reserved_part_of_its_budget() -> None:
    part = run_search(Landscape(2)).gpu_seconds / 3
    small = run_search(Landscape(2), budget_gpu_s=part)
    found = run_search(Landscape(2), budget_gpu_s=2 * part, reserved_gpu_s=lambda: part)
    assert found.gpu_seconds == small.gpu_seconds
    assert found.stopped == (
        f"the budget of {2 * part:,.0f} GPU-seconds (of which {part:,.0f} for the check of the losses) "
        "allows no further trial"
    )


def test_a_check_that_needs_more_than_the_budget_is_no_part_of_it() -> None:
    found = run_search(Landscape(2), budget_gpu_s=6.0, reserved_gpu_s=lambda: 21.0)
    assert found.stopped == (
        "the budget of 6 GPU-seconds (the check of the losses alone needs about 21) allows no further trial"
    )


def test_trials_that_fail_in_the_middle_do_not_end_the_search() -> None:
    machine = Landscape(4)

    def run(batch: Sequence[PlannedTrial]) -> list[Trial]:
        trials = machine.run(batch)
        broken = ["kernels=fast" in planned.candidate.family for planned in batch]
        return [
            replace(trial, status="failed", step_s=None, samples_per_second=None, error="no compiler") if bad else trial
            for bad, trial in zip(broken, trials, strict=True)
        ]

    found = search(machine.candidates, run, Objective.THROUGHPUT)
    assert found.winner is not None
    assert "kernels=fast" not in found.winner.family
    works = [candidate for candidate in machine.runnable() if "kernels=fast" not in candidate.family]
    assert machine.true_s[found.winner] <= 1.05 * min(machine.true_s[candidate] for candidate in works)
    failed = [candidate for candidate in found.candidates if candidate.status is Status.FAILED]
    assert {candidate.reason for candidate in failed} == {"no compiler"}
    families = [candidate.family for candidate in failed]
    assert max(families.count(family) for family in families) <= 2


@pytest.mark.parametrize("seed", range(5))
def test_an_error_of_all_candidates_ends_the_search_after_few_trials(seed: int) -> None:
    """For example a data set that cannot be read."""
    machine = Landscape(seed)

    def run(batch: Sequence[PlannedTrial]) -> list[Trial]:
        return [Trial(planned.steps, "failed", error="no data set", gpu_seconds=2.0) for planned in batch]

    found = search(machine.candidates, run, Objective.THROUGHPUT)
    assert sum(len(candidate.trials) for candidate in found.candidates) <= 3
    assert found.statement == "no trial completed: no data set"
    assert {candidate.status for candidate in machine.runnable()} == {Status.FAILED, Status.PRUNED}


COMPILE_ERROR = (
    "train.compile=model needs a model that torch compiles as one graph, but Unsupported: Data-dependent branching. "
    "Use train.compile=blocks, or kernels=fast without train.compile, which tries what compiles"
)


@pytest.mark.parametrize(
    ("error", "most_failures"), [(COMPILE_ERROR, 1), ("InductorError: no kernel at 0x7f{} for rank {} of /tmp/{}", 2)]
)
def test_a_failed_option_removes_its_relatives_and_does_not_hide_its_strategies(error: str, most_failures: int) -> None:
    machine = Landscape(3, noise=0.0)
    for candidate in machine.candidates:  # The kernels of the machine are what is compiled.
        compiled = "model" if "kernels=fast" in candidate.family else "blocks"
        family = [text if not text.startswith("kernels=") else f"train.compile={compiled}" for text in candidate.family]
        candidate.family = tuple(family)
        candidate.overrides = (*family, f"train.micro_batch_size={candidate.micro_batch}")
    failures: list[Candidate] = []

    def try_all(batch: Sequence[PlannedTrial]) -> list[Trial]:
        trials = machine.run(batch)
        for position, planned in enumerate(batch):
            if "train.compile=model" in planned.candidate.overrides:
                failures.append(planned.candidate)
                count = len(failures)
                trials[position] = Trial(planned.steps, "failed", error=error.format(count, count, count))
        return trials

    found = search(machine.candidates, try_all, Objective.THROUGHPUT)
    assert 1 <= len(failures) <= most_failures
    working = [each for each in machine.runnable() if "train.compile=blocks" in each.overrides]
    assert found.winner is not None
    best = min(machine.true_s[each] for each in working)
    assert machine.true_s[found.winner] <= 1.05 * best
    failed_strategy = failures[0].family[0]
    siblings = [each for each in working if each.family[0] == failed_strategy]
    assert any(each.completed for each in siblings), "its other options are tried"
    removed = [each for each in machine.candidates if "failed in another trial" in each.reason]
    assert removed
    assert all("train.compile=model" in each.overrides for each in removed)


def test_different_errors_do_not_end_the_search() -> None:
    """Each batch but the second one has several trials, which a cluster runs at the same time."""
    machine, batches = Landscape(2), []

    def run(batch: Sequence[PlannedTrial]) -> list[Trial]:
        batches.append(len(batch))
        return [Trial(each.steps, "failed", error=f"no record in {id(each)}", gpu_seconds=2.0) for each in batch]

    found = search(machine.candidates, run, Objective.THROUGHPUT, rules=rules_for(on_slurm=True))
    assert batches[:3] == [1, 1, 4]
    tried = {candidate.family for candidate in found.candidates if candidate.trials}
    assert tried == {candidate.family for candidate in machine.runnable()}


@pytest.mark.parametrize("broken", ["kernels=fast", "workers=2", "strategy=single", "zero_stage", "sharding"])
def test_an_error_of_one_setting_does_not_end_the_search(broken: str) -> None:
    machine = Landscape(3)

    def run(batch: Sequence[PlannedTrial]) -> list[Trial]:
        trials = zip(batch, machine.run(batch), strict=True)
        return [
            Trial(each.steps, "failed", error="not supported")
            if any(name.startswith(broken) for name in planned.candidate.family)
            else each
            for planned, each in trials
        ]

    found = search(machine.candidates, run, Objective.THROUGHPUT)
    assert found.winner is not None
    works = [
        candidate for candidate in machine.runnable() if not any(name.startswith(broken) for name in candidate.family)
    ]
    assert machine.true_s[found.winner] <= 1.05 * min(machine.true_s[candidate] for candidate in works)


def test_the_objective_needs_its_metric() -> None:
    found = run_search(Landscape(0), Objective.COST)
    assert found.winner is None
    assert "set cluster.price_per_gpu_hour" in found.statement


def test_the_lowest_memory_wins_without_repeats() -> None:
    machine = Landscape(6)
    found = run_search(machine, Objective.MEMORY)
    assert found.winner is not None
    assert machine.regret(found.winner, Objective.MEMORY) == 0
    assert {rung.name for rung in found.rungs} <= {"families", "neighbors"}


def test_if_nothing_fits_the_statement_names_the_nearest_configuration() -> None:
    def pruned(name: str, required: float) -> Candidate:
        predicted = Predicted(required_mib=required, most_mib=required * 1.05, gpu_memory_mib=24_000.0)
        each = Candidate((name,), (name,), 1, predicted=predicted)
        each.prune("does not fit")
        return each

    found = search([pruned("a=1", 60_000.0), pruned("b=1", 36_000.0)], lambda batch: [], Objective.THROUGHPUT)
    assert found.winner is None
    assert found.statement == (
        "no candidate fits into the memory; the nearest one is b=1, which needs 35.2 GiB of 23.4 GiB: it fits on "
        "a100-40gb and larger"
    )


def test_if_every_trial_fails_for_another_reason_no_other_memory_is_proposed() -> None:
    predicted = Predicted(required_mib=9_000.0, most_mib=9_500.0, gpu_memory_mib=24_000.0)
    candidate = Candidate(("a=1",), ("a=1",), 1, predicted=predicted)
    found = search([candidate], lambda batch: [Trial(5, "failed", error="no compiler")], Objective.THROUGHPUT)
    assert found.statement == "no trial completed: no compiler"


def test_a_candidate_that_is_not_certain_to_fit_is_tried_after_the_others() -> None:
    machine = Landscape(7)
    best = min(machine.runnable(), key=lambda each: each.forecast_s or 0.0)
    for candidate in machine.candidates:
        candidate.too_close = candidate.family == best.family
    order = first_trials(machine.candidates, Objective.THROUGHPUT)
    assert order[-1].candidate is best

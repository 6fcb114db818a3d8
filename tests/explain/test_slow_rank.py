"""A rank that is slower than the others, and what it spends the time on."""

from __future__ import annotations

import pytest

from tests.helpers.profiled_records import GPU, explanation, profiled, with_memory


def test_waiting_names_the_slow_rank_and_its_part() -> None:
    slow = {"matmul": 50.0, "data_wait": 42.0, "exposed_communication": 8.0}
    fast = {"matmul": 50.0, "data_wait": 2.0, "waiting": 40.0, "exposed_communication": 8.0}
    run = profiled(fast, slow, fast, fast, **GPU)
    run.environment.cpu_count = 32  # type: ignore[union-attr]
    bottleneck, share, sentence, alternatives = explanation(run)
    assert (bottleneck, share) == ("waiting", 0.3)
    assert "the ranks wait for rank 1 for 30% of the step" in sentence
    assert "it spends 40.0 ms more than the others on waiting for its data" in sentence
    assert alternatives == ["dataset.num_workers=2"]
    busy = {**slow, "data_wait": 2.0, "host": 40.0}
    bottleneck, _, sentence, alternatives = explanation(profiled(fast, busy, fast, fast, **GPU))
    assert (bottleneck, alternatives) == ("waiting", [])
    assert "on work of its CPU" in sentence
    launching = {**slow, "data_wait": 2.0, "launch_idle": 40.0}
    run = with_memory(profiled(fast, launching, fast, fast, train__micro_batch_size=2, **GPU), 20_000)
    assert "on launching kernels" in explanation(run).sentence
    assert explanation(run).alternatives == ["train.micro_batch_size=4", "kernels=fast"]
    turns = {"matmul": 60.0, "waiting": 40.0}
    assert "no single rank is the cause" in explanation(profiled(turns, turns, **GPU)).sentence


AHEAD = {"matmul": 15.0, "launch_idle": 5.0, "waiting": 75.0, "exposed_communication": 5.0}
BEHIND = {"matmul": 15.0, "launch_idle": 70.0, "optimizer": 10.0, "exposed_communication": 5.0}


@pytest.mark.parametrize(
    ("parts", "busy_ms", "excess"),
    [
        (BEHIND, (135.0, 150.0), None),
        (BEHIND, (150.0, 148.0), None),
        (BEHIND, (115.0, 150.0), "23.3 ms more than the others on launching kernels"),
        (BEHIND, (15.0, 150.0), "65.0 ms more than the others on launching kernels"),
        (BEHIND, (None, 150.0), "up to 65.0 ms more than the others on launching kernels"),
        (BEHIND, (135.0, None), "up to 65.0 ms more than the others on launching kernels"),
        ({**BEHIND, "launch_idle": 20.0, "host": 50.0}, (135.0, 150.0), "50.0 ms more than the others on work of"),
    ],
    ids=["as slow", "busier", "slower CPU", "much slower CPU", "unknown", "slowest unknown", "other work of the CPU"],
)
def test_a_rank_is_slow_only_if_its_cpu_is(
    parts: dict[str, float], busy_ms: tuple[float | None, float | None], excess: str | None
) -> None:
    """A step takes 100 ms, and 150 ms with the profiler. The GPU of rank 0 waits for rank 1 for 75 ms.

    If the CPU of rank 1 works for 35 of the 150 ms longer, this is 23.3 % of a step: 23.3 ms. No rank is slower by more
    than the difference of launch idle, 65 ms.
    """
    run = with_memory(profiled(AHEAD, parts, train__micro_batch_size=2, **GPU), 20_000)
    assert run.metrics.step_breakdown is not None
    for entry, busy in zip(run.metrics.step_breakdown, busy_ms, strict=True):
        entry |= {"profiled_step_ms": 150.0, "cpu_busy_ms": busy}
    found = explanation(run)
    if excess is not None:
        assert found.bottleneck == "waiting"
        assert f"the ranks wait for rank 1 for 38% of the step, because it spends {excess}" in found.sentence
        return
    assert found.bottleneck == "launch_idle"
    assert (found.share, found.sentence, found.alternatives) == (
        0.7,
        "Launch-bound: the GPU of rank 1 is idle for 70% of the step, because the CPU launches 4,000 kernels per "
        "micro-batch too slowly. The other ranks are as slow, but ahead: their GPUs wait in collectives.",
        ["train.micro_batch_size=8", "kernels=fast"],
    )


@pytest.mark.parametrize(
    ("without_core_ms", "cause"),
    [
        ((2.0, 27.0), "it waited 25.0 ms longer for a free CPU core than the others: other programs may have used it"),
        ((2.0, 3.0), "it spends 40.0 ms more than the others on waiting for its data"),
        ((None, 27.0), "it spends 40.0 ms more than the others on waiting for its data"),
    ],
    ids=["disturbed", "slow", "unknown"],
)
def test_a_rank_whose_core_other_programs_use_is_not_called_slow(
    without_core_ms: tuple[float | None, float], cause: str
) -> None:
    slow, fast = {"matmul": 60.0, "data_wait": 40.0}, {"matmul": 60.0, "waiting": 40.0}
    run = profiled(fast, slow, peak=None)
    run.environment.cpu_count = 32  # type: ignore[union-attr]
    assert run.metrics.step_breakdown is not None
    for entry, time in zip(run.metrics.step_breakdown, without_core_ms, strict=True):
        entry["without_core_ms"] = time
    found = explanation(run)
    assert f"ranks wait for rank 1 for 20% of the step, because {cause}" in found.sentence
    assert found.alternatives == ([] if "CPU core" in cause else ["dataset.num_workers=2"])


def test_busy_cores_are_reported_with_any_bottleneck() -> None:
    run = profiled({"matmul": 80.0, "other_kernels": 20.0}, peak=None)
    assert run.metrics.step_breakdown is not None
    assert "free CPU core" not in explanation(run).sentence
    run.metrics.step_breakdown[0]["without_core_ms"] = 9.0
    assert "free CPU core" not in explanation(run).sentence
    run.metrics.step_breakdown[0]["without_core_ms"] = 45.0
    assert explanation(run).sentence == (
        "Compute-bound: matrix kernels take 80% and other kernels 20% of the step. For 45% of the step the ranks had "
        "to wait for a free CPU core. This waiting is part of every time in the table. Profile again when no other "
        "program runs."
    )

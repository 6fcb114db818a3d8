"""Time and counts of compilations."""

from __future__ import annotations

import torch

from distexp.measure.watcher import CompileWatch, MeasuredSteps

NO_STEPS = MeasuredSteps([], [], sizes_differ=False)


def test_compilations_are_timed_and_counted() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: (x * 2).sum(), backend="eager", dynamic=False)
    watch = CompileWatch(enabled=True)
    watch.start(0)
    for length in (3, 3, 4):
        compiled(torch.ones(length))
    watch.stop()
    summary = watch.summary(NO_STEPS)["compile"]
    assert summary["graphs"] == 2
    assert summary["recompilations"] == 1
    assert summary["seconds"] > 0
    assert summary["cuda_graph_skips"] == summary["cache_hits"] == 0
    compiled(torch.ones(5))
    assert watch.recompilations == 1, "it counts after its end"


def test_nothing_is_reported_if_nothing_is_compiled() -> None:
    watch = CompileWatch(enabled=False)
    watch.start(0)
    assert watch.summary(NO_STEPS) == {}

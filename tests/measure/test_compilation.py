"""Time and counts of compilations."""

from __future__ import annotations

import torch

from distexp.measure.compilation import CompileWatch


def test_compilations_are_timed_and_counted() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: (x * 2).sum(), backend="eager", dynamic=False)
    watch = CompileWatch(enabled=True)
    watch.start()
    for length in (3, 3, 4):
        compiled(torch.ones(length))
    summary = watch.summary()
    assert summary is not None
    assert summary["graphs"] == 2
    assert summary["recompilations"] == 1
    assert summary["seconds"] > 0
    assert summary["cuda_graph_skips"] == summary["cache_hits"] == 0
    compiled(torch.ones(5))
    assert watch.recompilations == 1, "it counts after its end"


def test_nothing_is_reported_if_nothing_is_compiled() -> None:
    watch = CompileWatch(enabled=False)
    watch.start()
    assert watch.summary() is None

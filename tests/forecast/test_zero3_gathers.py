"""Tests of the all-gathers of ZeRO-3: counted by hand, and those of the memory model, which hooks real modules."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distexp.forecast.communication import plan_communication
from distexp.forecast.profiled_run import assign_waits
from distexp.forecast.simulate import dependencies
from distexp.plan.trace.zero3_fetcher import Fetcher, Receiver
from distexp.runs.step_files import BACKWARD, FORWARD, OPTIMIZER, Collective, Item, Parameters, Segment, StepModel
from distexp.strategies.zero.ds_communication import Gather, ZeroCommunication, ZeroOptions, gathers_of_micro_batch

ELEMENTS = (100, 2, 40, 60, 2, 40, 60, 100)
"""Parameters of an embedding, two blocks with norm, attention and MLP, and a head."""
MODULES = tuple((position,) for position in range(len(ELEMENTS)))
OPTIONS = ZeroOptions(
    reduce_bucket_size=150,
    stage3_prefetch_bucket_size=100,
    stage3_param_persistence_threshold=10,
    stage3_max_live_parameters=200,
    stage3_max_reuse_distance=50,
)


def test_gathers_of_two_blocks() -> None:
    """The norms are never gathered. The head and the MLP before it are kept for the backward pass."""
    assert gathers_of_micro_batch(MODULES, ELEMENTS, OPTIONS) == [
        Gather(position=0, elements=100, used_at=0),  # embedding
        Gather(position=0, elements=100, used_at=2),  # ahead: attention and MLP of the first block
        Gather(position=1, elements=100, used_at=5),  # ahead, after the embedding is free: the second block
        Gather(position=3, elements=100, used_at=7),  # ahead: head
        Gather(position=6, elements=40, used_at=10),  # ahead: attention of the second block, for the backward pass
        Gather(position=9, elements=100, used_at=12),  # ahead: the first block
        Gather(position=10, elements=100, used_at=15),  # ahead: embedding
    ]


def test_without_a_prefetch_bucket_each_module_is_gathered_in_both_passes() -> None:
    options = ZeroOptions(
        stage3_prefetch_bucket_size=0, stage3_param_persistence_threshold=10, stage3_max_reuse_distance=0
    )
    found = gathers_of_micro_batch(MODULES, ELEMENTS, options)
    large = [position for position, size in enumerate(ELEMENTS) if size > 10]
    expected = [*large, *(15 - position for position in reversed(large))]
    assert [(gather.position, gather.used_at) for gather in found] == [(position, position) for position in expected]


@pytest.mark.parametrize("threshold", [100, 1000])
def test_a_model_of_persistent_parameters_gathers_nothing(threshold: int) -> None:
    assert gathers_of_micro_batch(MODULES, ELEMENTS, ZeroOptions(stage3_param_persistence_threshold=threshold)) == []


def plan() -> tuple[Item, ...]:
    """Return the step of one worker with the collectives of several; a segment for each module."""
    passes: list[Item] = [
        Segment(phase, 0, 0.001, float(size), float(size), float(size))
        for phase, sizes in ((FORWARD, ELEMENTS), (BACKWARD, ELEMENTS[::-1]))
        for size in sizes
    ]
    items = (*passes, Segment(OPTIMIZER, 0, 0.001, 1.0, 1.0, 1.0))
    settings = ZeroCommunication(stage=3, zero=OPTIONS, weight_bytes=2, gradient_bytes=2)
    units = (Parameters("all", ELEMENTS),)
    model = StepModel(True, 1, 1, 1, 1.0, ((1.0,),), items, units, modules=MODULES)
    return assign_waits(plan_communication(items, model, settings, micro_batches=1), settings, on_gpu=True)


def test_the_step_has_the_gathers_the_buckets_and_the_persistent_parameters() -> None:
    found = [item for item in plan() if isinstance(item, Collective)]
    gathers = [(item.phase, item.bytes) for item in found if item.kind == "all_gather"]
    assert gathers[:7] == [(FORWARD, 200)] * 4 + [(FORWARD, 80)] + [(BACKWARD, 200)] * 2
    assert gathers[7:] == [(OPTIMIZER, 4)] * 2  # the norms, after their update
    # 100 + 60 exceed 150; 60 + 40 + 2 fit, and so do 60 + 40 + 2 more
    scatters = [item.bytes for item in found if item.kind == "reduce_scatter"]
    assert scatters == [200, 204, 204, 200]
    assert {item.awaited for item in found if item.kind == "reduce_scatter"} == {OPTIMIZER}, "stage 3 overlaps"
    assert [item.after_compute for item in found if item.kind == "all_gather"] == [False] * 7 + [True] * 2


def test_a_module_waits_for_its_own_gather() -> None:
    items = plan()
    segments = [position for position, item in enumerate(items) if isinstance(item, Segment)]
    waits: dict[int, list[int]] = {}
    for position, collectives in dependencies(items).items():
        found = [items[index] for index in collectives]
        gathers = [one for one in found if isinstance(one, Collective) and one.kind == "all_gather"]
        if gathers:
            waits[segments.index(position) if position in segments else -1] = [one.bytes or 0 for one in gathers]
    assert waits == {0: [200], 2: [200], 5: [200], 7: [200], 10: [80], 12: [200], 15: [200], -1: [4, 4]}


class Block(nn.Module):
    """A norm and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus that of two layers."""
        return x + self.second(self.first(self.norm(x)).relu())


def model(*, tied: bool) -> nn.Module:
    """Return an embedding, two blocks, a norm and a head, which may have the weight of the embedding."""
    width, words = 16, 100
    embedding, head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
    if tied:
        head.weight = embedding.weight
    return nn.Sequential(embedding, Block(width), Block(width), nn.LayerNorm(width), head)


def gathers_of_hooks(module: nn.Module, options: ZeroOptions) -> list[int]:
    """Return the elements of the gathers of the memory model in the third micro-batch. The first one has no order."""
    parameters = list(module.parameters())
    threshold = options.stage3_param_persistence_threshold
    buffers: Any = SimpleNamespace(on_gpu=lambda elements, dtype, part: torch.empty(elements, dtype=dtype))
    receiver = Receiver(buffers, torch.float32, world_size=2, offloads=False, stream=torch.cpu.Stream())
    persistent = {parameter: None for parameter in parameters if parameter.numel() <= threshold}
    order = {parameter: number for number, parameter in enumerate(parameters)}
    names = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
    found: list[int] = []

    class Recorder(Fetcher):
        def _gather(self, needed: Iterable[nn.Parameter]) -> None:
            chosen = list(needed)
            if chosen:
                found.append(sum(parameter.numel() for parameter in chosen))
            super()._gather(chosen)

    fetcher = Recorder(
        receiver, persistent, order, {"zero_optimization": {name: getattr(options, name) for name in names}}
    )
    fetcher.hook(module)
    for micro_batch in range(3):
        found.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")  # of the embedding
            module(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
        if micro_batch == 0:  # an update
            fetcher.release_all()
            fetcher.gather_persistent()
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefetch", [0, 500, 2000])
@pytest.mark.parametrize("live", [1600, 3000, 100_000])
@pytest.mark.parametrize("reuse", [0, 1600, 100_000])
def test_gathers_are_those_of_the_memory_model(tied: bool, prefetch: int, live: int, reuse: int) -> None:
    options = ZeroOptions(
        stage3_prefetch_bucket_size=prefetch,
        stage3_param_persistence_threshold=50,
        stage3_max_live_parameters=live,
        stage3_max_reuse_distance=reuse,
    )
    module = model(tied=tied)
    positions = {parameter: position for position, parameter in enumerate(module.parameters())}
    modules = [[positions[parameter] for parameter in one.parameters(recurse=False)] for one in module.modules()]
    elements = [parameter.numel() for parameter in positions]
    expected = gathers_of_hooks(module, options)
    found = gathers_of_micro_batch([params for params in modules if params], elements, options)
    assert [gather.elements for gather in found] == expected
    assert expected

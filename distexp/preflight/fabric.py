"""How fast the workers talk to each other: collectives over growing sizes, as nccl-tests measures them.

``algbw`` is the size over the time; ``busbw`` is that times a factor of the collective and the number of
ranks, so that it compares with what the links can carry (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from distexp.measure.clock import synchronize

SIZES = tuple(4**power * 1024 for power in range(12))
"""Bytes: 1 KiB to 4 GiB."""

BUDGET_S = 10.0
"""Of one size; slow links get fewer rounds, and say so."""

Operation = Callable[[], object]


@dataclass(frozen=True)
class Group:
    """Ranks that are measured together."""

    name: str  # "all", "node 0", "nodes 0-1"
    ranks: list[int]
    process_group: dist.ProcessGroup | None  # None on a rank outside


@dataclass(frozen=True)
class Rounds:
    """How often one size is run before it is timed, and while it is."""

    warmup: int
    timed: int


@dataclass(frozen=True)
class Measurement:
    """One collective at one size."""

    group: str
    operation: str
    ranks: int
    bytes: int
    rounds: int
    seconds: float  # of one round, of the slowest rank
    algbw_gbps: float  # GB/s, 1e9 bytes
    busbw_gbps: float
    correct: bool


def groups(rank: int, nodes: int, per_node: int) -> list[Group]:
    """All ranks; each node's own; and one rank of each node, where there are several of both."""
    world = list(range(nodes * per_node))
    wanted = [("all", world)]
    if nodes > 1 and per_node > 1:
        wanted += [(f"node {node}", world[node * per_node : (node + 1) * per_node]) for node in range(nodes)]
        wanted.append(("across nodes", world[::per_node]))
    made = []
    for name, ranks in wanted:
        group = dist.new_group(ranks)  # every rank takes part in making each
        made.append(Group(name, ranks, group if rank in ranks else None))
    return made


def measure(group: Group, device: torch.device, *, max_bytes: int, warmup: int, rounds: int) -> Iterator[Measurement]:
    """Every collective at every size, on the ranks of a group."""
    assert group.process_group is not None
    for size in (size for size in SIZES if size <= max_bytes):
        for name in OPERATIONS:
            yield _measure_one(group, name, size, device, Rounds(warmup, rounds))
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure_one(group: Group, name: str, size: int, device: torch.device, wanted: Rounds) -> Measurement:
    ranks, process_group = len(group.ranks), group.process_group
    elements = max(1, size // 4 // ranks) * ranks
    prepare, factor = OPERATIONS[name]
    run, check = prepare(elements, group, device)
    run()
    correct = check()
    once = _slowest(_timed(run, 1, device), device, process_group)
    fitting = max(1, min(wanted.timed, int(BUDGET_S / max(once, 1e-9))))
    _timed(run, min(wanted.warmup, fitting), device)
    dist.barrier(process_group)
    seconds = _slowest(_timed(run, fitting, device) / fitting, device, process_group)
    wrong = torch.tensor(0 if correct else 1, device=device)
    dist.all_reduce(wrong, group=process_group)
    algbw = elements * 4 / seconds / 1e9
    return Measurement(
        group=group.name,
        operation=name,
        ranks=ranks,
        bytes=elements * 4,
        rounds=fitting,
        seconds=seconds,
        algbw_gbps=algbw,
        busbw_gbps=algbw * factor(ranks),
        correct=wrong.item() == 0,
    )


def _timed(run: Operation, rounds: int, device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    for _ in range(rounds):
        run()
    synchronize(device)
    return time.perf_counter() - started


def _slowest(seconds: float, device: torch.device, group: dist.ProcessGroup | None) -> float:
    worst = torch.tensor(seconds, device=device, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return float(worst.item())


Prepared = tuple[Operation, Callable[[], bool]]


def _position(group: Group) -> int:
    return group.ranks.index(dist.get_rank())


def _all_reduce(elements: int, group: Group, device: torch.device) -> Prepared:
    buffer = torch.full((elements,), _position(group) + 1.0, device=device)

    def check() -> bool:
        ranks = len(group.ranks)
        good = _holds(buffer, ranks * (ranks + 1) / 2)
        buffer.zero_()  # what follows adds up and must not overflow
        return good

    return lambda: dist.all_reduce(buffer, group=group.process_group), check


def _all_gather(elements: int, group: Group, device: torch.device) -> Prepared:
    part = elements // len(group.ranks)
    source = torch.full((part,), _position(group) + 1.0, device=device)
    target = torch.empty(elements, device=device)

    def check() -> bool:
        return all(_holds(chunk, index + 1.0) for index, chunk in enumerate(target.view(-1, part)))

    return lambda: dist.all_gather_into_tensor(target, source, group=group.process_group), check


def _reduce_scatter(elements: int, group: Group, device: torch.device) -> Prepared:
    part = elements // len(group.ranks)
    source = torch.full((elements,), _position(group) + 1.0, device=device)
    target = torch.empty(part, device=device)
    ranks = len(group.ranks)
    return (
        lambda: dist.reduce_scatter_tensor(target, source, group=group.process_group),
        lambda: _holds(target, ranks * (ranks + 1) / 2),
    )


def _send_receive(elements: int, group: Group, device: torch.device) -> Prepared:
    """Each rank sends to the next one and receives from the one before, at once."""
    ranks, here = group.ranks, _position(group)
    after, before = ranks[(here + 1) % len(ranks)], ranks[here - 1]
    source = torch.full((elements,), here + 1.0, device=device)
    target = torch.empty(elements, device=device)

    def run() -> None:
        wanted = [
            dist.P2POp(dist.isend, source, after, group.process_group),
            dist.P2POp(dist.irecv, target, before, group.process_group),
        ]
        for work in dist.batch_isend_irecv(wanted):
            work.wait()

    return run, lambda: _holds(target, (here - 1) % len(ranks) + 1.0)


def _holds(tensor: Tensor, value: float) -> bool:
    # Two reductions instead of a comparison: 4 GiB of booleans would be another buffer.
    return tensor.min().item() == value == tensor.max().item()


OPERATIONS: dict[str, tuple[Callable[[int, Group, torch.device], Prepared], Callable[[int], float]]] = {
    "all_reduce": (_all_reduce, lambda ranks: 2 * (ranks - 1) / ranks),
    "all_gather": (_all_gather, lambda ranks: (ranks - 1) / ranks),
    "reduce_scatter": (_reduce_scatter, lambda ranks: (ranks - 1) / ranks),
    "send_receive": (_send_receive, lambda ranks: 1.0),
}


def host_copies(device: torch.device, size: int = 2**30, rounds: int = 5) -> dict[str, float]:
    """GB/s between page-locked host memory and a GPU, each way; nothing to measure on a CPU."""
    if device.type != "cuda":
        return {}
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    ways = {"host_to_device": (there, host), "device_to_host": (host, there)}
    rates = {}
    for name, (target, source) in ways.items():
        copy = partial(target.copy_, source, non_blocking=True)
        copy()
        seconds = _timed(copy, rounds, device)
        rates[f"{name}_gbps"] = size * rounds / seconds / 1e9
    return rates

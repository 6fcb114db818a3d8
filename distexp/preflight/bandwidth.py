"""Bandwidth of collectives between workers, for a range of sizes, with the definitions of nccl-tests.

``algbw`` is the size divided by the time. ``busbw`` is ``algbw`` times a factor that depends on the collective and
the number of ranks. It can be compared with the bandwidth of the links (nccl-tests, doc/PERFORMANCE.md).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distexp.measure.clock import synchronize

SIZES = tuple(4**power * 1024 for power in range(12))  # bytes: 1 KiB to 4 GiB
TIME_LIMIT_S = 10.0  # for one size of one collective; slow links get fewer rounds, and the result has their number

Operation = Callable[[], object]


@dataclass(frozen=True)
class Group:
    """Ranks that communicate in one measurement."""

    name: str  # "all", "node 0", "across nodes"
    ranks: list[int]
    process_group: dist.ProcessGroup | None  # None on ranks outside the group


Measurement = dict[str, Any]  # bandwidth of one collective at one size, as in ``preflight.json``


def make_groups(rank: int, nodes: int, per_node: int) -> list[Group]:
    """Create the groups to measure, on every rank: all ranks and, if they differ, those of a node and one per node."""
    world = list(range(nodes * per_node))
    members = [("all", world)]
    if nodes > 1 and per_node > 1:
        members += [(f"node {node}", world[node * per_node : (node + 1) * per_node]) for node in range(nodes)]
        members.append(("across nodes", world[::per_node]))
    groups = [dist.new_group(ranks) for _, ranks in members]
    pairs = zip(members, groups, strict=True)
    return [Group(name, ranks, group if rank in ranks else None) for (name, ranks), group in pairs]


def measure(group: Group, device: torch.device, *, max_bytes: int, warmup: int, rounds: int) -> Iterator[Measurement]:
    """Measure every collective at every size, on the ranks of a group, which contains this rank."""
    assert group.process_group is not None
    for size in (size for size in SIZES if size <= max_bytes):
        for name in OPERATIONS:
            yield _measure_one(group, name, size, device, warmup=warmup, rounds=rounds)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure_one(group: Group, name: str, size: int, device: torch.device, *, warmup: int, rounds: int) -> Measurement:
    ranks, process_group = len(group.ranks), group.process_group
    elements = max(1, size // 4 // ranks) * ranks
    prepare, factor = OPERATIONS[name]
    run, check = prepare(elements, group, device)
    run()
    correct = check()
    once = _max_over_ranks(time_rounds(run, 1, device), device, process_group)
    rounds = max(1, min(rounds, int(TIME_LIMIT_S / max(once, 1e-9))))
    time_rounds(run, min(warmup, rounds), device)
    dist.barrier(process_group)
    seconds = _max_over_ranks(time_rounds(run, rounds, device) / rounds, device, process_group)
    wrong = torch.tensor(0 if correct else 1, device=device)
    dist.all_reduce(wrong, group=process_group)
    algbw = elements * 4 / seconds / 1e9
    return {
        "group": group.name,
        "operation": name,
        "ranks": ranks,
        "bytes": elements * 4,
        "rounds": rounds,
        "seconds": seconds,  # of one round, on the slowest rank
        "algbw_gbps": algbw,  # in 1e9 bytes per second
        "busbw_gbps": algbw * factor(ranks),
        "correct": wrong.item() == 0,  # whether all ranks got the expected values
    }


def time_rounds(run: Operation, rounds: int, device: torch.device) -> float:
    """Return the seconds of some rounds of an operation."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(rounds):
        run()
    synchronize(device)
    return time.perf_counter() - started


def _max_over_ranks(seconds: float, device: torch.device, group: dist.ProcessGroup | None) -> float:
    worst = torch.tensor(seconds, device=device, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return float(worst.item())


Prepared = tuple[Operation, Callable[[], bool]]


def _position(group: Group) -> int:
    return group.ranks.index(dist.get_rank())


def _all_reduce(elements: int, group: Group, device: torch.device) -> Prepared:
    buffer, ranks = torch.full((elements,), _position(group) + 1.0, device=device), len(group.ranks)

    def check() -> bool:
        correct = _is_filled(buffer, ranks * (ranks + 1) / 2)
        buffer.zero_()  # repeated sums must not overflow
        return correct

    return lambda: dist.all_reduce(buffer, group=group.process_group), check


def _all_gather(elements: int, group: Group, device: torch.device) -> Prepared:
    part = elements // len(group.ranks)
    source = torch.full((part,), _position(group) + 1.0, device=device)
    target = torch.empty(elements, device=device)

    def check() -> bool:
        return all(_is_filled(chunk, index + 1.0) for index, chunk in enumerate(target.view(-1, part)))

    return lambda: dist.all_gather_into_tensor(target, source, group=group.process_group), check


def _reduce_scatter(elements: int, group: Group, device: torch.device) -> Prepared:
    ranks = len(group.ranks)
    source = torch.full((elements,), _position(group) + 1.0, device=device)
    target = torch.empty(elements // ranks, device=device)
    run = partial(dist.reduce_scatter_tensor, target, source, group=group.process_group)
    return run, lambda: _is_filled(target, ranks * (ranks + 1) / 2)


def _send_receive(elements: int, group: Group, device: torch.device) -> Prepared:
    """Prepare a ring exchange: each rank sends to the next rank and receives from the previous one."""
    ranks, position = group.ranks, _position(group)
    next_rank, previous_rank = ranks[(position + 1) % len(ranks)], ranks[position - 1]
    source = torch.full((elements,), position + 1.0, device=device)
    target = torch.empty(elements, device=device)

    def run() -> None:
        send = dist.P2POp(dist.isend, source, next_rank, group.process_group)
        receive = dist.P2POp(dist.irecv, target, previous_rank, group.process_group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return run, lambda: _is_filled(target, (position - 1) % len(ranks) + 1.0)


def _is_filled(tensor: Tensor, value: float) -> bool:
    # Two reductions need no buffer; a comparison would allocate up to 1 GiB of booleans.
    return tensor.min().item() == value == tensor.max().item()


OPERATIONS: dict[str, tuple[Callable[[int, Group, torch.device], Prepared], Callable[[int], float]]] = {
    "all_reduce": (_all_reduce, lambda ranks: 2 * (ranks - 1) / ranks),
    "all_gather": (_all_gather, lambda ranks: (ranks - 1) / ranks),
    "reduce_scatter": (_reduce_scatter, lambda ranks: (ranks - 1) / ranks),
    "send_receive": (_send_receive, lambda ranks: 1.0),
}


COPY_BYTES, COPY_ROUNDS = 2**30, 5  # size and number of the copies in each direction


def measure_host_copies(device: torch.device) -> dict[str, float]:
    """Return the GB/s (1e9 bytes) of copies between page-locked memory and a GPU, by direction; none for a CPU."""
    if device.type != "cuda":
        return {}
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    directions = {"host_to_device": (on_gpu, host), "device_to_host": (host, on_gpu)}
    rates = {}
    for name, (target, source) in directions.items():
        copy = partial(target.copy_, source, non_blocking=True)
        copy()
        rates[f"{name}_gbps"] = COPY_BYTES * COPY_ROUNDS / time_rounds(copy, COPY_ROUNDS, device) / 1e9
    return rates

"""The measurement before a training, on its own workers, and the gate that stops it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from distexp.config import PreflightConfig
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.launch.outcome import PREFLIGHT
from distexp.preflight.fabric import Measurement, groups, host_copies, measure
from distexp.preflight.health import complaints
from distexp.runs.record import write_json
from distexp.system.hardware import visible_gpus

CPU_BYTES, GPU_BYTES = 64 * 2**20, 4 * 2**30


class PreflightError(RuntimeError):
    """The machine is not fit for this training."""


def run_preflight(options: PreflightConfig, context: Context) -> None:
    """Measures, writes ``preflight.json`` and a table, and raises PreflightError below the threshold.

    Leaves nothing behind: its groups are destroyed, its memory is free and the allocator's peaks are reset.
    """
    on_gpu = context.device.type == "cuda"
    sick = complaints(visible_gpus()[context.local_rank].index) if on_gpu else []
    largest = options.max_bytes or (GPU_BYTES if on_gpu else CPU_BYTES)
    measured: list[Measurement] = []
    if context.world_size > 1:
        measured = _measure_groups(options, context, largest)
    copies = host_copies(context.device)
    told: list[dict[str, Any]] = gather_to_all({"sick": sick, "copies": copies, "measured": measured})
    found = {
        "backend": "nccl" if on_gpu else "gloo",
        "min_busbw_gbps": options.min_busbw_gbps,
        "measurements": [asdict(one) for entry in told for one in entry["measured"]],
        "host_copies": [entry["copies"] for entry in told],
        "complaints": [sentence for entry in told for sentence in entry["sick"]],
    }
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if context.rank == 0:
        write_json(context.run_dir / PREFLIGHT, found)
        show(found)
    errors = judge(found)
    if errors:
        raise PreflightError("; ".join(errors))


def _measure_groups(options: PreflightConfig, context: Context, largest: int) -> list[Measurement]:
    """What this rank has to tell: the figures of the groups that it is the first of."""
    measured = []
    for group in groups(context.rank, context.nodes, context.workers_per_node):
        if group.process_group is not None:
            counts = {"warmup": options.warmup_rounds, "rounds": options.rounds}
            results = list(measure(group, context.device, max_bytes=largest, **counts))
            if context.rank == group.ranks[0]:
                measured += results
            dist.destroy_process_group(group.process_group)
        dist.barrier()
    return measured


def judge(found: dict[str, Any]) -> list[str]:
    """A sentence for each reason not to train here."""
    errors = list(found["complaints"])
    for one in found["measurements"]:
        if not one["correct"]:
            errors.append(f"{one['operation']} over {one['group']} gave wrong numbers at {one['bytes']} bytes")
    least = found["min_busbw_gbps"]
    reduces = [one for one in found["measurements"] if one["operation"] == "all_reduce" and one["group"] == "all"]
    if least is not None and reduces:
        largest = max(reduces, key=lambda one: int(one["bytes"]))
        if largest["busbw_gbps"] < least:
            errors.append(
                f"all_reduce of {largest['bytes'] / 2**20:,.0f} MiB reaches a bus bandwidth of "
                f"{largest['busbw_gbps']:.2f} GB/s, below preflight.min_busbw_gbps={least:g}: have the interconnect "
                "looked at, or lower the threshold"
            )
    return errors


def show(found: dict[str, Any]) -> None:
    """The table, as nccl-tests prints it, to this rank's log."""
    print(f"preflight over {found['backend']}; all figures in {PREFLIGHT}")
    print("bandwidths in GB/s:")
    print(f"{'group':<8}{'operation':<15}{'ranks':>6}{'bytes':>14}{'rounds':>7}{'time us':>12}{'algbw':>8}{'busbw':>8}")
    for one in found["measurements"]:
        print(
            f"{one['group']:<8}{one['operation']:<15}{one['ranks']:>6}{one['bytes']:>14,}{one['rounds']:>7}"
            f"{one['seconds'] * 1e6:>12.1f}{one['algbw_gbps']:>8.2f}{one['busbw_gbps']:>8.2f}"
            + ("" if one["correct"] else "  WRONG")
        )
    if not found["measurements"]:
        print("one worker talks to nobody: no collective was measured")
    for rank, copies in enumerate(found["host_copies"]):
        if copies:
            print(f"rank {rank}: " + ", ".join(f"{name} {rate:.1f}" for name, rate in copies.items()))
    verdict = "; ".join(judge(found)) or "nothing speaks against a training here"
    print(f"verdict: {verdict}")
    if found["min_busbw_gbps"] is None and found["measurements"]:
        print("no threshold was set: preflight.min_busbw_gbps decides when a training is stopped")
    sys.stdout.flush()

"""The preflight of a run: measurements by its workers, and the check against the threshold."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from distexp.config import ConfigError, PreflightConfig
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.forecast.machine import points_of_preflight, simulates_nodes, store_points
from distexp.preflight.bandwidth import Measurement, make_groups, measure, measure_host_copies
from distexp.preflight.gpu_health import gpu_problems
from distexp.preflight.matrix_ceiling import measure_matrix_ceiling, store_ceiling
from distexp.runs.json_files import write_json
from distexp.runs.run_dir import PREFLIGHT
from distexp.system.hardware import visible_gpus
from distexp.system.units import GIB, MIB, format_tflops

MAX_BYTES_CPU, MAX_BYTES_GPU = 64 * MIB, 4 * GIB


class PreflightError(RuntimeError):
    """A problem of the machine that stops the run before training."""


def run_preflight(options: PreflightConfig, context: Context, precision: str) -> None:
    """Measure the machine, write ``preflight.json`` and print a table; every rank must call this.

    The process groups are destroyed, GPU memory is released and the allocator's peaks are reset. The matrix ceiling is
    stored for later runs.

    Args:
        options: options of the preflight.
        context: this worker.
        precision: precision of the matrix products.

    Raises:
        PreflightError: a GPU has a problem, a result is wrong, or the bandwidth is below the threshold.
    """
    result = _measure_all(options, context, precision)
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if context.rank == 0:
        write_json(context.run_dir / PREFLIGHT, result)
        print_table(result)
        _store_highest_ceiling(result, context, precision)
        _store_curves(result, context)
    problems = find_problems(result)
    if problems:
        raise PreflightError("; ".join(problems))


def _store_highest_ceiling(result: Mapping[str, Any], context: Context, precision: str) -> None:
    """Store the matrix ceiling of the fastest rank; print a note if that is not possible."""
    try:
        store_ceiling(max(one["tflops"] for one in result["matrix_products"]), context.device, precision)
    except (ConfigError, OSError) as error:
        print(f"note: the matrix ceiling is not stored, so no run reports metrics.mfu_of_ceiling: {error}", flush=True)


def _store_curves(result: Mapping[str, Any], context: Context) -> None:
    """Store the durations of the collectives for ``distexp forecast``; print a note if that is not possible."""
    points = points_of_preflight(result)
    gpu_name = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else None
    try:
        if points:
            store_points(points, gpu_name, socket.gethostname())
    except (ConfigError, OSError) as error:
        print(f"note: the bandwidths are not stored, so no forecast of another run uses them: {error}", flush=True)


def _measure_all(options: PreflightConfig, context: Context, precision: str) -> dict[str, Any]:
    """Return the content of ``preflight.json``, the same on all ranks."""
    on_gpu = context.device.type == "cuda"
    problems = gpu_problems(visible_gpus()[context.local_rank].index) if on_gpu else []
    max_bytes = options.max_bytes or (MAX_BYTES_GPU if on_gpu else MAX_BYTES_CPU)
    measurements = _measure_groups(options, context, max_bytes) if context.world_size > 1 else []
    dist.barrier()
    ranks: list[dict[str, Any]] = gather_to_all(
        {
            "host": socket.gethostname(),
            "problems": problems,
            "copies": measure_host_copies(context.device),
            "matrix": {"precision": precision, "tflops": measure_matrix_ceiling(context.device, precision)},
            "measurements": [asdict(measurement) for measurement in measurements],
        }
    )
    return {
        "backend": "nccl" if on_gpu else "gloo",
        "nodes": context.nodes,
        "hosts": len({rank["host"] for rank in ranks}),
        "min_busbw_gbps": options.min_busbw_gbps,
        "measurements": [measurement for rank in ranks for measurement in rank["measurements"]],
        "host_copies": [rank["copies"] for rank in ranks],
        "matrix_products": [rank["matrix"] for rank in ranks],
        "complaints": [problem for rank in ranks for problem in rank["problems"]],
    }


def _measure_groups(options: PreflightConfig, context: Context, max_bytes: int) -> list[Measurement]:
    """Measure every group; return the results of the groups in which this rank is the first."""
    measurements = []
    for group in make_groups(context.rank, context.nodes, context.workers_per_node):
        if group.process_group is not None:
            rounds = {"warmup": options.warmup_rounds, "rounds": options.rounds}
            results = list(measure(group, context.device, max_bytes=max_bytes, **rounds))
            if context.rank == group.ranks[0]:
                measurements += results
            dist.destroy_process_group(group.process_group)
        dist.barrier()
    return measurements


def find_problems(result: Mapping[str, Any]) -> list[str]:
    """Return one message for each reason not to train on this machine.

    Args:
        result: Content of ``preflight.json``.
    """
    problems = list(result["complaints"])
    for one in result["measurements"]:
        if not one["correct"]:
            problems.append(f"{one['operation']} over {one['group']} returned wrong values at {one['bytes']} bytes")
    threshold = result["min_busbw_gbps"]
    reduces = [one for one in result["measurements"] if one["operation"] == "all_reduce" and one["group"] == "all"]
    if threshold is not None and reduces:
        largest = max(reduces, key=lambda one: int(one["bytes"]))
        if largest["busbw_gbps"] < threshold:
            problems.append(
                f"all_reduce of {largest['bytes'] / MIB:,.0f} MiB reaches a bus bandwidth of "
                f"{largest['busbw_gbps']:.2f} GB/s, below preflight.min_busbw_gbps={threshold:g}: check the "
                "interconnect, or lower the threshold"
            )
    return problems


def print_table(result: Mapping[str, Any]) -> None:
    """Print the measurements in the layout of nccl-tests, and the verdict."""
    print(f"preflight with {result['backend']}; all measurements are in {PREFLIGHT}")
    print("bandwidths in GB/s:")
    print(f"{'group':<8}{'operation':<15}{'ranks':>6}{'bytes':>14}{'rounds':>7}{'time us':>12}{'algbw':>8}{'busbw':>8}")
    for one in result["measurements"]:
        print(
            f"{one['group']:<8}{one['operation']:<15}{one['ranks']:>6}{one['bytes']:>14,}{one['rounds']:>7}"
            f"{one['seconds'] * 1e6:>12.1f}{one['algbw_gbps']:>8.2f}{one['busbw_gbps']:>8.2f}"
            + ("" if one["correct"] else "  WRONG")
        )
    if not result["measurements"]:
        print("single worker: no collectives to measure")
    for rank, copies in enumerate(result["host_copies"]):
        if copies:
            print(f"rank {rank}: " + ", ".join(f"{name} {rate:.1f}" for name, rate in copies.items()))
    for rank, product in enumerate(result["matrix_products"]):
        print(f"rank {rank}: {format_tflops(product['tflops'])} in a large {product['precision']} matrix product")
    if simulates_nodes(result):
        print(
            "note: one machine simulates all nodes, so forecasts do not use the times between them. "
            "To measure the network, add cluster=slurm"
        )
    print(f"verdict: {'; '.join(find_problems(result)) or 'no problems found'}")
    if result["min_busbw_gbps"] is None and result["measurements"]:
        print("hint: set preflight.min_busbw_gbps to stop runs on a slow interconnect")
    sys.stdout.flush()

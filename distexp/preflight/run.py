"""The preflight of a run: measurements by its workers, and the check against the threshold."""

import platform
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distexp.config import ConfigError, PreflightConfig
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.measure.stragglers import SLOWDOWNS
from distexp.preflight.bandwidth import Measurement, make_groups, measure, measure_host_copies, time_rounds
from distexp.preflight.machine import points_of_preflight, simulates_nodes, store_points
from distexp.runs.run_dir import PREFLIGHT
from distexp.strategies.torch_model import DTYPES
from distexp.system import cgroups, files
from distexp.system.cache_dir import cache_dir, file_name
from distexp.system.units import GIB, MIB, format_memory, format_tflops

MAX_BYTES_CPU, MAX_BYTES_GPU = 64 * MIB, 4 * GIB


class PreflightError(RuntimeError):
    """A problem of the machine that stops the run before training."""


def run_preflight(options: PreflightConfig, context: Context, precision: str) -> None:
    """Measure the machine, write ``preflight.json`` and print a table; every rank must call this.

    The process groups are destroyed, GPU memory is released and the allocator's peaks are reset. Raises PreflightError
    if a GPU has a problem, a result is wrong, or the bandwidth is below the threshold.
    """
    result = _measure_all(options, context, precision)
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if context.rank == 0:
        files.write_json(context.run_dir / PREFLIGHT, result)
        print_table(result)
        _store(result, context.device, precision)
    problems = find_problems(result)
    if problems:
        raise PreflightError("; ".join(problems))


def _store(result: Mapping[str, Any], device: torch.device, precision: str) -> None:
    """Store the matrix ceiling of the fastest rank, and the durations of the collectives for ``distexp forecast``."""
    try:
        store_ceiling(max(one["tflops"] for one in result["matrix_products"]), device, precision)
    except (ConfigError, OSError) as error:
        print(f"note: the matrix ceiling is not stored, so no run reports metrics.mfu_of_ceiling: {error}", flush=True)
    gpu_name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    try:
        if points := points_of_preflight(result):
            store_points(points, gpu_name, socket.gethostname())
    except (ConfigError, OSError) as error:
        print(f"note: the bandwidths are not stored, so no forecast of another run uses them: {error}", flush=True)


def _measure_all(options: PreflightConfig, context: Context, precision: str) -> dict[str, Any]:
    """Return the content of ``preflight.json``, the same on all ranks."""
    on_gpu = context.device.type == "cuda"
    problems = gpu_problems(cgroups.visible_gpus()[context.local_rank].index) if on_gpu else []
    max_bytes = options.max_bytes or (MAX_BYTES_GPU if on_gpu else MAX_BYTES_CPU)
    measurements = _measure_groups(options, context, max_bytes) if context.world_size > 1 else []
    dist.barrier()
    ranks: list[dict[str, Any]] = gather_to_all(
        {
            "host": socket.gethostname(),
            "problems": problems,
            "copies": measure_host_copies(context.device),
            "matrix": {"precision": precision, "tflops": measure_matrix_ceiling(context.device, precision)},
            "measurements": measurements,
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
    measurements, rounds = [], {"warmup": options.warmup_rounds, "rounds": options.rounds}
    for group in make_groups(context.rank, context.nodes, context.workers_per_node):
        if group.process_group is not None:
            results = list(measure(group, context.device, max_bytes=max_bytes, **rounds))
            if context.rank == group.ranks[0]:
                measurements += results
            dist.destroy_process_group(group.process_group)
        dist.barrier()
    return measurements


def find_problems(result: Mapping[str, Any]) -> list[str]:
    """Return one message for each reason not to train on this machine, from the content of ``preflight.json``."""
    problems = list(result["complaints"])
    wrong = (one for one in result["measurements"] if not one["correct"])
    problems += (
        f"{one['operation']} over {one['group']} returned wrong values at {one['bytes']} bytes" for one in wrong
    )
    threshold = result["min_busbw_gbps"]
    reduces = [one for one in result["measurements"] if one["operation"] == "all_reduce" and one["group"] == "all"]
    if threshold is not None and reduces:
        largest = max(reduces, key=lambda one: int(one["bytes"]))
        if largest["busbw_gbps"] < threshold:
            problems.append(
                f"all_reduce of {format_memory(largest['bytes'] / MIB)} reaches a bus bandwidth of "
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


def gpu_problems(index: int) -> list[str]:
    """Return one message for each problem of a GPU of NVML. Call it before this process allocates GPU memory."""
    try:
        with cgroups.nvml_session() as nvml:
            return list(_find_problems(nvml, index))
    except cgroups.NvmlUnavailableError as error:
        return [f"the health of GPU {index} cannot be checked: NVML reports {error}"]


def _find_problems(nvml: Any, index: int) -> Iterator[str]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    used = nvml.nvmlDeviceGetMemoryInfo(handle).used / MIB
    if used > cgroups.BUSY_MIB:
        yield f"GPU {index} has {used:,.0f} MiB in use before the run: another process uses it"
    kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = _read_counter(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, *kind)
    if errors:
        yield f"GPU {index} has {errors} uncorrected memory errors since the last driver load: have it replaced"
    reasons = _read_counter(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    yield from (f"GPU {index}: {description}" for bit, description in SLOWDOWNS.items() if reasons & bit)


def _read_counter(nvml: Any, read: Callable[..., int], *arguments: Any) -> int | None:
    """Return a counter, or None if this GPU does not support it."""
    try:
        return read(*arguments)
    except nvml.NVMLError:
        return None


SIZE_GPU, SIZE_CPU = 8192, 512  # rows and columns of the matrices
ROUNDS, ROUND_S = 7, 0.05  # number of rounds, and approximate time of one


def measure_matrix_ceiling(device: torch.device, precision: str) -> float:
    """Return the TFLOP/s of a product of two square matrices: the median of several rounds after a warm-up.

    No training exceeds them. They are below the peak of the datasheet, because the clocks of a GPU depend on power and
    temperature. The values are random, because a GPU needs less power for zeros. The global RNG state is not used.
    Whether fp32 uses TF32 depends on torch's settings, as in a training.
    """
    size = SIZE_GPU if device.type == "cuda" else SIZE_CPU
    generator = torch.Generator(device).manual_seed(0)
    randn = partial(torch.randn, size, size, generator=generator, device=device)
    left, right, product = (randn().to(DTYPES[precision]) for _ in range(3))
    multiply = partial(torch.mm, left, right, out=product)
    time_rounds(multiply, 1, device)  # loads the library
    count = max(1, round(ROUND_S / time_rounds(multiply, 1, device)))
    time_rounds(multiply, count, device)
    seconds = statistics.median(time_rounds(multiply, count, device) for _ in range(ROUNDS)) / count
    return 2 * size**3 / seconds / 1e12


def store_ceiling(tflops: float, device: torch.device, precision: str) -> Path:
    """Write the ceiling of a type of device; return the file.

    A higher one that is stored is kept, because a busy or hot machine measures too little. Raises ConfigError if this
    user has no cache directory, and OSError if the file cannot be written.
    """
    path = _path(device, precision)
    if tflops > (stored_ceiling(device, precision) or 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, {"tflops": tflops})
    return path


def stored_ceiling(device: torch.device, precision: str) -> float | None:
    """Return the ceiling that a preflight stored for this type of device, in TFLOP/s; None if there is none."""
    try:
        tflops = files.read_or_none(_path(device, precision), "tflops")
    except ConfigError:
        return None
    return float(tflops) if isinstance(tflops, int | float) and tflops > 0 else None


def _path(device: torch.device, precision: str) -> Path:
    """Return the file of a type of device, a precision and a version of torch."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"cpu of {platform.node()} {torch.get_num_threads()} threads"
    products = torch.get_float32_matmul_precision() if precision == "fp32" else ""
    parts = (name, precision, products, f"torch-{torch.__version__}")
    return cache_dir() / "matrix-ceiling" / f"{file_name(' '.join(filter(None, parts)))}.json"

"""The matrix ceiling: the TFLOP/s of a large matrix product, which no training exceeds.

It is below the peak of the datasheet, because the clocks of a GPU depend on power and temperature. The preflight stores
it in the cache directory, and later runs read it. The highest of all measurements is kept, because a busy or hot
machine measures too little.
"""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from distexp.config import ConfigError
from distexp.data.cache import cache_dir
from distexp.measure.clock import synchronize
from distexp.runs.json_files import read_or_none, write_json

SIZE_GPU, SIZE_CPU = 8192, 512
"""Rows and columns of the matrices."""

ROUND_S = 0.05
"""Approximate time of a round."""

ROUNDS = 7

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure_matrix_ceiling(device: torch.device, precision: str) -> float:
    """Return the TFLOP/s of a product of two square matrices: the median of several rounds after a warm-up.

    The values are random, because a GPU needs less power for zeros. The global RNG state is not used.

    Args:
        device: the device.
        precision: fp32, bf16 or fp16. Whether fp32 uses TF32 depends on torch's settings, as in a training.
    """
    size = SIZE_GPU if device.type == "cuda" else SIZE_CPU
    generator = torch.Generator(device).manual_seed(0)
    left, right, product = (
        torch.randn(size, size, generator=generator, device=device).to(DTYPES[precision]) for _ in range(3)
    )

    def multiply() -> None:
        torch.mm(left, right, out=product)

    _time(multiply, 1, device)  # loads the library
    count = max(1, round(ROUND_S / _time(multiply, 1, device)))
    _time(multiply, count, device)
    seconds = statistics.median(_time(multiply, count, device) for _ in range(ROUNDS)) / count
    return 2 * size**3 / seconds / 1e12


def _time(run: Callable[[], None], count: int, device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        run()
    synchronize(device)
    return time.perf_counter() - started


def store_ceiling(tflops: float, device: torch.device, precision: str) -> Path:
    """Write the ceiling of a type of device, unless a higher one is stored; return the file.

    Raises:
        ConfigError: this user has no cache directory.
        OSError: the file cannot be written.
    """
    path = _path(device, precision)
    if tflops > (stored_ceiling(device, precision) or 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"tflops": tflops})
    return path


def stored_ceiling(device: torch.device, precision: str) -> float | None:
    """Return the ceiling that a preflight stored for this type of device, in TFLOP/s; None if there is none."""
    try:
        tflops = read_or_none(_path(device, precision), "tflops")
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
    return cache_dir() / "matrix-ceiling" / f"{re.sub(r'[^A-Za-z0-9.+]+', '-', ' '.join(filter(None, parts)))}.json"

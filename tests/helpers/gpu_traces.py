"""Hand-written profiler traces of GPUs, in the format of torch's profiler. Times are in milliseconds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

GEMM = "nvjet_tst_128x128_64x6_2x1_v_bz_coopA_TNT"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<3>>()"


def event(category: str, name: str, begin: float, end: float, thread: int = 1, **arguments: Any) -> dict[str, Any]:
    """Return a complete event."""
    when = {"ts": 4.39e12 + 1000 * begin, "dur": 1000 * (end - begin)}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, **when, "args": arguments}


class GPUTrace:
    """A trace that is built event by event."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._correlations = itertools.count(1)

    def step(self, number: int, begin: float, end: float) -> GPUTrace:
        """Add a step of the profiler."""
        return self.annotation(f"ProfilerStep#{number}", begin, end)

    def annotation(self, name: str, begin: float, end: float) -> GPUTrace:
        """Add an annotation of the training thread."""
        self.events.append(event("user_annotation", name, begin, end))
        return self

    def kernel(
        self, name: str, begin: float, end: float, *, launch: float, category: str = "kernel", **arguments: Any
    ) -> GPUTrace:
        """Add a kernel, and the call at ``launch`` that starts it and takes 0.1 ms."""
        number = next(self._correlations)
        call = "cudaMemcpyAsync" if category == "gpu_memcpy" else "cudaLaunchKernel"
        self.events.append(event("cuda_runtime", call, launch, launch + 0.1, correlation=number))
        self.events.append(event(category, name, begin, end, 7, correlation=number, **arguments))
        return self

    def write(self, path: Path) -> Path:
        """Write the file and return its path."""
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events, "traceName": "x"}))
        return path

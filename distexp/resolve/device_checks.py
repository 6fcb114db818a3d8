"""Checks of settings in several sections that need a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.config import Config


def check_device(config: Config) -> Iterator[str]:
    """Yield an error for each setting that needs a GPU, if the run has none."""
    on_gpu = config.cluster.device == "cuda"
    if config.cluster.gpu_memory_limit_gb is not None and not (on_gpu or config.is_prediction):
        yield (
            f"cluster.gpu_memory_limit_gb={config.cluster.gpu_memory_limit_gb:g} needs a GPU, but this run is on "
            "cpu: leave it out"
        )
    if config.precision.name == "fp16" and not on_gpu:
        yield "precision=fp16 needs a GPU, but this run is on cpu: choose precision=bf16 or fp32"
    if config.model.attention in ("flex", "flash") and not on_gpu:
        yield (
            f"model.attention={config.model.attention} needs a GPU, because it has no backward pass on a CPU: choose "
            "model.attention=sdpa"
        )
    if config.dataset.cache == "gpu" and not on_gpu:
        yield "dataset.cache=gpu needs a GPU, but this run is on cpu: choose dataset.cache=cpu"
    if config.offload.pin_memory and not on_gpu:
        yield "offload=pinned needs a GPU, but this run is on cpu: choose offload=true or offload=false"

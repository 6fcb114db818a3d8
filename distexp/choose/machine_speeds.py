"""Speeds of a machine for the order of the candidates: measured ones if a preflight stored them, else rough ones."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from dataclasses import dataclass

from distexp.config import Config, ConfigError
from distexp.data.cache import cache_dir
from distexp.hardware.facts import facts, gpu_facts, peak_tflops
from distexp.plan.verdict import planned_gpu
from distexp.runs.json_files import read_json

REACHED_SHARE = 0.6
"""Share of the datasheet's peak that a large matrix product reaches."""

UNKNOWN_GPU_TFLOPS = 100.0

LAUNCH_S = 30e-6
"""Time until the CPU has launched a kernel of the traced step, with ``single``. On machines with an H200 and compiled
blocks, micro-batches of 4 samples took 20 to 36 us for each (docs/results/choose_h200.json)."""


@dataclass(frozen=True)
class MachineSpeeds:
    """Speeds of one worker.

    Attributes:
        tflops: TFLOP/s of a large matrix product.
        memory_gb_per_s: Bandwidth of its memory.
        link_gb_per_s: Bandwidth between the workers of a node.
        network_gb_per_s: Bandwidth between nodes of each worker, if all of them use it.
        launch_s: Time until the CPU has launched an operation.
    """

    tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float
    network_gb_per_s: float
    launch_s: float = LAUNCH_S


def read_machine_speeds(config: Config) -> MachineSpeeds:
    """Return the speeds of the machine of a run."""
    precision, links = config.precision.name, facts().links
    network = links["network"].step_gb_per_s
    if config.cluster.device == "cpu":
        cores = config.cluster.cpus_per_worker or 1
        stored = stored_tflops(f"cpu of {platform.node()} {cores} threads", precision)
        tflops, link = stored or facts().cpu_tflops_per_core * cores, links["loopback"].step_gb_per_s
        return MachineSpeeds(tflops, facts().cpu_memory_gb_per_s, link, network)
    name = planned_gpu(config) or ""
    gpu, peak = gpu_facts(name), peak_tflops(name, precision)
    tflops = stored_tflops(name, precision) or (REACHED_SHARE * peak if peak else UNKNOWN_GPU_TFLOPS)
    return MachineSpeeds(tflops, gpu.memory_gb_per_s, facts().link_kind(gpu.link["name"]).step_gb_per_s, network)


def stored_tflops(device: str, precision: str) -> float | None:
    """Return the highest matrix ceiling that a preflight stored for a device, with any version of torch."""
    if not device:
        return None
    name = re.sub(r"[^A-Za-z0-9.+]+", "-", f"{device} {precision}")
    found = []
    with suppress(ConfigError):  # Without a home directory there is no cache.
        for path in (cache_dir() / "matrix-ceiling").glob(f"{name}-*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                found.append(float(read_json(path)["tflops"]))
    return max(found, default=None)

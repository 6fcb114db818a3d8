"""CPU cores and CPU memory that a run leaves free."""

from __future__ import annotations

import math

from distexp.config import DatasetConfig
from distexp.explain.step_profile import StepProfile
from distexp.resolve.image_bytes import MAX_CPU_BYTES, estimate_image_bytes


def images_fit(profile: StepProfile) -> bool:
    """Return whether the decoded images are few enough for CPU memory, as for kernels=fast."""
    names = ("root", "train_size", "eval_size", "image_size")
    needed = estimate_image_bytes(DatasetConfig(**{name: profile.setting(f"dataset.{name}") for name in names}))
    return needed is not None and needed <= MAX_CPU_BYTES


def free_cores(profile: StepProfile) -> int:
    """Return the CPU cores of a worker that do not train."""
    environment = profile.record.environment
    cores = (environment.cpu_count or 0) if environment else 0
    if environment and environment.cpu_limit is not None:
        cores = min(cores, int(environment.cpu_limit))
    training = 1 if profile.on_gpu else profile.number("cluster.cpus_per_worker", 1)
    return max(0, cores // math.ceil(profile.world_size / _machines(profile)) - training)


def _machines(profile: StepProfile) -> int:
    """Return the number of machines. Simulated nodes share one. During a run only its attempt has the hosts."""
    run = profile.record.run
    hosts = run.hosts or (run.attempts[-1].get("hosts") if run.attempts else None)
    return len(set(hosts)) if hosts else max(1, profile.number("cluster.nodes", 1))

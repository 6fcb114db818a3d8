"""Cache of estimates, by configuration, by the code of distexp and of custom packages, and by versions of libraries."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from distexp import __version__
from distexp.config import Config, TrainConfig
from distexp.config.paths import PACKAGE
from distexp.data.cache import cache_dir
from distexp.hardware.facts import cublas_workspace, gpu_facts
from distexp.plan.cpu_memory import simulated_nodes
from distexp.plan.estimate import Estimate
from distexp.plan.verdict import planned_gpu
from distexp.resolve.run_id import run_id
from distexp.runs.json_files import write_json
from distexp.runs.typed_values import read_dataclass

SOURCES = (
    *("config", "data", "distributed", "engines", "models", "plan", "resolve", "strategies", "system", "training"),
    "worker",
)
"""Packages whose code an estimate depends on."""

LIBRARIES = ("torch", "transformers", "deepspeed")

IRRELEVANT = (
    *("learning_rate", "weight_decay", "betas", "eps", "schedule", "step_size", "gamma", "warmup_steps"),
    *("measure_after_step", "log_every", "on_nan", "score_answers", "resume"),
)
"""Keys of ``train`` that do not change an estimate."""

BATCH_KEYS = ("num_epochs", "max_steps", "seed")
"""Keys of ``train`` that decide which samples are in the largest micro-batch."""


def read_estimate(config: Config) -> Estimate | None:
    """Return the cached estimate of a configuration; None if there is none."""
    return read_dataclass(Estimate, cache_path(config))  # A damaged file is replaced.


def store_estimate(config: Config, estimate: Estimate) -> None:
    """Keep an estimate. Without a writable cache, print a warning."""
    path = cache_path(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, estimate.to_json())
    except OSError as error:
        print(f"distexp: the prediction is not cached: {path.parent}: {error.strerror}", file=sys.stderr)


def cache_path(config: Config) -> Path:
    """Return the file of an estimate for the GPU to plan for."""
    key = {
        "run": run_id(_relevant(config)),
        "code": code_hash(),
        "custom": [package_hash(name) for name in custom_packages(config)],
        "versions": library_versions(),
        "workspace": cublas_workspace(planned_gpu(config)),
        "multiprocessors": gpu_facts(planned_gpu(config)).multiprocessors,
        "simulated_nodes": simulated_nodes(config),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_dir() / "plan" / f"{digest}.json"


def _relevant(config: Config) -> Config:
    """Return a copy in which what does not change the memory has its default."""
    changed, default = copy.deepcopy(config), TrainConfig()
    for name in IRRELEVANT if _sizes_vary(config) else (*IRRELEVANT, *BATCH_KEYS):
        setattr(changed.train, name, getattr(default, name))
    return changed


def _sizes_vary(config: Config) -> bool:
    """Return whether the memory of a step depends on the samples of its micro-batch."""
    dataset, train = config.dataset, config.train
    if config.model.task != "causal_lm":
        return False
    padded = dataset.padding == "max_length" and not dataset.bucketing and not dataset.packing
    is_custom = not dataset._target_.startswith("distexp.")  # It may pad in another way.
    return is_custom or not padded or train.logits != "all" or train.loss != "full"


@lru_cache(maxsize=1)
def code_hash() -> str:
    """Return a hash of the code that an estimate depends on."""
    digest = hashlib.sha256(__version__.encode())
    for package in SOURCES:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def custom_packages(config: Config) -> list[str]:
    """Return the packages outside of distexp whose code an estimate depends on."""
    targets = (config.model._target_, config.dataset._target_, config.strategy._target_)
    return sorted({target.partition(".")[0] for target in targets} - {"distexp"})


@lru_cache(maxsize=16)
def package_hash(name: str) -> str:
    """Return a hash of the names, sizes and times of a package's modules, which are not imported."""
    digest = hashlib.sha256(name.encode())
    with suppress(ImportError, ValueError, OSError):  # The process that traces reports what cannot be imported.
        spec = find_spec(name)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        modules = [Path(spec.origin)] if spec and spec.origin else []
        for path in sorted({*modules, *(path for folder in folders for path in Path(folder).rglob("*.py"))}):
            found = path.stat()
            digest.update(f"{path}:{found.st_size}:{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def library_versions() -> dict[str, str]:
    """Return the versions of the installed libraries."""
    found = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found

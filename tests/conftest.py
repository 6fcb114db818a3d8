"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from distexp.config import DatasetConfig
from distexp.system.cgroups import visible_gpus
from tests.helpers.datasets import squad_dataset, tinyimagenet_dataset
from tests.helpers.forked_cli import serve_module
from tests.helpers.slurm_cluster import Cluster, missing_requirement, running_cluster

# Several tests share the cores. Threads of OpenMP that wait for each other would use them, for ten times the time of
# the work. It is read when torch is imported, here and in all workers.
os.environ.setdefault("GOMP_SPINCOUNT", "0")


@pytest.fixture(scope="session", autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share generated samples and tokenizers between all tests, outside the user's cache."""
    os.environ.setdefault("DISTEXP_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session", autouse=True)
def _no_terminal_width() -> None:
    """Remove the width that pytest-xdist sets, so that output is as in a pipe."""
    os.environ.pop("COLUMNS", None)


@pytest.fixture(scope="session", autouse=True)
def _forked_predictions() -> Iterator[None]:
    """Trace in forks of a process that has imported torch, instead of in new interpreters."""
    with patch("distexp.plan.planner.start_module", serve_module):
        yield


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a Slurm cluster on this machine; fail with the reason, instead of skipping, if that is not possible."""
    error = missing_requirement()
    if error is not None:
        pytest.fail(f"no Slurm cluster for the tests: {error}", pytrace=False)
    with running_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture
def one_rank_group(tmp_path: Path) -> Iterator[None]:
    """Initialize a process group of one rank in this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


LONGEST = (
    "verify/test_verify.py",
    "strategies/test_parity.py",
    "launch/test_failures.py",
    "launch/slurm/test_requeue.py",
    "verify/test_museum.py",
    "launch/slurm/test_failures.py",
    "launch/slurm/test_sweeps.py",
    "models/test_zoo.py",
    "strategies/test_tensor.py",
    "strategies/test_expert.py",
    "strategies/test_context.py",
    "worker/test_compile_trial.py",
    "strategies/test_pipeline.py",
    "experiments/test_chapters.py",
    "choose/test_search.py",
    "launch/test_local_runs.py",
    "benchmarks/test_speed.py",
    "measure/test_stragglers.py",
    "cli/test_cli.py",
    "checkpoints/test_resuming.py",
    "models/test_tasks.py",
    "plan/test_accuracy.py",
    "worker/test_compile_cache.py",
    "plan/test_compiled.py",
    "strategies/test_compute_weights.py",
)
"""Files that take longest, the longest first. The other processes would wait for one that starts last."""


@pytest.hookimpl(tryfirst=True)  # before -m selects tests by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, and skip the tests with the marker ``gpu`` on a machine without a visible GPU.

    Those with the marker ``release`` are slow too.
    """
    for item in items:
        if item.get_closest_marker("release") is not None:
            item.add_marker(pytest.mark.slow)
    tests_of = Counter(item.path for item in items)
    rank_of = {path: next((n for n, end in enumerate(LONGEST) if str(path).endswith(end)), 99) for path in tests_of}
    items.sort(key=lambda item: (rank_of[item.path], -tests_of[item.path], item.path))
    if not visible_gpus():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and none is visible"))


@pytest.fixture(scope="session")
def squad_files(tmp_path_factory: pytest.TempPathFactory) -> DatasetConfig:
    """Return a small SQuAD in the official format; see ``real_data``."""
    return squad_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def tinyimagenet_folder(tmp_path_factory: pytest.TempPathFactory) -> DatasetConfig:
    """Return a small TinyImageNet in the official layout; see ``real_data``."""
    return tinyimagenet_dataset(tmp_path_factory.mktemp("data"))

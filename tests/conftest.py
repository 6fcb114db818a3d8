"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from distexp.config import DatasetConfig
from distexp.system.cgroups import visible_gpus
from tests.helpers.datasets import squad_dataset, tinyimagenet_dataset
from tests.helpers.slurm_cluster import Cluster, missing_requirement, running_cluster


@pytest.fixture(scope="session", autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share generated samples and tokenizers between all tests, outside the user's cache."""
    os.environ.setdefault("DISTEXP_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session", autouse=True)
def _no_terminal_width() -> None:
    """Remove the width that pytest-xdist sets, so that output is as in a pipe."""
    os.environ.pop("COLUMNS", None)


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
    "verify/test_museum.py",
    "models/test_zoo.py",
    "verify/test_verify.py",
    "models/test_tasks.py",
    "worker/test_compile_trial.py",
    "launch/slurm/test_failures.py",
    "launch/slurm/test_requeue.py",
    "strategies/test_parity.py",
    "strategies/test_adapters.py",
    "models/test_own_modules.py",
    "launch/slurm/test_sweeps.py",
    "launch/test_failures.py",
    "launch/test_local_runs.py",
    "checkpoints/test_resuming.py",
    "benchmarks/test_speed.py",
    "report/page/test_page.py",
    "checkpoints/test_interruptions.py",
    "engines/test_hf_trainer.py",
    "measure/profiling/test_communication.py",
    "measure/test_stragglers.py",
    "launch/test_shared_start.py",
    "launch/test_nodes.py",
    "experiments/test_tiny.py",
    "forecast/test_gloo.py",
    "tests/test_resume.py",
)
"""Files that take longest. They start first, or the other processes would wait for one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, and skip the tests with the marker ``gpu`` on a machine without a visible GPU."""
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

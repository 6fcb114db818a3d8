"""What the tests share: composing as the command line does, and starting real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.helpers.slurm_cluster import Cluster, missing, standing


@pytest.fixture(scope="session", autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Samples and tokenizers are made once for all tests, away from the user's own cache."""
    os.environ.setdefault("DISTEXP_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm cluster on this machine; where there can be none, an error that says why, and never a skipped test."""
    error = missing()
    if error is not None:
        pytest.fail(f"no Slurm cluster for the tests: {error}", pytrace=False)
    with standing(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster

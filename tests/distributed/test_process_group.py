"""Timeouts of collectives: a hang must be reported by the agents before a collective fails."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from distexp.config import ConfigError
from distexp.distributed.process_group import collective_timeout, join, wait_for_rank_0
from tests.helpers.runs import make_spec


@pytest.mark.parametrize("minutes", [0.4, 30, 120])
def test_collectives_wait_longer_than_the_hang_limit(minutes: float) -> None:
    assert collective_timeout(minutes) > timedelta(minutes=minutes)


@pytest.mark.parametrize(
    ("rank", "error", "reason"),
    [
        ("0", errno.ECONNREFUSED, None),  # Nothing listens yet.
        ("0", errno.ENETUNREACH, "rank 0 on .* cannot reach rank 0 at 127.0.0.1:1234 within .*Network is unreachable"),
        ("1", errno.ECONNREFUSED, "rank 1 on .* cannot reach rank 0 .*Connection refused"),
    ],
)
def test_a_rank_without_a_way_to_rank_0_ends_before_the_hang_limit(
    rank: str, error: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    for name, value in {"RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "create_connection", fail)
    spec = make_spec("cluster.device=cpu", "cluster.hang_timeout_min=0.01")
    with pytest.raises(ConnectionError, match=reason) if reason else nullcontext():
        wait_for_rank_0(spec)


@pytest.fixture
def single_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the environment variables of torchrun for one worker; restore torch's defaults afterwards."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["PIGEON", None])
def test_an_unknown_transport_of_gloo_is_named(
    transport: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("makeDeviceForHostname(): unsupported gloo device")

    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**environment, **({"GLOO_DEVICE_TRANSPORT": transport} if transport else {})}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setattr("distexp.distributed.process_group.set_default_timeout", lambda _: None)
    named = "GLOO_DEVICE_TRANSPORT=PIGEON is not supported by torch here: unset it" if transport else "^makeDevice"
    with pytest.raises(ConfigError if transport else RuntimeError, match=named):
        join(make_spec("cluster.device=cpu", "cluster.workers_per_node=1"), tmp_path, dist.HashStore())


@pytest.mark.usefixtures("single_worker")
def test_the_process_group_and_the_groups_of_a_mesh_have_the_timeout(tmp_path: Path) -> None:
    spec = make_spec("strategy=single", "cluster.device=cpu", "cluster.hang_timeout_min=120")
    join(spec, tmp_path)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    groups = [None, mesh.get_group("replicate"), mesh.get_group("shard"), dist.new_group()]
    assert [timeout_of(group) for group in groups] == [timedelta(minutes=125)] * 4


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """Return the timeout of a gloo group."""
    backend = (group or distributed_c10d._get_default_group())._get_backend(torch.device("cpu"))
    timeout: timedelta = backend.options._timeout
    return timeout

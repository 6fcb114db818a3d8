"""Private APIs of process groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d

from distexp.system.torch_internals.errors import explained


def set_default_timeout(timeout: timedelta) -> None:
    """Set the timeout of the process groups that are created later.

    A device mesh creates its groups with torch's defaults, which are 10 minutes for NCCL and 30 minutes for gloo. It
    has no argument for another timeout.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        with explained(f"torch.distributed.distributed_c10d.{name}"):
            getattr(distributed_c10d, name)  # Setting a renamed attribute would have no effect.
        setattr(distributed_c10d, name, timeout)


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a group whose collectives do nothing, during the block."""
    with explained("torch.testing._internal.distributed.fake_pg.FakeStore"):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = FakeStore()
    torch.distributed.init_process_group("fake", rank=0, world_size=world_size, store=store)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def has_several_groups() -> bool:
    """Return whether this process is in several process groups, not counting copies and groups of one rank."""
    with explained("torch.distributed.distributed_c10d._world.pg_group_ranks"):
        groups = {tuple(sorted(ranks)) for ranks in distributed_c10d._world.pg_group_ranks.values()}
    return sum(len(ranks) > 1 for ranks in groups) > 1

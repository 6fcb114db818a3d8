"""Random weights that several runs have in common: the first run keeps them, and the others read them.

Random weights of a large model take longer than a short training. In a local sweep, workers inherit the descriptor of a
file in memory. It is written once, and then sealed. It also holds the state of the random number generator before and
after the weights were made. So a run that reads them is equal to one that makes them.
"""

import fcntl
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

MEMORY_SHARE = 0.25
"""Largest share of the free memory of the machine that the weights may take."""

_offered: int | None = None


def make_file() -> int:
    """Return the descriptor of a new file in memory."""
    return os.memfd_create("distexp-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def offer(file: int) -> None:
    """Offer a file in memory to the workers that are forked from this process."""
    global _offered  # noqa: PLW0603
    _offered = file


def make_or_read(key: str | None, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the weights that ``make`` makes on the CPU by random numbers of torch, from the file if it has them.

    ``key`` is what they depend on otherwise; None: they are not shared. Their memory belongs to this process, or is
    copied on the first write.
    """
    if key is None or _offered is None:
        return make()
    import torch

    before = torch.get_rng_state()
    found = _read(_offered, key, before)
    if found is not None:
        return found
    weights = make()
    _keep(_offered, {"key": key, "before": before, "after": torch.get_rng_state(), "weights": weights})
    return weights


def _read(file: int, key: str, before: Any) -> dict[str, Any] | None:
    """Return the weights, and set the generator to its state after them; None: the file has others or none."""
    import torch

    if not _has_weights(file):
        return None
    try:
        content: Mapping[str, Any] = torch.load(f"/proc/self/fd/{file}", mmap=True, weights_only=True)
    except (OSError, RuntimeError) as error:
        print(
            f"note: random weights are made again, because those of an earlier run cannot be read: {error}", flush=True
        )
        return None
    if content["key"] != key or not torch.equal(content["before"], before):
        return None
    torch.set_rng_state(content["after"].clone())
    print("random weights: from memory, where an earlier run left them", flush=True)
    return dict(content["weights"])


def _keep(file: int, content: dict[str, Any]) -> None:
    """Write the file, unless it has weights, another worker writes it, or the machine has little memory."""
    from distexp.system.cgroups import available_memory

    size = sum(tensor.numel() * tensor.element_size() for tensor in content["weights"].values())
    if size > MEMORY_SHARE * available_memory():
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    try:
        if not _has_weights(file):
            import torch

            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            with open(file, "wb", closefd=False) as stream:  # to close any descriptor of the file would unlock it
                torch.save(content, stream)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            os.ftruncate(file, 0)  # A later run may try again.
        print(f"note: random weights are not kept for other runs: {error}", flush=True)
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)


def _has_weights(file: int) -> bool:
    """Return whether the file is complete: only then it is sealed."""
    return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)

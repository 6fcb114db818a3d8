"""Sessions of NVML, the library that reports the state of NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BUSY_MIB = 2048
"""A GPU with more memory in use counts as busy. The driver keeps several hundred MiB; a training takes GiB."""


class NvmlUnavailableError(RuntimeError):
    """NVML cannot be initialized on this machine."""


@contextmanager
def nvml_session() -> Iterator[Any]:
    """Initialize NVML, yield the module ``pynvml``, and shut NVML down. Sessions may be nested.

    Raises:
        NvmlUnavailableError: NVML cannot be initialized, for example because there is no driver.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(str(error)) from error
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def as_text(value: str | bytes) -> str:
    """Return a string of NVML as text; older versions of pynvml return bytes."""
    return value.decode() if isinstance(value, bytes) else value

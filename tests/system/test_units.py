"""Tests of memory with its unit."""

from __future__ import annotations

import pytest

from distexp.system.units import format_memory


@pytest.mark.parametrize(
    ("mib", "text"),
    [
        (81_920.0, "80.0 GiB"),
        (1536.0, "1.5 GiB"),
        (102.5, "0.1 GiB"),
        (102.0, "102 MiB"),
        (0.632, "0.632 MiB"),
        (0.0, "0 MiB"),
    ],
)
def test_small_memory_is_in_mb(mib: float, text: str) -> None:
    assert format_memory(mib) == text

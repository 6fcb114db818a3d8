"""Units of memory."""

from __future__ import annotations

MIB = 2**20
"""Bytes in a MiB."""

GIB = 2**30
"""Bytes in a GiB."""

"""Checks of arguments that several benchmarks have."""

from __future__ import annotations

import argparse
import os


def positive(text: str) -> int:
    """Return a whole number from 1. Argparse prints the message of a wrong one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def gpu_error(gpus: int) -> str | None:
    """Return an error if CUDA_VISIBLE_DEVICES has fewer GPUs than needed. Without this variable, all are visible."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [device for device in (value or "").split(",") if device]
    if value is None or gpus <= len(visible):
        return None
    return f"--gpus={gpus}, but CUDA_VISIBLE_DEVICES={value} has {len(visible)}: lower it"

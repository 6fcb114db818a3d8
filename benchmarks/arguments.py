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
    visible = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if not visible or gpus <= len(visible):
        return None
    return f"--gpus: {gpus} is more than the {len(visible)} of CUDA_VISIBLE_DEVICES={','.join(visible)}: lower it"

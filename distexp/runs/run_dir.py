"""Where the output of workers goes: ``logs/node<k>/``, a file a rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def node_logs(run_dir: Path, node: int) -> Path:
    """The folder of a node's logs."""
    return run_dir / "logs" / f"node{node}"


def log_path(run_dir: Path, node: int, rank: int) -> Path:
    """What a rank prints."""
    return node_logs(run_dir, node) / f"rank{rank}.log"


def error_path(run_dir: Path, node: int, rank: int) -> Path:
    """Why a rank failed, as JSON."""
    return node_logs(run_dir, node) / f"rank{rank}.error.json"


def agent_error_path(run_dir: Path, node: int) -> Path:
    """Why a node's agent started no worker, as JSON."""
    return node_logs(run_dir, node) / "agent.error.json"


def exit_status_path(run_dir: Path, node: int) -> Path:
    """How a node's agent ended, as JSON, for the head of a run whose nodes are apart."""
    return node_logs(run_dir, node) / "exit.json"


def memory_path(run_dir: Path, node: int, rank: int) -> Path:
    """What the allocator of a failed rank held, as JSON."""
    return node_logs(run_dir, node) / f"rank{rank}.memory.json"


def redirect_output(path: Path) -> None:
    """Sends this process' output, that of libraries in C included, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]

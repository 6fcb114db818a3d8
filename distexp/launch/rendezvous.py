"""Rendezvous of a run's nodes: the head's address and port, in a file of the run directory."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from distexp.runs.json_files import write_json
from distexp.runs.run_dir import RENDEZVOUS


@dataclass(frozen=True)
class Rendezvous:
    """Address and port of the head, with the attempt that they are valid for."""

    address: str
    port: int
    attempt: str = ""


def reserve_port(address: str, run_dir: Path, attempt: str = "") -> tuple[Rendezvous, socket.socket]:
    """Find a free port on the head, and write it for the other nodes.

    Returns:
        The rendezvous, and a bound socket that does not listen. While the socket is open, the kernel gives the port
        to no process that asks for a free one. torch sets SO_REUSEADDR, so it can still listen on the port.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    found = Rendezvous(address, holder.getsockname()[1], attempt)
    write_json(run_dir / RENDEZVOUS, asdict(found))
    return found, holder


def read_rendezvous(run_dir: Path) -> Rendezvous | None:
    """Return the rendezvous of the latest attempt, or None if the head has not written it."""
    try:
        return Rendezvous(**json.loads((run_dir / RENDEZVOUS).read_text()))
    except FileNotFoundError:
        return None


def wait_for_head(run_dir: Path, timeout_s: float, attempt: str = "") -> Rendezvous:
    """Wait for the rendezvous of an attempt and return it.

    Raises:
        TimeoutError: if the head does not write it in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = read_rendezvous(run_dir)
        if found is not None and found.attempt == attempt:
            return found
        time.sleep(0.05)
    raise TimeoutError(f"node 0 wrote no {RENDEZVOUS} to {run_dir} within {timeout_s:g} s")

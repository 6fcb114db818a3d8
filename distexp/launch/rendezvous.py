"""How the nodes of a run find each other: a port that the head itself holds, left in the run directory."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from distexp.runs.record import write_json

FILE = "rendezvous.json"


@dataclass(frozen=True)
class Rendezvous:
    """The head's address and port."""

    address: str
    port: int
    attempt: str = ""  # tells it from what an earlier attempt of the run left


def reserve(address: str, run_dir: Path, attempt: str = "") -> tuple[Rendezvous, socket.socket]:
    """Finds a free port on the head and tells the other nodes.

    The returned socket is bound but does not listen: while it is open the kernel gives the port to
    nobody who asks for any, and torch, which sets SO_REUSEADDR as well, may still listen on it.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    found = Rendezvous(address, holder.getsockname()[1], attempt)
    write_json(run_dir / FILE, asdict(found))
    return found, holder


def read_rendezvous(run_dir: Path) -> Rendezvous | None:
    """What the head of the latest attempt has told; None before it has."""
    try:
        return Rendezvous(**json.loads((run_dir / FILE).read_text()))
    except FileNotFoundError:
        return None


def wait_for_head(run_dir: Path, timeout_s: float, attempt: str = "") -> Rendezvous:
    """Waits for the head's file of this attempt; TimeoutError where it does not come."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = read_rendezvous(run_dir)
        if found is not None and found.attempt == attempt:
            return found
        time.sleep(0.05)
    raise TimeoutError(f"the head node left no {FILE} in {run_dir} within {timeout_s:g} s")

"""Tests of an unreachable and a slow Hub, with real requests to this machine."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from distexp.system.cache_dir import CONNECT_TIMEOUT_S
from tests.helpers.runs import REPOSITORY, run_distexp

UNREACHABLE = "http://127.0.0.1:9"  # the discard port: connections are refused


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("dataset=squad",),
            "dataset.path=rajpurkar/squad is neither a local folder nor available from the local cache",
        ),
        pytest.param(
            ("model=hf", "model.name=no-such-user/no-such-model"),
            "model.tokenizer=no-such-user/no-such-model is neither a folder",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_unreachable_hub_is_reported_once_without_retries(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    env = {"HF_ENDPOINT": UNREACHABLE, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    done = run_distexp("strategy=single", "cluster.device=cpu", *overrides, cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert (
        f"note: {UNREACHABLE} cannot be reached ([Errno 111] Connection refused): only its local cache" in done.stdout
    )
    assert message in " ".join(done.stdout.replace("│", " ").split())
    assert "Retry" not in done.stdout
    assert "Traceback" not in done.stdout


class SlowHandler(BaseHTTPRequestHandler):
    """Handler that responds after the connection timeout."""

    def do_HEAD(self) -> None:
        time.sleep(CONNECT_TIMEOUT_S + 1)
        self.send_response_only(404)
        self.end_headers()


@pytest.fixture
def slow_hub() -> Iterator[str]:
    """Yield the URL of a slow Hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_slow_hub_counts_as_reachable(slow_hub: str) -> None:
    program = (
        "from huggingface_hub import constants\n"
        "from distexp.system.cache_dir import offline_if_unreachable\n"
        "offline_if_unreachable('no-such-user/no-such-model')\n"
        "print(constants.is_offline_mode())"
    )
    env = {"HF_ENDPOINT": slow_hub, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr

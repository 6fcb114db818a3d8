"""The hub where it is not there, and where it is slow: real requests, to this machine."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from distexp.system.hub import CONNECT_S
from tests.helpers.runs import REPOSITORY, run_distexp

NOBODY = "http://127.0.0.1:9"  # discard: refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("dataset=squad",), "dataset.path=rajpurkar/squad is neither a local folder, nor in the local cache"),
        pytest.param(
            ("model=hf", "model.name=nobody/nothing"),
            "model.tokenizer=nobody/nothing is neither a folder",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_hub_that_is_not_there_is_given_up_soon_and_quietly(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    env = {"HF_ENDPOINT": NOBODY, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    done = run_distexp("strategy=single", "cluster.device=cpu", *words, cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert f"note: {NOBODY} cannot be reached ([Errno 111] Connection refused): only its local cache" in done.stdout
    assert said in done.stdout
    assert "Retry" not in done.stdout
    assert "Traceback" not in done.stdout


class Slow(BaseHTTPRequestHandler):
    """Answers, when it is asked long enough."""

    def do_HEAD(self) -> None:
        time.sleep(CONNECT_S + 1)
        self.send_response_only(404)
        self.end_headers()


@pytest.fixture
def slow() -> Iterator[str]:
    """The address of a hub behind a slow network."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_slow_hub_is_waited_for(slow: str) -> None:
    program = (
        "from huggingface_hub import constants\n"
        "from distexp.system.hub import offline_if_unreachable\n"
        "offline_if_unreachable('nobody/nothing')\n"
        "print(constants.is_offline_mode())"
    )
    env = {"HF_ENDPOINT": slow, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr

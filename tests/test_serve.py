"""Tests of ``distexp serve``: what it shows, whom it answers, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import sync_playwright

from distexp.runs import attempts
from distexp.runs.memory_trace import CPU, MemorySample, MemoryTraceWriter
from distexp.runs.run_dir import memory_trace_path
from tests.helpers.records import record
from tests.helpers.runs import REPOSITORY, make_spec
from tests.report.page.test_accessibility import PROBLEMS
from tests.test_status import write_sweep

LIMIT_S = 240.0


@dataclass
class Served:
    """A sweep with a run that has ended and a running one, and the command that serves it."""

    sweep: Path
    process: subprocess.Popen[str]
    port: int
    token: str

    def get(self, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
        """Send a request with a path as it is; return the status and the body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{self.port}")
        connection.endheaders()
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
        connection.close()
        return response.status, body

    def wait_for_version(self, version: int) -> dict[str, object]:
        """Wait until the page was built so often, and return the state."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            state: dict[str, object] = json.loads(self.get(f"/{self.token}/state")[1])
            if state.get("version") == version:
                return state
            assert time.monotonic() < deadline, state
            time.sleep(0.5)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    sweep = folder / "sweep"
    write_sweep(sweep, ("strategy=ddp",))
    running = sweep / "1"
    running.mkdir()
    spec = make_spec("cluster.device=cpu")
    spec.run.number = 1
    spec.write(running)
    attempts.write_launcher_process(running)
    events = [{"unix_time_s": 1.0, "phase": "train", "total_steps": 40}]
    steps = [{"step": step, "loss": 4.0 - step / 10, "samples_per_second": 9.0} for step in (5, 10)]
    for name, entries in (("events.jsonl", events), ("metrics.jsonl", steps)):
        (running / name).write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    trace = MemoryTraceWriter(memory_trace_path(running, 0))
    trace.append([MemorySample(1.0, "train", CPU, 0, 2048.0)])
    (folder / "secret.json").write_text("secret")
    (sweep / "0" / "out.json").symlink_to(folder / "secret.json")
    (sweep / "0" / "model").mkdir()
    (sweep / "0" / "model" / "config.json").write_text("secret")
    (sweep / "0" / "foreign.html").write_text("<script>secret</script>")
    process = subprocess.Popen(
        [sys.executable, "-m", "distexp", "serve", str(sweep)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=(folder / "errors.txt").open("w"),
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,  # noqa: PLW1509
    )
    assert process.stdout is not None
    found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/\n", process.stdout.readline())
    assert found is not None
    yield Served(sweep, process, int(found[1]), found[2])
    process.kill()


def test_it_listens_on_this_machine_only(served: Served) -> None:
    listening = [
        found.laddr for found in psutil.Process(served.process.pid).net_connections() if found.status == "LISTEN"
    ]
    assert listening == [("127.0.0.1", served.port)]


def test_it_answers_only_who_knows_the_token_and_by_its_own_name(served: Served) -> None:
    page = f"/{served.token}/"
    assert served.get(page)[0] == 200
    assert served.get(page, host=f"localhost:{served.port}")[0] == 200
    for path in ("/", "/state", f"/{served.token[:-1]}/", f"/{served.token}x/state", "/%ff/state"):
        status, body = served.get(path)
        assert (status, "open the address" in body) == (403, True), path
    for host in ("evil.example", f"evil.example:{served.port}", "127.0.0.1:1", f"127.0.0.1:{served.port}.evil.example"):
        assert served.get(page, host=host)[0] == 403, host
    for method in ("POST", "PUT", "DELETE"):
        assert served.get(page, method=method)[0] == 501


def test_a_client_that_leaves_or_asks_for_no_address_prints_nothing(served: Served) -> None:
    for request in (b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\n"):
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(request)
            if request.endswith(b"\r\n\r\n"):
                assert client.recv(100).startswith(b"HTTP/1.0 403")
            # The client resets the connection.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert served.get(f"/{served.token}/")[0] == 200
    assert (served.sweep.parent / "errors.txt").read_text() == ""


def test_it_serves_no_file_outside_of_the_sweep_and_no_weights(served: Served) -> None:
    assert json.loads(served.get(f"/{served.token}/0/record.json")[1])["status"] == "completed"
    outside = (
        "../secret.json",
        "%2e%2e/secret.json",
        "0/../../secret.json",
        "..%2fsecret.json",
        "0/out.json",
        "0%00.json",
    )
    absolute = f"/{served.sweep.parent / 'secret.json'}"
    for path in (*outside, absolute, "0/model/config.json", "0/foreign.html", "0", "missing.json"):
        assert served.get(f"/{served.token}/{path}") == (404, "no such file\n"), path


def test_the_folders_that_the_page_links_are_listed(served: Served) -> None:
    """The page has links to ../0/ and ../0/memory/."""
    status, text = served.get(f"/{served.token}/0/")
    assert (status, '<a href="./record.json">record.json</a>' in text) == (200, True)
    assert "model" not in text
    assert '<a href="./node0.csv">' in served.get(f"/{served.token}/1/memory/")[1]
    for path in ("0/model/", "../", "%2e%2e/", "missing/"):
        assert served.get(f"/{served.token}/{path}") == (404, "no such file\n"), path


@pytest.mark.slow
def test_a_browser_shows_the_running_run_and_the_report_of_the_others(served: Served) -> None:
    chromium = shutil.which("chromium")
    assert chromium, "chromium is missing: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, timeout=1000 * LIMIT_S)
        page = browser.new_page()
        page.set_default_timeout(1000 * LIMIT_S)
        errors: list[str] = []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{served.port}/{served.token}/")
        row = page.locator("#active tbody tr")
        row.wait_for()
        texts = row.locator("td").all_inner_texts()
        assert [texts[n] for n in (0, 1, 3, 4, 6)] == ["1", "train", "10/40", "3.0000", "CPU 2.0 GiB"]
        assert row.locator("polyline").count() == 1
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            assert page.evaluate(PROBLEMS) == [], scheme
        report = page.frame_locator("#report")
        report.locator("#runs table tbody tr").first.wait_for()
        assert "1 completed, 1 running" in page.locator("#summary").inner_text()
        with (served.sweep / "1" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 20, "loss": 2.5, "samples_per_second": 9.0}) + "\n")
        page.get_by_text("20/40").wait_for()
        record(1, overrides=("strategy=fsdp",)).write(served.sweep / "1")
        page.get_by_text("2 completed").first.wait_for()
        page.locator("#active").wait_for(state="hidden")
        served.wait_for_version(2)
        report.get_by_text("Runs: 2 completed").wait_for()
        assert errors == []
        browser.close()


def test_ctrl_c_ends_it_with_code_0(served: Served) -> None:
    served.process.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert served.process.wait(LIMIT_S) == 0
    assert time.monotonic() - started < 5  # measured: 0.1 s


def test_a_folder_without_runs_and_a_taken_port_are_refused(served: Served, tmp_path: Path) -> None:
    for arguments, code, text in (
        ([str(tmp_path)], 2, "contains no run"),
        ([str(served.sweep), "--port", "70000"], 2, "--port 70000: it must be from 0 to 65535"),
    ):
        command = [sys.executable, "-m", "distexp", "serve", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
        assert done.returncode == code
        assert text in done.stderr

"""Command ``distexp serve [DIR]``: the report page of a sweep, live while its runs are running.

The server is for the user of this machine: it listens on the loopback interface, each address contains a random token,
and a request can change nothing. The process of ``distexp report`` builds the page again when a run has ended.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from distexp.cli.main import CommandParser
from distexp.console.sweep_table import RunLine, count_states
from distexp.exceptions import describe_os_error, first_line, print_error, printable, run_until_pipe_closes
from distexp.runs.record import choose_newest_sweep, not_a_sweep
from distexp.runs.run_dir import CHECKPOINTS, METRICS, MODEL, REPORT, memory_trace_paths
from distexp.runs.run_state import RunState, read_progress
from distexp.status import DIRECTORY_HELP, not_started, read_folder
from distexp.system.files import PACKAGE, Tail, nan_to_none, open_file
from distexp.system.processes import end_tree, start_module
from distexp.system.silence import set_step

HOST = "127.0.0.1"
READ_S, READ_QUEUE_S, SLOWDOWN = 2.0, 10.0, 10
"""Shortest time between two readings of the runs, and of a queue. Readings take at most a tenth of the time."""

BUILD_S = 10.0
"""Shortest time between two builds of the page, so that they slow no training down."""

MAX_POINTS = 200  # of a curve
AWAITED = "The report appears when a run has ended", "The report is being made"
TYPES = {
    **{f".{name}": f"text/{name}; charset=utf-8" for name in ("csv", "html")},
    **{f".{name}": "text/plain; charset=utf-8" for name in ("json", "jsonl", "log", "md", "yaml", "tex")},
    **{".svg": "image/svg+xml", ".png": "image/png", ".pdf": "application/pdf"},
    **{".gz": "application/gzip", ".parquet": "application/octet-stream"},
}
"""Types of the files that are served, by suffix."""

UNSERVED = {CHECKPOINTS, MODEL}
"""Folders whose files are not served, because they have weights."""

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
}
PAGE_POLICY = (
    "default-src 'none'; style-src 'nonce-{0}'; script-src 'nonce-{0}'; connect-src 'self'; frame-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
FILE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the page until Ctrl-C, and return 0; 1 if the port is taken, 2 if it is no port or DIR is not a sweep."""
    parser = CommandParser(
        prog="distexp serve",
        description="Show the report page of a sweep in a browser on this machine, live while runs are running. "
        "It writes DIR/report, as distexp report does.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", nargs="?", help=DIRECTORY_HELP)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port (default: a free one)")
    options = parser.parse_args(arguments)
    directory = options.directory or choose_newest_sweep()
    if not read_folder(directory).runs:
        print_error(not_a_sweep(directory, "run"))
        return 2
    try:
        server = Server(directory.absolute(), options.port)
    except (OSError, OverflowError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else "it must be from 0 to 65535"
        print_error(f"--port {options.port}: {reason}: give another one, or leave it out")
        return 1 if isinstance(error, OSError) else 2
    try:
        print(f"{server.address}\nCtrl-C ends it. The runs continue.", flush=True)
        set_step("serving")
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.end()
    return 0


@dataclass
class Followed:
    """An active run: its progress line, and the losses of its metrics."""

    line: RunLine
    metrics: Tail
    losses: list[tuple[int, float | None]] = field(default_factory=list)

    def read(self) -> list[tuple[int, float | None]]:
        """Return the steps up to now with their losses, thinned out."""
        self.losses += [(entry["step"], entry.get("loss")) for entry in self.metrics.read_entries() if "step" in entry]
        if len(self.losses) > 2 * MAX_POINTS:
            self.losses = self.losses[:: len(self.losses) // MAX_POINTS]
        return self.losses


class Server(ThreadingHTTPServer):
    """Server of the page of one sweep. Its main thread reads the runs and starts the builds."""

    def __init__(self, directory: Path, port: int) -> None:
        super().__init__((HOST, port), Handler)
        self.directory, self.token = directory, secrets.token_urlsafe(24)
        self.asked = time.monotonic()  # when a browser has last requested the state
        self.state = b"{}"
        self._followed: dict[Path, Followed] = {}
        self._next_read_s = self._next_build_s = 0.0
        self._built: object = None  # the runs of the latest build
        self._build: subprocess.Popen[bytes] | None = None
        self._log = open(os.memfd_create("distexp-serve"), "w+")  # noqa: SIM115
        self.version, self._note = 0, ""

    @property
    def address(self) -> str:
        """Return the address of the page, with its token."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> set[str]:
        """Return the names of this server in a request. Another name is that of a website that leads here."""
        return {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    def service_actions(self) -> None:
        """Read the runs, and build the page if one has ended. The server calls it twice a second."""
        started = time.monotonic()
        self._end_build()
        if started < self._next_read_s or started - self.asked > 60:  # No browser shows the page.
            return
        try:
            self._read(started)
        except OSError as error:  # A file may be moved or removed at any time.
            self._note = printable(describe_os_error(error))

    def _read(self, started: float) -> None:
        found = read_folder(self.directory)
        ended = frozenset((run.directory, run.state) for run in found.runs if run.record is not None)
        if ended and ended != self._built and self._build is None and started >= self._next_build_s:
            self._built = ended
            self._start_build()
        notes = [text for sweep in found.sweeps for text in not_started(sweep)]
        state = {
            "folder": printable(str(self.directory)),
            "summary": ", ".join([count_states(found.runs), *notes]),
            "report": self._note or ("" if self.version else AWAITED[bool(ended)]),
            "version": self.version,
            "active": [self._describe(row.run, row.overrides) for row in found.rows() if row.run.is_active],
        }
        self.state = json.dumps(nan_to_none(state), allow_nan=False).encode()
        shortest = READ_QUEUE_S if any(run.job for run in found.runs) else READ_S
        self._next_read_s = time.monotonic() + max(shortest, SLOWDOWN * (time.monotonic() - started))

    def _describe(self, run: RunState, overrides: str) -> dict[str, Any]:
        progress = read_progress(run.directory)
        followed = self._followed.get(run.directory)
        if followed is None:
            traces = memory_trace_paths(run.directory)
            followed = Followed(RunLine([*map(Tail, traces)]), Tail(run.directory / METRICS))
            if traces:  # Without them the run has just started.
                self._followed[run.directory] = followed
        state = run.state if run.state != "running" else progress.phase or "start"
        return {
            "number": run.number,
            "state": printable(f"{state}: {run.reason}" if run.reason else state),
            "step": progress.step,
            "steps": progress.steps,
            "loss": None if progress.loss is None else f"{progress.loss:.4f}",
            "losses": followed.read(),
            "memory": followed.line.used_memory(),
            "overrides": overrides,
        }

    def _start_build(self) -> None:
        def at_low_priority(python: Sequence[str]) -> list[str]:
            return ["nice", "-n", "19", sys.executable, *python]

        self._log.truncate(0)
        report = ("distexp.report", str(self.directory))
        self._build = start_module(*report, env=os.environ, output=self._log, command=at_low_priority)

    def _end_build(self) -> None:
        if self._build is None or (code := self._build.poll()) is None:
            return
        self._build, self._next_build_s = None, time.monotonic() + BUILD_S
        self.version += code == 0
        self._log.seek(0)
        last = self._log.read().strip().rpartition("\n")[2]
        self._note = "" if code == 0 else f"The report was not built: {printable(last)}"

    def end(self) -> None:
        """Free the port, and end a build."""
        self.server_close()
        if self._build is not None:
            end_tree(self._build, 0.2)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an unexpected error. A browser closes the connection of a page that it has left."""
        error = sys.exception()
        if error is not None and not isinstance(error, ConnectionError | TimeoutError):
            print_error(f"serve: {type(error).__name__}: {first_line(error)}")


def list_folder(folder: Path) -> str:
    """Return a page with links to the files and folders of a folder that are served. Raise OSError."""
    found = [f"{each.name}/" if each.is_dir() else each.name for each in sorted(folder.iterdir())]
    served = [
        name for name in found if name.rstrip("/") not in UNSERVED and (Path(name).suffix in TYPES or "/" in name)
    ]
    links = "".join(f'<li><a href="{quote(f"./{name}")}">{escape(name)}</a></li>' for name in served)
    title = escape(folder.name)
    return f"<!DOCTYPE html><meta charset=utf-8><title>{title}</title><h1>{title}</h1><ul>{links}</ul>"


class Handler(BaseHTTPRequestHandler):
    """Answers to GET requests. Others are refused by the base class."""

    server: Server
    timeout = 10
    server_version, sys_version = "distexp", ""

    def do_GET(self) -> None:
        """Return the page, the state of the runs, or a file of the sweep."""
        try:
            token, _, path = unquote(urlsplit(self.path).path).removeprefix("/").partition("/")
        except ValueError:  # not an address
            token = path = ""
        is_known = hmac.compare_digest(token.encode(), self.server.token.encode())
        if self.headers.get("Host") not in self.server.hosts or not is_known:
            self._answer(b"open the address that distexp serve has printed\n", "text/plain", status=403)
        elif path == "":
            nonce = secrets.token_urlsafe(16)
            page = (PACKAGE / REPORT / "page" / "live.html").read_text().replace("NONCE", nonce)
            self._answer(page.encode(), TYPES[".html"], PAGE_POLICY.format(nonce))
        elif path == "state":
            self.server.asked = time.monotonic()
            self._answer(self.server.state, "application/json")
        else:
            self._send_file(path)

    def _send_file(self, path: str) -> None:
        root = self.server.directory.resolve()
        try:
            file = (root / path).resolve()
            is_page = file == root / REPORT / "report.html" and self.server.version > 0
            is_allowed = file.is_relative_to(root) and not UNSERVED & set(file.relative_to(root).parts)
            if is_allowed and path.endswith("/"):
                self._answer(list_folder(file).encode(), TYPES[".html"])
                return
            kind = TYPES.get(file.suffix)
            if not is_allowed or kind is None or (file.suffix == ".html" and not is_page):
                raise FileNotFoundError
            with open_file(file) as opened:
                content = opened.read()
        except (OSError, ValueError):
            self._answer(b"no such file\n", "text/plain", status=404)
            return
        self._answer(content, kind, None if is_page else FILE_POLICY)  # The page has a policy.

    def _answer(self, content: bytes, kind: str, policy: str | None = FILE_POLICY, status: int = 200) -> None:
        self.send_response(status)
        policies = {} if policy is None else {"Content-Security-Policy": policy}
        length = {"Content-Type": kind, "Content-Length": str(len(content))}
        for name, value in {**HEADERS, **policies, **length}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print no line for each request."""


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))

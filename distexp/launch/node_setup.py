"""What a node needs before its workers start: enough GPUs, their environment, and the C++ operators of the strategy.

The operators are built before the memory sampler starts. A compiler takes minutes and gigabytes, so a run that compiled
while it is measured would report the compiler's memory.
"""

import errno
import hashlib
import json
import os
import platform
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from distexp.exceptions import file_size_hint
from distexp.resolve.resources import launcher_traits
from distexp.runs.attempts import write_error_file
from distexp.runs.record import RunSpec
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import AGENT_ERROR, OPERATORS, OPERATORS_LOG
from distexp.runs.texts import is_full_disk
from distexp.strategies.base import load_strategy
from distexp.strategies.zero import ds_operators
from distexp.strategies.zero.ds_operators import BATON, is_older_than_sources
from distexp.system.cgroups import Gpu, visible_gpus
from distexp.system.files import FULL, PACKAGE, REFUSALS, Entry, Tail, append_line, write_json
from distexp.system.processes import end_tree, start_module


def lacks_gpus(spec: RunSpec, run_dir: Path, node: int) -> bool:
    """Return whether a node has fewer GPUs than workers, and write an error if so."""
    found, needed = len(node_gpus(spec, node)), spec.workers_per_node
    if spec.config.cluster.device != "cuda" or found >= needed:
        return False
    message = (
        f"cluster.workers_per_node={needed} needs {needed} GPUs, but node {node} ({socket.gethostname()}) has {found}: "
        "request nodes with more GPUs (cluster.constraint, cluster.partition), or set cluster.device=cpu"
    )
    write_error_file(AGENT_ERROR.path(run_dir, node), RunError("TooFewGpus", message, "setup"))
    return True


def lacks_operators(spec: RunSpec, run_dir: Path, node: int) -> bool:
    """Build the operators that the run needs; return whether that failed, and write an error if so.

    On simulated nodes only the head builds. Custom strategies are not asked: their import may import torch.
    """
    is_own = spec.config.strategy._target_.startswith(f"{PACKAGE.name}.")
    if not is_own or spec.config.is_preflight or (is_simulated(spec) and node > 0):
        return False
    environment = worker_environment(spec, node)
    missing = missing_operators(load_strategy(spec.config).operators(spec.config), environment)
    if not missing:
        return False
    try:
        with (run_dir / OPERATORS).open("a") as file:

            def report(entry: Entry) -> None:
                append_line(file, {"unix_time_s": time.time(), "node": node, **entry})

            build_operators(missing, environment, OPERATORS_LOG.path(run_dir, node), report)
    except OperatorError as error:
        name = "DiskFull" if is_full_disk(error) else "OperatorError"
        log = str(OPERATORS_LOG.path(run_dir, node).relative_to(run_dir))
        write_error_file(AGENT_ERROR.path(run_dir, node), RunError(name, str(error), "compile", log=log))
        return True
    return False


DEBUG_VARIABLES = {
    "NCCL_DEBUG": "INFO",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
"""Variables of the workers with ``cluster.debug=true``."""


def is_simulated(spec: RunSpec) -> bool:
    """Return whether all nodes of a run are on this machine."""
    return launcher_traits(spec.config).runs_here


def node_gpus(spec: RunSpec, node: int) -> tuple[Gpu, ...]:
    """Return the GPUs of a node's workers. Simulated nodes share the GPUs of this machine."""
    if spec.config.cluster.device != "cuda":
        return ()
    first = node * spec.workers_per_node if is_simulated(spec) else 0
    return visible_gpus()[first:][: spec.workers_per_node]


def worker_environment(spec: RunSpec, node: int) -> dict[str, str]:
    """Return the environment of a node's workers: that of this process, with the settings of the run."""
    cluster = spec.config.cluster
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **(DEBUG_VARIABLES if cluster.debug else {}),
        **cluster.environment,
        "OMP_NUM_THREADS": str(cluster.cpus_per_worker),
        "DS_ACCELERATOR": cluster.device,
    }
    if cluster.device == "cuda" and spec.nodes > 1 and is_simulated(spec):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in node_gpus(spec, node))
    return {**environment, EXTENSIONS_DIR: str(extensions_dir(environment))}


MESSAGE = re.compile(rf"{ds_operators.REPORT_PREFIX} (compiling|built|skipped|waiting for) (\S+) ?(.*)")
"""Line of the process that builds: what happens, an operator, and the rest, which is the library or a reason."""

STEP = re.compile(r"\[(?P<step>\d+)/(?P<steps>\d+)\] ")
"""Line of Ninja."""

ERROR = re.compile(r"\b(fatal )?error:|^\w*Error\b|not found", re.IGNORECASE)
"""Line of the compiler or of Python that names an error."""

MAX_REASON = 300
"""Characters of a line of the compiler in a message."""

BUILD_TIMEOUT_S = 25 * 60.0
REPORT_EVERY_S = 5.0
POLL_S, GRACE_S = 0.2, 2.0


class OperatorError(Exception):
    """An operator that could not be compiled."""


def build_operators(
    names: Sequence[str], environment: Mapping[str, str], log: Path, report: Callable[[Entry], None]
) -> None:
    """Build operators in a process that ends with this one; call it from the main thread.

    ``report`` gets each change: ``compiling`` with an operator, ``step`` and ``steps``, ``waiting`` with the reason,
    ``elapsed_s`` every few seconds, and at the end ``compiled_s``, or ``waited_s`` if another run compiled. Raise
    OperatorError if the build fails or takes longer than ``BUILD_TIMEOUT_S``.
    """
    with log.open("w") as output:
        process = start_module(ds_operators.MODULE, *names, env=environment, output=output)
    try:
        _Build(names, environment, log, report).follow(process)
    finally:
        end_tree(process, GRACE_S)


class _Build:
    """A build, followed through its log."""

    def __init__(
        self, names: Sequence[str], environment: Mapping[str, str], log: Path, report: Callable[[Entry], None]
    ) -> None:
        self.names, self.environment, self.log, self.report = names, environment, log, report
        self.tail, self.started, self.compiles, self.waits = Tail(log), time.monotonic(), False, False

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Report each step until the process ends, and mark what it has built."""
        reported_s = 0.0
        while process.poll() is None:
            self._read()
            if self.elapsed_s > BUILD_TIMEOUT_S:
                raise self._failure(f"it took longer than {BUILD_TIMEOUT_S / 60:.0f} minutes")
            if self.compiles and self.elapsed_s - reported_s >= REPORT_EVERY_S:
                reported_s = self.elapsed_s
                self.report({"elapsed_s": round(self.elapsed_s)})
            time.sleep(POLL_S)
        self._read()
        if process.returncode:
            # The first line that names an error, else the last line.
            lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            error = next((line for line in lines if ERROR.search(line)), lines[-1] if lines else "no output")
            raise self._failure(error)
        if self.compiles:
            self.report({"compiled_s": round(self.elapsed_s)})
        elif self.waits:
            self.report({"waited_s": round(self.elapsed_s)})

    def _read(self) -> None:
        for line in self.tail.read_lines():
            if step := STEP.match(line):
                self.compiles = True
                counts = {key: int(text) for key, text in step.groupdict().items()}
                self.report({**counts, "elapsed_s": round(self.elapsed_s)})
            elif message := MESSAGE.match(line):
                kind, name, rest = message.groups()
                if kind == "compiling":
                    self.compiles = True
                    self.report({"compiling": name})
                elif kind == "waiting for":
                    self.waits = True
                    self.report({"waiting": f"{name} {rest}".strip()})
                else:
                    with suppress(OSError):  # Without a mark, the next run checks again.
                        extensions_dir(self.environment).mkdir(parents=True, exist_ok=True)
                        write_json(_mark_path(name, self.environment), _describe(rest or None))

    def _failure(self, reason: str) -> OperatorError:
        advice = (
            f"The output of the compiler is in {self.log}: check the compiler with distexp doctor, or choose another "
            "strategy"
        )
        folder, named = extensions_dir(self.environment), re.search(r"\[Errno \d+\] .*: '([^']+)'", reason)
        number = next((number for number in (*REFUSALS, errno.EACCES) if os.strerror(number) in reason), None)
        if number is not None:
            reason = os.strerror(number)  # The name of a C++ function before it may be longer than a message.
        if number in FULL:
            room = f"Make room for {folder} and in {self.environment.get('TMPDIR', '/tmp')}"
            elsewhere = f"{room}, or set {EXTENSIONS_DIR} to a folder on another disk"
            limit = file_size_hint(number)
            advice = f"{limit[0].upper()}{limit[1:]}" if limit else elsewhere
        elif number is not None or (named is not None and folder.is_relative_to(named[1])):
            advice = f"Make {folder} writable, or set {EXTENSIONS_DIR} to a folder that you can write"
        return OperatorError(
            f"DeepSpeed's operators ({', '.join(self.names)}) could not be compiled: {reason[:MAX_REASON]}. {advice}"
        )


# Marks of built C++ operators, in PyTorch's cache of extensions: a later run need not import torch to check.

EXTENSIONS_DIR, OWN_FOLDER = "TORCH_EXTENSIONS_DIR", "distexp-"
STEERING = ("DS_ACCELERATOR", "TORCH_CUDA_ARCH_LIST", "CXX", "CC", "CUDA_HOME")
"""Environment variables that change what is compiled."""


def missing_operators(names: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """Return the operators that are not known to be built; none without DeepSpeed, which a worker then reports."""
    if not _installation("deepspeed"):
        return []
    return [name for name in names if not _is_built(_mark_path(name, environment))]


def _is_built(mark: Path) -> bool:
    """Return whether the library is the one that was built when the mark was written, and no process builds it.

    The lock may be that of a killed process, for which all workers would wait.
    """
    try:
        entry = json.loads(mark.read_text())
        library = entry["library"]
        if library is None:
            return True
        is_same = entry == _describe(library) and not is_older_than_sources(Path(library))
        return is_same and not Path(library).with_name(BATON).exists()
    except (OSError, ValueError, KeyError):
        return False


def _describe(library: str | None) -> dict[str, Any]:
    """Return the content of the mark of a library; None if the operator is not supported here."""
    return {"library": library} | ({} if library is None else {"size": Path(library).stat().st_size})


def _mark_path(name: str, environment: Mapping[str, str]) -> Path:
    """Return the file that marks an operator as built in an environment."""
    return extensions_dir(environment) / f"{OWN_FOLDER}{name}.json"


def extensions_dir(environment: Mapping[str, str]) -> Path:
    """Return the folder in which an environment builds operators.

    Each has its own: Ninja compiles again if the installed DeepSpeed has another path than that of the last build.
    """
    root = environment.get(EXTENSIONS_DIR)
    if root and re.fullmatch(rf"{OWN_FOLDER}[0-9a-f]{{12}}", Path(root).name):  # The environment is that of a worker.
        return Path(root)
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(root) if root else Path(cache).expanduser() / "torch_extensions"
    settings = [platform.python_version(), platform.machine(), _installation("torch"), _installation("deepspeed")]
    settings += [environment.get(variable, "") for variable in STEERING]
    return folder / f"{OWN_FOLDER}{hashlib.sha256(chr(10).join(settings).encode()).hexdigest()[:12]}"


def _installation(package: str) -> str:
    """Return the version and the folder of an installed package; empty if it is not installed."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return ""
    return f"{found.version} {found.locate_file('')}"


def current_environment(device: str) -> dict[str, str]:
    """Return the environment in which a run on a device would build without settings of its own."""
    environment = {**os.environ, "DS_ACCELERATOR": device}
    return {**environment, EXTENSIONS_DIR: str(extensions_dir(environment))}

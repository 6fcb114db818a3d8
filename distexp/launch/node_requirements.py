"""What a node must have before its workers start: enough GPUs, and the C++ operators of the strategy."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from distexp.config.paths import PACKAGE
from distexp.launch.node import is_simulated, node_gpus, worker_environment
from distexp.launch.operator_build import OperatorError, build_operators
from distexp.launch.operator_marks import missing_operators
from distexp.runs.error_files import write_error
from distexp.runs.jsonl import Entry, append_line
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import OPERATORS, agent_error_path, operators_log_path
from distexp.runs.spec import RunSpec
from distexp.strategies.base import load_strategy


def lacks_gpus(spec: RunSpec, run_dir: Path, node: int) -> bool:
    """Return whether a node has fewer GPUs than workers, and write an error if so."""
    found, needed = len(node_gpus(spec, node)), spec.workers_per_node
    if spec.config.cluster.device != "cuda" or found >= needed:
        return False
    message = (
        f"cluster.workers_per_node={needed} needs {needed} GPUs, but node {node} ({socket.gethostname()}) has {found}: "
        "request nodes with more GPUs (cluster.constraint, cluster.partition), or set cluster.device=cpu"
    )
    write_error(agent_error_path(run_dir, node), RunError("TooFewGpus", message, "setup"))
    return True


def lacks_operators(spec: RunSpec, run_dir: Path, node: int) -> bool:
    """Build the operators that the run needs; return whether that failed, and write an error if so.

    On simulated nodes only the head builds.
    """
    if not _may_need_operators(spec) or (is_simulated(spec) and node > 0):
        return False
    environment = worker_environment(spec, node)
    missing = missing_operators(load_strategy(spec.config).operators(spec.config), environment)
    if not missing:
        return False
    try:
        with (run_dir / OPERATORS).open("a") as file:

            def report(entry: Entry) -> None:
                append_line(file, {"unix_time_s": time.time(), "node": node, **entry})

            build_operators(missing, environment, operators_log_path(run_dir, node), report)
    except OperatorError as error:
        write_error(agent_error_path(run_dir, node), RunError("OperatorError", str(error), "compile"))
        return True
    return False


def _may_need_operators(spec: RunSpec) -> bool:
    """Return whether a run trains with a strategy of distexp. Custom ones are not imported: they may import torch."""
    return spec.config.strategy._target_.startswith(f"{PACKAGE.name}.") and not spec.config.is_preflight

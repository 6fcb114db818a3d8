"""One node of a run: ``python -m distexp.launch.agent RUN_DIR NODE``, or a task of a Slurm job.

It starts torchrun for its node's workers, one to a GPU, samples their memory from outside, and ends
them when they hang, when their time is over, or when it is told to. It imports no torch: a node holds
one agent beside its workers, and that must cost next to nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from distexp.launch.outcome import HANG_CODE, STOPPED_CODE, TIMEOUT_CODE, finalize_run
from distexp.launch.rendezvous import Rendezvous, reserve, wait_for_head
from distexp.measure.memory.sampler import Sampler
from distexp.runs import stop_request
from distexp.runs.heartbeat import last_heartbeat
from distexp.runs.record import RunError, write_json
from distexp.runs.run_dir import agent_error_path, node_logs
from distexp.runs.spec import RunSpec
from distexp.system.hardware import Gpu, cpu_count, visible_gpus
from distexp.system.processes import descendants, die_with_parent, end_tree, orphaned, start_module

POLL_S = 0.1
GRACE_S = 4.0
DUMP_S = 2.0
RENDEZVOUS_S = 120.0


class StoppedError(BaseException):
    """The agent was told to end; not an Exception, so that nothing takes it for an error."""


def main() -> None:
    """Runs a node to its end; the exit code tells why it ended, see ``distexp.launch.outcome``."""
    run_dir, node, started = Path(sys.argv[1]), int(sys.argv[2]), time.time()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to answer
    for number in stop_request.SIGNALS:
        signal.signal(number, lambda number, _: stop_request.request_stop(run_dir, signal.Signals(number).name))
    die_with_parent(signal.SIGTERM)
    spec = RunSpec.read(run_dir)
    try:
        code = run_node(spec, run_dir, NodeContext(node), started)
    except StoppedError:
        code = STOPPED_CODE
    if code == STOPPED_CODE and node == 0 and orphaned():
        # The launcher is gone, so nobody else will write the record.
        finalize_run(spec, run_dir, {node: STOPPED_CODE}, started, "the launcher died, and its workers were ended")
    sys.exit(code)


def stop(number: int, frame: FrameType | None) -> None:
    """Answers SIGTERM: the agent ends its workers, and then itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise StoppedError


@dataclass(frozen=True)
class NodeContext:
    """Where an agent stands in its run."""

    node: int
    address: str = "127.0.0.1"  # under which the other nodes find this one
    attempt: str = ""
    peer_failed: Callable[[], bool] = lambda: False  # whether another node has ended badly


def run_node(spec: RunSpec, run_dir: Path, context: NodeContext, started: float) -> int:
    """Starts a node's workers, watches them, and leaves none of them behind."""
    node, logs = context.node, node_logs(run_dir, context.node)
    with ExitStack() as stack:
        if node == 0:
            where, holder = reserve(context.address, run_dir, context.attempt)
            stack.enter_context(holder)
        else:
            where = wait_for_head(run_dir, RENDEZVOUS_S, context.attempt)
        logs.mkdir(parents=True, exist_ok=True)
        if lacks_gpus(spec, run_dir, node):
            return 1
        output = stack.enter_context((logs / "torchrun.log").open("w"))
        torchrun = start_module(
            "torch.distributed.run",
            *torchrun_arguments(spec, node, where, context.address),
            str(run_dir),
            env=worker_environment(spec, node),
            output=output,
        )
        stack.callback(end_tree, torchrun, GRACE_S)
        stack.enter_context(_sampler(spec, run_dir, node))
        return watch(torchrun, spec, run_dir, started, context.peer_failed)


def lacks_gpus(spec: RunSpec, run_dir: Path, node: int) -> bool:
    """Whether a job got fewer GPUs than it has workers, which is written down: there is no use in starting them."""
    found, wanted = len(node_gpus(spec, node)), spec.workers_per_node
    if spec.config.cluster.device != "cuda" or found >= wanted:
        return False
    sentence = (
        f"cluster.workers_per_node={wanted} needs as many GPUs, and node {node} ({socket.gethostname()}) shows the job "
        f"{found}: ask for nodes that have them (cluster.constraint, cluster.partition), or choose cluster.device=cpu"
    )
    cause = RunError("TooFewGpus", sentence, "setup")
    write_json(agent_error_path(run_dir, node), {"unix_time_s": time.time(), **asdict(cause)})
    return True


def watch(
    torchrun: subprocess.Popen[bytes], spec: RunSpec, run_dir: Path, started: float, lost: Callable[[], bool]
) -> int:
    """Waits for the workers to end by themselves, to exceed their time, to hang, or to lose another node."""
    cluster = spec.config.cluster
    deadline = started + cluster.timeout_min * 60 if cluster.timeout_min else float("inf")
    while (code := torchrun.poll()) is None:
        now = time.time()
        if now > deadline:
            return TIMEOUT_CODE
        if now - max(started, last_heartbeat(run_dir)) > cluster.hang_timeout_min * 60:
            dump_stacks(torchrun.pid)
            return HANG_CODE
        if lost():
            return 0  # the error is the other node's, which has told it
        time.sleep(POLL_S)
    return code


def dump_stacks(pid: int) -> None:
    """Has every worker write the stacks of its threads into its log."""
    for worker in descendants(pid, recursive=False):
        worker.send_signal(signal.SIGUSR1)
    time.sleep(DUMP_S)


def node_gpus(spec: RunSpec, node: int) -> tuple[Gpu, ...]:
    """The GPUs of a node's workers; simulated nodes share out those of this machine."""
    if spec.config.cluster.device != "cuda":
        return ()
    first = node * spec.workers_per_node if simulated(spec) else 0
    return visible_gpus()[first:][: spec.workers_per_node]


def simulated(spec: RunSpec) -> bool:
    """Whether all nodes of a run stand on this machine."""
    return spec.config.cluster.launcher == "local"


def _sampler(spec: RunSpec, run_dir: Path, node: int) -> AbstractContextManager[object]:
    measure = spec.config.measure
    if not measure.enabled:
        return nullcontext()
    return Sampler(
        path=run_dir / "memory" / f"node{node}.csv",
        gpu_indices=[gpu.index for gpu in node_gpus(spec, node)],
        interval_s=measure.interval_s,
        cores=max(1, cpu_count() // (spec.nodes if simulated(spec) else 1)),
    )


def torchrun_arguments(spec: RunSpec, node: int, where: Rendezvous, own_address: str = "127.0.0.1") -> list[str]:
    """Static rendezvous: c10d would number the nodes by who comes first."""
    return [
        f"--nnodes={spec.nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={spec.workers_per_node}",
        f"--master-addr={where.address}",
        f"--master-port={where.port}",
        f"--local-addr={own_address}",
        "--max-restarts=0",
        "-m",
        "distexp.worker",
    ]


def worker_environment(spec: RunSpec, node: int) -> dict[str, str]:
    """This process' environment, with what was set for the workers, their threads, devices and accelerator."""
    cluster = spec.config.cluster
    environment = {
        **os.environ,
        **cluster.environment,
        "OMP_NUM_THREADS": str(cluster.cpus_per_worker),
        "DS_ACCELERATOR": cluster.device,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if cluster.debug:
        environment |= {
            "NCCL_DEBUG": "INFO",
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
            "TORCH_CPP_LOG_LEVEL": "INFO",
            "TORCH_SHOW_CPP_STACKTRACES": "1",
        }
    if cluster.device == "cuda" and spec.nodes > 1 and simulated(spec):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in node_gpus(spec, node))
    return environment


if __name__ == "__main__":
    main()

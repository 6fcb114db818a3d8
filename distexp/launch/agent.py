"""One node of a run: ``python -m distexp.launch.agent RUN_DIR NODE``.

It starts torchrun for its node's workers, one to a GPU, and watches them. It imports no torch: a node
holds one agent beside its workers, and that must cost next to nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from distexp.hardware import visible_gpus
from distexp.launch.logs import node_logs
from distexp.launch.processes import end_tree, start_module
from distexp.launch.rendezvous import Rendezvous, await_head, reserve
from distexp.spec import RunSpec

GRACE_S = 5.0
RENDEZVOUS_S = 120.0


class Stopped(BaseException):
    """The agent was told to end; not an Exception, so that nothing takes it for a fault."""


def main() -> None:
    """Runs a node to its end; the exit code is torchrun's, or 143 when told to stop."""
    run_dir, node = Path(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to answer
    sys.exit(run_node(RunSpec.read(run_dir), run_dir, node))


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


def run_node(spec: RunSpec, run_dir: Path, node: int) -> int:
    """Starts a node's workers and waits for them."""
    logs = node_logs(run_dir, node)
    logs.mkdir(parents=True, exist_ok=True)
    holder = None
    if node == 0:
        where, holder = reserve("127.0.0.1", run_dir)
    else:
        where = await_head(run_dir, RENDEZVOUS_S)
    with (logs / "torchrun.log").open("w") as output:
        torchrun = start_module(
            "torch.distributed.run",
            *torchrun_arguments(spec, node, where),
            str(run_dir),
            env=worker_environment(spec, node),
            output=output,
        )
        try:
            return torchrun.wait()
        except Stopped:
            return 128 + signal.SIGTERM
        finally:
            end_tree(torchrun, GRACE_S)
            if holder is not None:
                holder.close()


def torchrun_arguments(spec: RunSpec, node: int, where: Rendezvous) -> list[str]:
    """Static rendezvous: c10d would number the nodes by who comes first."""
    return [
        f"--nnodes={spec.nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={spec.workers_per_node}",
        f"--master-addr={where.address}",
        f"--master-port={where.port}",
        "--max-restarts=0",
        "-m",
        "distexp.worker",
    ]


def worker_environment(spec: RunSpec, node: int) -> dict[str, str]:
    """This process' environment, with the workers' threads, devices and accelerator."""
    cluster = spec.config.cluster
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(cluster.cpus_per_worker),
        "DS_ACCELERATOR": cluster.device or "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if cluster.device == "cuda" and spec.nodes > 1:
        # Simulated nodes share one machine: each sees its own part of the GPUs.
        share = visible_gpus()[node * spec.workers_per_node :][: spec.workers_per_node]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in share)
    return environment


if __name__ == "__main__":
    main()

"""Names and paths of everything in a run directory, and in the sweep directory above it."""

from dataclasses import dataclass
from pathlib import Path

# Files of a run
SPEC = "spec.json"
RECORD = "record.json"
RESULT = "result.json"
"""Rank 0's part of the record. The launcher completes it and then removes it."""
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
PREDICTIONS = "predictions.json"
PREDICTED = "predicted.json"
FORECAST = "forecast.json"
"""Forecasts of a profiled run for other numbers of workers. `distexp forecast` writes it after the run."""
PREFLIGHT = "preflight.json"
DS_CONFIG = "ds_config.json"
MICRO_BATCH = "micro_batch.json"
"""The search of ``train.micro_batch_size=auto``, which rank 0 writes before the training."""
STOP_REQUEST = "notice.json"
HEARTBEAT = "heartbeat"
LAUNCHER_PROCESS = "owner.json"
"""The process that started a local run."""
OPERATORS = "operators.jsonl"
"""Progress of the build of DeepSpeed's operators, before the workers start. It has lines only if one is compiled."""
RENDEZVOUS = "rendezvous.json"
OOM_KILLS = "oom_kills.json"
DISK_RESERVE = ".reserve"
LOCK = ".running"

# Folders of a run
HYDRA = ".hydra"
LOGS = "logs"
TRACKER_LOG = "logs/tracker.log"
TRACKER_END = "logs/.tracker_end"
"""It asks the tracker's process to finish."""
MEMORY = "memory"
MODEL = "model"
CHECKPOINTS = "checkpoints"
PROFILE = "profile"
PROFILE_TRACE = "profile/rank0.json.gz"
PROFILE_SUMMARY = "profile/summary.json"
"""Lanes of a profiled step of each rank."""
STEP_MODEL = "profile/step_model.json"
"""The median profiled step of rank 0, for a forecast."""
STEP_TIMES = "step_times"
TENSORBOARD = "tensorboard"
ATTEMPTS = "attempts"
"""``attempts/<k>/`` contains the files of attempt k. The files of the latest attempt are in the run directory."""

ATTEMPT_FILES = (
    *(RESULT, LOGS, MEMORY, MODEL, METRICS, EVENTS, PREDICTIONS, PREFLIGHT, MICRO_BATCH),
    *(HEARTBEAT, OPERATORS, LAUNCHER_PROCESS, RENDEZVOUS, STOP_REQUEST, OOM_KILLS, STEP_TIMES),
)
"""Files and folders of one attempt. The record is one too, but gets another name in ``attempts/<k>/``."""

ARCHIVED_RECORD = "earlier_record.json"
"""Name of a record in ``attempts/<k>/``, so that nothing that searches for records finds it."""

OUTPUTS = "multirun_outputs"
"""Folder of all sweeps, in the directory in which a command was started."""

# Files and folders of a sweep
COMMAND = "command.json"
PROOF, PROOF_PAGE = "proof.json", "proof.html"  # result of distexp verify
PHASE_SETTINGS = "phase.json"
"""Settings of a phase of ``distexp verify`` that no key has. The folder of a phase is not that of a run."""
MULTIRUN = "multirun.yaml"
LEDGER = "ledger.jsonl"
CHOICE = "choose.json"
"""Candidates, trials and result of ``distexp choose``."""
TRIALS_LOG = "trials.log"
"""Notes on the start-up that the trials of a search share."""
SWEEP_LOCK = ".sweep_running"
"""Lock of the command that runs or submits the sweep. The folder of a single run contains both locks."""
LAUNCHER_LOG = "launcher.log"
"""Output of a command after its terminal was closed."""
SLURM = "slurm"
SNAPSHOT = "snapshot"
SNAPSHOT_MARKER = ".complete.json"
"""The last file written into a snapshot of the code. A folder that contains it holds no run."""
REPORT = "report"

NON_RUN_DIRS = (SNAPSHOT, SLURM, LOGS, MEMORY, ATTEMPTS, REPORT, ".")
"""Prefixes of the folders that contain no run directory."""


def log_dir(run_dir: Path, node: int) -> Path:
    """Return the folder of a node's logs."""
    return run_dir / LOGS / f"node{node}"


@dataclass(frozen=True)
class NodeFile:
    """A file in the log folder of each node. If its name contains ``{rank}``, each rank of the node has one."""

    name: str

    def path(self, run_dir: Path, node: int, rank: int | None = None) -> Path:
        """Return the file of a node or rank."""
        return log_dir(run_dir, node) / self.name.format(rank=rank)

    def find(self, run_dir: Path, node: int | str = "*", rank: int | str = "*") -> list[Path]:
        """Return the files that exist: of all nodes and ranks, or of one."""
        return sorted(run_dir.glob(f"{LOGS}/node{node}/{self.name.format(rank=rank)}"))


RANK_LOG = NodeFile("rank{rank}.log")
"""Output of a rank."""
SEARCH_LOG = NodeFile("rank{rank}.search.log")
"""Output of a rank's search for a micro-batch size."""
RANK_ERROR = NodeFile("rank{rank}.error.json")
AGENT_ERROR = NodeFile("agent.error.json")
"""Why the agent of a node started no worker."""
RANK_PROGRESS = NodeFile("rank{rank}.progress")
ALLOCATOR = NodeFile("rank{rank}.memory.json")
"""Peaks of the allocator of a failed rank."""
AGENT_PROCESS = NodeFile("agent.process.json")
"""The agent of a local run. Only that of the first node writes it."""
AGENT_EXIT = NodeFile("exit.json")
"""Exit code of a node's agent. Only agents of a Slurm job write it."""
WORKER_EXITS = NodeFile("workers.json")
"""How a node's workers ended, in the order of time."""
STOPPED_RANKS = NodeFile("stopped.json")
"""Ranks of a node that were stopped by a signal when the run hung."""
OOM_MARK = NodeFile("oom_killed")
"""It exists if the kernel killed a process of a node for memory."""
GROUP_LOG = NodeFile("workers.log")
"""Output of the process that starts a node's workers."""
OPERATORS_LOG = NodeFile("operators.log")
"""Output of the compiler that builds a node's operators."""


def directory_key(folder: Path) -> str:
    """Return the key that chose the directory of a run or a sweep: ``hydra.run.dir`` if it has both."""
    return "hydra.run.dir" if (folder / COMMAND).exists() and (folder / HYDRA).exists() else "hydra.sweep.dir"


def memory_trace_path(run_dir: Path, node: int) -> Path:
    """Return the memory trace of a node."""
    return run_dir / MEMORY / f"node{node}.csv"


def memory_trace_paths(run_dir: Path) -> list[Path]:
    """Return the memory traces of a run, in the order of the nodes."""
    by_node = {path.stem.removeprefix("node"): path for path in (run_dir / MEMORY).glob("node*.csv")}
    return [by_node[node] for node in sorted(filter(str.isdecimal, by_node), key=int)]


def command_path(run_dir: Path) -> Path:
    """Return the file with the command of a run's sweep. A single run may be a sweep itself."""
    own = run_dir / COMMAND
    return own if own.is_file() else run_dir.parent / COMMAND


def step_times_path(run_dir: Path, rank: int) -> Path:
    """Return the durations of a rank's ordinary steps."""
    return run_dir / STEP_TIMES / f"rank{rank}.csv"

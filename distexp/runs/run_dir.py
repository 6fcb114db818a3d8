"""Names and paths of everything in a run directory, and in the sweep directory above it."""

from __future__ import annotations

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
OWNER = "owner.json"
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
MEMORY = "memory"
MODEL = "model"
CHECKPOINTS = "checkpoints"
PROFILE = "profile"
STEP_TIMES = "step_times"
TENSORBOARD = "tensorboard"
ATTEMPTS = "attempts"
"""``attempts/<k>/`` contains the files of attempt k. The files of the latest attempt are in the run directory."""

ATTEMPT_FILES = (
    *(RESULT, LOGS, MEMORY, MODEL, METRICS, EVENTS, PREDICTIONS, PREFLIGHT, MICRO_BATCH),
    *(HEARTBEAT, OPERATORS, OWNER, RENDEZVOUS, STOP_REQUEST, OOM_KILLS, STEP_TIMES),
)
"""Files and folders of one attempt. The record is one too, but gets another name in ``attempts/<k>/``."""

ARCHIVED_RECORD = "earlier_record.json"
"""Name of a record in ``attempts/<k>/``, so that nothing that searches for records finds it."""

OUTPUTS = "multirun_outputs"
"""Folder of all sweeps, in the directory in which a command was started."""

# Files and folders of a sweep
COMMAND = "command.json"
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


def log_path(run_dir: Path, node: int, rank: int) -> Path:
    """Return the file with the output of a rank."""
    return log_dir(run_dir, node) / f"rank{rank}.log"


def search_log_path(run_dir: Path, node: int, rank: int) -> Path:
    """Return the file with the output of a rank's search for a micro-batch size."""
    return log_dir(run_dir, node) / f"rank{rank}.search.log"


def find_log(run_dir: Path, rank: int) -> Path | None:
    """Return the log of a rank relative to the run directory, or None if the rank wrote none."""
    found = _in_log_dirs(run_dir, f"rank{rank}.log")
    return found[0].relative_to(run_dir) if found else None


def _in_log_dirs(run_dir: Path, pattern: str, node: int | str = "*") -> list[Path]:
    """Return the files with a name in the log folders of all nodes, or of one."""
    return sorted(run_dir.glob(f"{LOGS}/node{node}/{pattern}"))


def error_path(run_dir: Path, node: int, rank: int) -> Path:
    """Return the JSON file in which a rank reports its error."""
    return log_dir(run_dir, node) / f"rank{rank}.error.json"


def agent_error_path(run_dir: Path, node: int) -> Path:
    """Return the JSON file in which the agent of a node reports why it started no worker."""
    return log_dir(run_dir, node) / "agent.error.json"


def oom_mark_path(run_dir: Path, node: int) -> Path:
    """Return the file that exists if the kernel killed a process of a node for memory."""
    return log_dir(run_dir, node) / "oom_killed"


def oom_marks(run_dir: Path) -> list[Path]:
    """Return the marks of all nodes."""
    return _in_log_dirs(run_dir, "oom_killed")


def agent_owner_path(run_dir: Path) -> Path:
    """Return the JSON file that names the agent process of the first node of a local run."""
    return log_dir(run_dir, 0) / "agent.process.json"


def error_paths(run_dir: Path) -> list[Path]:
    """Return the error files that ranks and agents wrote."""
    return _in_log_dirs(run_dir, "*.error.json")


def allocator_path(run_dir: Path, node: int, rank: int) -> Path:
    """Return the JSON file with the allocator's peaks of a failed rank."""
    return log_dir(run_dir, node) / f"rank{rank}.memory.json"


def allocator_paths(run_dir: Path) -> list[Path]:
    """Return the allocator files that failed ranks wrote."""
    return _in_log_dirs(run_dir, "rank*.memory.json")


def exit_status_path(run_dir: Path, node: int) -> Path:
    """Return the JSON file with the exit code of a node's agent. Only agents of a Slurm job write it."""
    return log_dir(run_dir, node) / "exit.json"


def group_log_path(run_dir: Path, node: int) -> Path:
    """Return the file with the output of the process that starts a node's workers."""
    return log_dir(run_dir, node) / "workers.log"


def operators_log_path(run_dir: Path, node: int) -> Path:
    """Return the file with the output of the compiler that builds a node's operators."""
    return log_dir(run_dir, node) / "operators.log"


def worker_exits_path(run_dir: Path, node: int) -> Path:
    """Return the JSON file that lists how a node's workers ended, in the order of time."""
    return log_dir(run_dir, node) / "workers.json"


def worker_exits_paths(run_dir: Path) -> list[Path]:
    """Return the files of all nodes that list how workers ended."""
    return _in_log_dirs(run_dir, "workers.json")


def rank_progress_path(run_dir: Path, node: int, rank: int) -> Path:
    """Return the file in which a rank counts its progress."""
    return log_dir(run_dir, node) / f"rank{rank}.progress"


def rank_progress_paths(run_dir: Path, node: int | None = None) -> list[Path]:
    """Return the progress files of all ranks, or of those of a node."""
    return _in_log_dirs(run_dir, "rank*.progress", "*" if node is None else node)


def stopped_ranks_path(run_dir: Path, node: int) -> Path:
    """Return the JSON file that lists the ranks of a node that were stopped by a signal when the run hung."""
    return log_dir(run_dir, node) / "stopped.json"


def stopped_ranks_paths(run_dir: Path) -> list[Path]:
    """Return the files of all nodes that list stopped ranks."""
    return _in_log_dirs(run_dir, "stopped.json")


def tracker_log_path(run_dir: Path) -> Path:
    """Return the file with the output of the tracker's process."""
    return run_dir / LOGS / "tracker.log"


def tracker_end_path(run_dir: Path) -> Path:
    """Return the file that asks the tracker's process to finish."""
    return run_dir / LOGS / ".tracker_end"


def memory_trace_path(run_dir: Path, node: int) -> Path:
    """Return the memory trace of a node."""
    return run_dir / MEMORY / f"node{node}.csv"


def memory_trace_paths(run_dir: Path) -> list[Path]:
    """Return the memory traces of a run, in the order of the nodes."""
    by_node = {path.stem.removeprefix("node"): path for path in (run_dir / MEMORY).glob("node*.csv")}
    return [by_node[node] for node in sorted(filter(str.isdecimal, by_node), key=int)]


def profile_trace_path(run_dir: Path) -> Path:
    """Return the profiler's trace of rank 0."""
    return run_dir / PROFILE / "rank0.json.gz"


def profile_summary_path(run_dir: Path) -> Path:
    """Return the lanes of a profiled step of each rank."""
    return run_dir / PROFILE / "summary.json"


def step_model_path(run_dir: Path) -> Path:
    """Return the median profiled step of rank 0, for a forecast."""
    return run_dir / PROFILE / "step_model.json"


def step_times_path(run_dir: Path, rank: int) -> Path:
    """Return the durations of a rank's ordinary steps."""
    return run_dir / STEP_TIMES / f"rank{rank}.csv"

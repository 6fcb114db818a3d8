"""Record of a run: ``record.json``, with its configuration, status, metrics and memory.

The names of the keys contain the units. A value that was not measured is null, never 0. Other tools rely on this
layout, so a change of a key's meaning raises SCHEMA_VERSION.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distexp.config import Config
from distexp.config.field_info import describe, key
from distexp.runs.json_files import read_json, write_json
from distexp.runs.metrics import Metrics
from distexp.runs.run_dir import RECORD, RESULT
from distexp.runs.typed_values import device_errors, section_errors, typed
from distexp.system.environment_variables import select_variables

SCHEMA_VERSION = 1


MAX_SHOWN_ERRORS = 3
"""Errors in the message about a damaged record."""

STATUSES = ("completed", "oom_gpu", "oom_host", "failed", "timeout", "killed", "preempted", "invalid")

FAILURES = frozenset({"failed", "timeout", "killed"})
"""Statuses that make the exit code of a sweep 1. Running out of memory is a result, not a failure."""

INVALID_ID = "invalid"
"""``run.id`` of all invalid runs. They have no complete configuration that could be hashed."""


@dataclass
class RunError:
    """Cause of a run's failure."""

    type: str = field(metadata=describe("Class of the error, for example `OutOfMemoryError`."))
    message: str = field(metadata=describe("Message of the error."))
    phase: str | None = key(None, "Phase of the error: search, setup, warmup, train, profile, eval or save.")
    rank: int | None = key(None, "Rank of the worker that failed first.")
    errors: list[str] = key([], "All errors of an invalid run. `message` joins them.")
    log: str | None = key(None, "Log of that worker, relative to the run directory. It has the traceback.")
    memory: dict[str, Any] | None = key(
        None,
        "GPU memory when an allocation failed, of a run with status `oom_gpu`.",
        parts={
            ".requested_mib": "What the allocation needed.",
            ".allocated_mib": "Allocated by torch.",
            ".reserved_mib": "Reserved by torch.",
            ".free_mib": "Free on the GPU, as CUDA reports it.",
            ".total_mib": "Memory of the GPU, or its limit.",
            ".line": "Line of code that ran.",
            ".parts": "What was allocated, by part. `rest_mib`: activations and temporaries. `unknown_mib`: before the "
            "model is built.",
            ".largest[]": "Largest tensors: `mib`, `count` of equal ones, `part`, and `line` (of the allocation, with "
            "`train.profile_steps`, or a name).",
            ".would_fit": "Overrides of the smallest change that fits, if `distexp plan` has predicted it before.",
            ".command": "Command that predicts what would fit.",
        },
    )


@dataclass
class RunInfo:
    """Identity of a run, and when and where it ran."""

    id: str = field(metadata=describe("Hash of everything that determines the training."))
    name: str = field(metadata=describe("Value of `name` in the configuration."))
    number: int = field(metadata=describe("Number of the run in its sweep, from 0."))
    overrides: list[str] = field(metadata=describe("Overrides of the run."))
    started_at: str | None = key(None, "Start of the latest attempt: ISO 8601, UTC.")
    duration_s: float | None = key(None, "Duration of the latest attempt.", unit="seconds")
    hosts: list[str] = key([], "Host names of the nodes.")
    git_sha: str | None = key(None, "Commit of the code.")
    git_dirty: bool | None = key(None, "Whether the code had uncommitted changes.")
    snapshot: str | None = key(None, "Copy of the code that a Slurm run used.")
    attempts: list[dict[str, Any]] = key(
        [],
        "Attempts of the run, oldest first.",
        parts={
            "[].job_id": "Slurm job, or null.",
            "[].hosts": "Host names of the nodes.",
            "[].resumed_from_step": "Step of the loaded checkpoint. Null: the attempt started at step 0.",
            "[].changes": "Settings that differ from those of the loaded checkpoint, with both values.",
            "[].reason": "Status at the end of the attempt.",
        },
    )


@dataclass
class Built:
    """What was built, read from the live objects and not from the configuration."""

    strategy: str = field(metadata=describe("Strategy."))
    engine: str = field(metadata=describe("Trainer."))
    wrapper: str = field(metadata=describe("Class that wraps the model, or `none`."))
    world_size: int = field(metadata=describe("Number of workers."))
    mesh: list[int] = field(metadata=describe("Sizes of the axes `[replicate, shard]`."))
    sharded_units: int = field(metadata=describe("Modules that FSDP shards one by one."))
    zero_stage: int | None = field(metadata=describe("ZeRO stage of DeepSpeed."))
    offload: str = field(metadata=describe("States in CPU memory, or `none`."))
    param_dtype: str = field(metadata=describe("Data type of the parameters."))
    compute_dtype: str = field(metadata=describe("Data type of the computation."))
    optimizer: str = field(metadata=describe("Class of the optimizer."))
    parameters: int = field(metadata=describe("Number of trained parameters. Shared weights count once."))
    tokenizer: str | None = key(None, "Tokenizer of a text model.")
    logits: str | None = key(None, "Tokens whose logits a text model computes: `all` or `targets`.")
    loss: str | None = key(None, "Loss of a text model: `full`, or `chunked` with the tokens of a chunk.")
    attention: str | None = key(None, "Implementation of the attention, if the model declares it.")
    compiled: str | None = key(None, "What is compiled: `blocks`, `model`, `graphs` (with CUDA graphs) or `none`.")
    activation_budget: float | None = key(None, "Share of the activations that compiled graphs store.")
    compute_weights: str | None = key(None, "Cast of the weights: `autocast`, or `step` for copies. Null: none.")
    communication_dtype: str | None = key(None, "Data type in which DDP sends gradients.")
    blocks_per_unit: int | None = key(None, "Most blocks in one unit of FSDP.")
    channels_last: bool | None = key(None, "Whether convolutions keep channels-last weights. Null: no convolutions.")
    image_cache: str | None = key(None, "Memory of the decoded images: `cpu`, `gpu` or `none`. Null: no images.")


@dataclass
class Environment:
    """Software and hardware of the head node."""

    python: str = field(metadata=describe("Version of Python."))
    torch: str | None = key(None, "Version of PyTorch.")
    cuda: str | None = key(None, "Version of CUDA that PyTorch was built with.")
    nccl: str | None = key(None, "Version of NCCL.")
    transformers: str | None = key(None, "Version of transformers.")
    deepspeed: str | None = key(None, "Version of DeepSpeed.")
    accelerate: str | None = key(None, "Version of accelerate.")
    gpu_name: str | None = key(None, "Name of the first GPU.")
    gpu_total_mib: float | None = key(None, "Memory of the first GPU.", unit="MiB")
    cpu_count: int | None = key(None, "Number of usable CPU cores.")
    cpu_limit: float | None = key(None, "Limit of the CPU time by control groups, in cores. Null: none.")
    hostname: str | None = key(None, "Host name.")
    variables: dict[str, str] = key({}, "Environment variables of NCCL, Gloo, CUDA and PyTorch.")


@dataclass
class Predicted:
    """Memory that `distexp plan` predicted: of one worker, or on CPUs of a machine. Null: could not be predicted."""

    peak_allocated_mib: float | None = key(None, "Peak of torch's allocated memory.", unit="MiB")
    peak_reserved_mib: float | None = key(None, "Peak of torch's reserved memory, without a limit.", unit="MiB")
    nvidia_smi_mib: float | None = key(None, "Memory of the GPU as nvidia-smi shows it.", unit="MiB")
    host_peak_mib: float | None = key(None, "Peak of CPU memory on a node.", unit="MiB")
    phase: str | None = key(None, "Phase of the peak: setup, forward, backward, optimizer or evaluation.")
    parts: dict[str, float] = key(
        {},
        "What the peak is made of, in MiB.",
        parts={
            ".parameters": "Weights.",
            ".gradients": "Gradients.",
            ".optimizer_states": "Moments, and master weights.",
            ".activations": "Kept for the backward pass.",
            ".logits": "Tensors as wide as the vocabulary.",
            ".communication": "Gathered parameters and buckets.",
            ".temporaries": "The rest.",
        },
    )
    verdict: str | None = key(
        None,
        "Whether it fits. Null: the memory or the error of the prediction is unknown.",
        choices=("fits", "too_close", "does_not_fit"),
    )
    seconds: float | None = key(None, "Time of the prediction.", unit="seconds")
    required_mib: float | None = key(
        None, "Smallest GPU memory in which the run fits. On CPUs: peak of the processes of a machine.", unit="MiB"
    )
    gpu_memory_mib: float | None = key(None, "GPU memory that the verdict is about.", unit="MiB")
    host_memory_mib: float | None = key(None, "CPU memory that the verdict is about, for a run on CPUs.", unit="MiB")
    error_bound: float | None = key(None, "Largest relative error of the prediction. Null: unknown, so no verdict.")
    most_mib: float | None = key(None, "Most memory that the run may need: required_mib and its error.", unit="MiB")
    notes: list[str] = key([], "What was assumed or could not be predicted.")


@dataclass
class RunRecord:
    """Everything that is known about a run."""

    status: str = field(metadata=describe("Outcome of the run.", choices=STATUSES))
    run: RunInfo = field(metadata=describe("Identity of the run."))
    config: dict[str, Any] = field(metadata=describe("Resolved configuration."))
    error: RunError | None = key(None, "Error of a run that is not completed.")
    built: Built | None = key(None, "What was built.")
    environment: Environment | None = key(None, "Software and hardware.")
    metrics: Metrics = field(default_factory=Metrics, metadata=describe("Metrics of the training."))
    memory: dict[str, Any] = key(
        {"gpu": [], "torch": [], "cpu": [], "parts": []},
        "Memory, sampled on each node; `torch` is the allocator of each rank, `parts` its tensors.",
        parts={
            ".gpu[]": "GPU memory from NVML: `node`, `index`, `peak_mib`, `average_mib`, `mode_mib`, `phases`, ...; "
            "over the training steps alone `training_average_mib`, `training_mode_mib`.",
            ".torch[]": "`rank`, `peak_allocated_mib`, `average_allocated_mib`, `peak_reserved_mib`, `alloc_retries`.",
            ".parts[]": "Tensors of each rank: `rank`, `parameters_mib`, `gradients_mib`, `optimizer_states_mib`, "
            "`activations_mib` (saved for the backward pass of a micro-batch), `phase` (`train`). With "
            "`train.profile_steps` on a GPU also the peaks of a step, with `phase` `forward`, `backward` and "
            "`optimizer`: the parts of `predicted.parts`, `other_mib`, their sum `allocated_mib`, `reserve_mib` "
            "(reserved and not allocated), `context_mib` (outside of torch's allocator) and `context_source` (NVML "
            "counted this `process`, or the whole `gpu`).",
            ".cpu[]": "PSS of all processes of the run: `node`, and the keys of `gpu[]` without `index`. Peak, "
            "average and mode leave out the phases `search`, `profile` and `done`. Records of earlier versions leave "
            "out only the first two.",
        },
    )
    utilization: dict[str, Any] = key(
        {"gpu": [], "cpu": []},
        "Utilization, sampled on each node.",
        parts={".gpu[]": "`node`, `index`, `average_pct`, `phases`.", ".cpu[]": "`node`, `average_pct`, `phases`."},
    )
    preflight: dict[str, Any] | None = key(
        None,
        "Communication bandwidth test before the training.",
        parts={
            ".backend": "`nccl` or `gloo`.",
            ".nodes": "Number of nodes.",
            ".min_busbw_gbps": "Lowest accepted bus bandwidth, in GB/s.",
            ".measurements[]": "Bandwidth of each collective, size and group.",
            ".host_copies[]": "Bandwidth of copies between CPU and GPU, for each rank.",
            ".matrix_products[]": "`precision` and `tflops` of a large matrix product on each rank.",
            ".complaints": "Problems of the GPUs.",
        },
    )
    predicted: Predicted | None = key(None, "Memory as predicted before the run.")
    schema_version: int = key(SCHEMA_VERSION, "Version of this format.")

    def __post_init__(self) -> None:
        if not isinstance(self.status, str) or self.status not in STATUSES:
            raise ValueError(f"status={self.status!r} is not one of {', '.join(STATUSES)}")

    def write(self, directory: Path) -> None:
        """Write ``directory/record.json`` atomically, and remove the result that it completes."""
        write_json(directory / RECORD, asdict(self))
        (directory / RESULT).unlink(missing_ok=True)

    def write_result(self, directory: Path) -> None:
        """Write ``directory/result.json``: a record without memory traces, which the launcher completes."""
        write_json(directory / RESULT, asdict(self))

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Read a record or a result.

        Raises:
            ValueError: if the file is missing, torn, not a record, or of another schema.
        """
        try:
            raw = read_json(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is not a JSON file: {error}") from None
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(f"{path} has schema_version {version!r}, this distexp reads {SCHEMA_VERSION}")
        try:
            return cls._from_json(raw)
        except KeyError as error:
            raise ValueError(f"{path} is not a record of distexp: {error} is missing") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a record of distexp: {error}") from None

    @classmethod
    def _from_json(cls, raw: dict[str, Any]) -> RunRecord:
        errors = [
            *section_errors(Config, raw["config"], complete=raw["status"] != "invalid"),
            *device_errors(raw["memory"], "memory"),
            *device_errors(raw["utilization"], "utilization"),
        ]
        if errors:
            raise ValueError(", ".join(errors[:MAX_SHOWN_ERRORS]))
        preflight = raw.get("preflight")
        return cls(
            status=raw["status"],
            run=typed(RunInfo, raw["run"]),
            config=raw["config"],
            error=typed(RunError, raw["error"]) if raw["error"] else None,
            built=typed(Built, raw["built"]) if raw["built"] else None,
            environment=_read_environment(raw["environment"]) if raw["environment"] else None,
            metrics=typed(Metrics, raw["metrics"]),
            memory=raw["memory"],
            utilization=raw["utilization"],
            preflight=preflight if isinstance(preflight, dict) else None,
            predicted=typed(Predicted, raw["predicted"]) if raw.get("predicted") else None,
        )


def _read_environment(raw: dict[str, Any]) -> Environment:
    """Read the environment without the defaults of torchrun, which records of earlier versions contain."""
    environment = typed(Environment, raw)
    environment.variables = select_variables(environment.variables)
    return environment

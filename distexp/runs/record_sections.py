"""Sections of ``record.json``, except for the metrics: identity, error, what was built, environment and prediction."""

from __future__ import annotations  # distexp.reference prints them as they are written

import importlib.util
import platform
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from distexp.config.fields import describe, key
from distexp.system.cgroups import cpu_count, cpu_limit, visible_gpus


@dataclass
class RunError:
    """Cause of a run's failure."""

    type: str = field(metadata=describe("Class of the error, for example `OutOfMemoryError`."))
    message: str = field(metadata=describe("Message of the error."))
    phase: str | None = key(
        None, "Phase of the error, such as compile, preflight, search, setup, warmup, train, profile, eval or save."
    )
    rank: int | None = key(None, "Rank of the worker that failed first.")
    errors: list[str] = key([], "All errors of an invalid run. `message` joins them.")
    log: str | None = key(
        None, "Log of that worker, relative to the run directory. It has the traceback, or the output of the compiler."
    )
    place: str | None = key(None, "Line of custom code that raised the error, for example `my_package/model.py:12`.")
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
    proof: str | None = key(
        None, "Hash of the proof by `distexp verify` that this configuration trains as `single` does. Null: unknown."
    )
    attempts: list[dict[str, Any]] = key(
        [],
        "Attempts of the run, oldest first.",
        parts={
            "[].job_id": "Slurm job, or null.",
            "[].hosts": "Host names of the nodes.",
            "[].resumed_from_step": "Step of the loaded checkpoint. Null: the attempt started at step 0.",
            "[].changes": "Settings that differ from those of the loaded checkpoint, with both values.",
            "[].reason": "Status at the end of the attempt, or `ended without a record`.",
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
    parameters: int = field(metadata=describe("Number of parameters. Shared weights count once."))
    tensor: int = key(1, "Workers that share the matrices of each layer.")
    context: int = key(1, "Workers that share the tokens of each row.")
    expert: int = key(1, "Workers that share the experts of each layer.")
    pipeline: int = key(1, "Workers that have different blocks of the model.")
    schedule: str | None = key(None, "Order of the micro-batches in a pipeline. Null: there is none.")
    stages: list[int] | None = key(None, "Blocks of each stage of a pipeline. Null: there is none.")
    trained_parameters: int | None = key(None, "Parameters that are trained. Null: all of them.")
    cast_from: str | None = key(None, "Types of the weights before they were cast to one, as `bfloat16+float32`.")
    tokenizer: str | None = key(None, "Tokenizer of a text model.")
    logits: str | None = key(None, "Tokens whose logits a causal LM computes: `all` or `targets`.")
    loss: str | None = key(None, "Loss of a causal LM: `full`, `own`, or `chunked` with the tokens of a chunk.")
    attention: str | None = key(None, "Implementation of the attention, if the model declares it.")
    dropout: float | None = key(None, "Largest dropout rate of the model. Null: it was not read.")
    compiled: str | None = key(None, "What is compiled: `blocks`, `model`, `graphs` (with CUDA graphs) or `none`.")
    activation_budget: float | None = key(None, "Share of the activations that compiled graphs store.")
    compute_weights: str | None = key(None, "Cast of the weights: `autocast`, or `step` for copies. Null: none.")
    communication_dtype: str | None = key(None, "Data type in which DDP sends gradients.")
    blocks_per_unit: int | None = key(None, "Most blocks in one unit of FSDP.")
    channels_last: bool | None = key(None, "Whether convolutions keep channels-last weights. Null: no convolutions.")
    image_cache: str | None = key(None, "Memory of the decoded images: `cpu`, `gpu` or `none`. Null: no images.")


@dataclass
class StrategyTraits:
    """What the strategy of a run states for its report, which knows no strategy."""

    label: str = field(metadata=describe("Name and main option, for example `fsdp full_shard`."))
    one_worker: bool = key(False, "Whether it trains on one worker, so that speedups over it are at most the workers.")
    keeps_states_whole: bool | None = key(None, "Whether each worker updates all weights. Null: unknown.")
    memory_note: str = key("", "What the parts of the memory mean.")
    setup_note: str = key("", "What may need memory during setup.")


@dataclass
class Environment:
    """Software and hardware of the head node."""

    python: str = field(metadata=describe("Version of Python."))
    torch: str | None = key(None, "Version of PyTorch.")
    cuda: str | None = key(None, "Version of CUDA that PyTorch was built with. Null: a run on CPUs.")
    nccl: str | None = key(None, "Version of NCCL.")
    transformers: str | None = key(None, "Version of transformers.")
    deepspeed: str | None = key(None, "Version of DeepSpeed.")
    accelerate: str | None = key(None, "Version of accelerate.")
    gpu_name: str | None = key(None, "Name of the first GPU.")
    gpu_total_mib: float | None = key(None, "Memory of the first GPU.", unit="MiB")
    cpu_count: int | None = key(None, "Number of usable CPU cores.")
    cpu_limit: float | None = key(None, "Limit of the CPU time by control groups, in cores. Null: none.")
    hostname: str | None = key(None, "Host name.")
    arithmetic: str | None = key(None, "Precision of fp32 products, instructions of the CPU, and determinism.")
    variables: dict[str, str] = key({}, "Environment variables that change the arithmetic, the speed or the memory.")


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


def make_environment(*, on_gpu: bool, variables: Mapping[str, str] | None = None) -> Environment:
    """Return the environment of this process, without an import of torch."""
    torch = torch_versions()
    gpu = next(iter(visible_gpus()), None) if on_gpu else None
    return Environment(
        python=platform.python_version(),
        torch=torch.get("__version__") or package_version("torch"),
        cuda=torch.get("cuda") if on_gpu else None,
        transformers=package_version("transformers"),
        deepspeed=package_version("deepspeed"),
        accelerate=package_version("accelerate"),
        gpu_name=gpu.name if gpu else None,
        gpu_total_mib=gpu.total_mib if gpu else None,
        cpu_count=cpu_count(),
        cpu_limit=cpu_limit(),
        hostname=socket.gethostname(),
        variables=dict(variables or {}),
    )


def torch_versions() -> dict[str, str]:
    """Read ``__version__`` and ``cuda`` from torch's version file: the metadata lacks the build, as in +cu130."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return {}
    return dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= *['\"](.+)['\"]", text, re.MULTILINE))


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

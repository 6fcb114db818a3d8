"""One measurement as a process: its command, its result, and the reason if it has none."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers.settings import LEARNING_RATE, OURS, WEIGHT_DECAY, Settings

REPOSITORY = Path(__file__).resolve().parents[1]
END_S = 60.0
"""Time that a process has to end after SIGTERM."""


@dataclass(frozen=True)
class Peer:
    """A training loop of another library.

    Attributes:
        module: the program.
        strategies: the strategies that it has.
        needs: the libraries that it imports.
    """

    module: str
    strategies: tuple[str, ...]
    needs: tuple[str, ...] = ("transformers",)


PEERS = {
    "trainer": Peer("benchmarks.peers.hf", ("single", "ddp", "fsdp"), ("transformers", "accelerate")),
    "trainer_grouped": Peer("benchmarks.peers.hf", ("single", "ddp"), ("transformers", "accelerate")),
    "workshop": Peer("benchmarks.peers.hf", ("single", "ddp"), ("transformers", "accelerate")),
    "accelerate": Peer(
        "benchmarks.peers.accelerate_loop", ("single", "ddp", "fsdp", "zero2"), ("transformers", "accelerate")
    ),
    "raw": Peer("benchmarks.peers.raw", ("single", "ddp")),
    "fsdp2": Peer("benchmarks.peers.fsdp2", ("fsdp",)),
}


IMAGES = "benchmarks.peers.images"
IMAGE_PEERS = ("workshop", "raw")
"""The program of image models, and the peers that it has."""


@dataclass(frozen=True)
class Measurement:
    """The result of one process.

    Attributes:
        status: completed, out of memory, failed or not run.
        reason: why there is no result.
        repeat: number of the round, from 1.
        wall_s: duration of the whole process.
        step_ms: median of the measured steps.
        peak_mib: peak of torch's allocator on the fullest GPU.
        padding_share: share of the positions without a token, from 0 to 1.
    """

    settings: Settings
    repeat: int
    status: str
    reason: str = ""
    command: str = ""
    wall_s: float | None = None
    samples_per_second: float | None = None
    peak_mib: float | None = None
    loss: float | None = None
    warmup_s: float | None = None
    device_name: str | None = None
    padding_share: float | None = None
    step_ms: float | None = None


def reason_not_to_run(settings: Settings) -> str | None:
    """Return why a peer cannot run with these settings, or None."""
    return None if settings.peer in OURS else next(_obstacles(PEERS[settings.peer], settings), None)


def _obstacles(peer: Peer, settings: Settings) -> Iterator[str]:
    if settings.data_root and settings.peer not in IMAGE_PEERS:
        yield "it trains text models only"
    for name in peer.needs:
        if find_spec(name) is None:
            yield f"{name} is not installed"
    if settings.strategy not in peer.strategies:
        yield f"it has no {settings.strategy}"
    if settings.model.startswith("gpt") and settings.peer != "raw":
        yield f"it trains models of transformers, and {settings.model} is a model of distexp"
    on_cpu = settings.device == "cpu"
    if on_cpu and settings.precision == "fp16":
        yield "fp16 needs a GPU"
    if on_cpu and settings.strategy in ("fsdp", "zero2") and settings.peer != "fsdp2":
        yield f"accelerate has {settings.strategy} on GPUs only"
    if settings.peer == "fsdp2" and settings.precision == "fp16":
        yield "it has no fp16"


def measure(settings: Settings, repeat: int, folder: Path, timeout_s: float) -> Measurement:
    """Run one measurement in a process, with its files in ``folder``."""
    reason = reason_not_to_run(settings)
    if reason is not None:
        return Measurement(settings, repeat, "not run", reason)
    shutil.rmtree(folder, ignore_errors=True)  # of a measurement that was interrupted
    folder.mkdir(parents=True)
    ours = settings.peer in OURS
    command = our_command(settings, folder / "run") if ours else peer_command(settings, folder)
    started = time.perf_counter()
    code = run(command, environment(settings), folder / "log.txt", timeout_s)
    facts = {"command": " ".join(command), "wall_s": time.perf_counter() - started}
    result = read_record(folder / "run" / "record.json") if ours else read_result(folder / "result.json")
    if code == 0 and result.get("samples_per_second"):
        return Measurement(settings, repeat, "completed", **facts, **result)
    log = (folder / "log.txt").read_text(errors="replace")
    reason = f"more than {timeout_s:.0f} s" if code is None else result.get("reason") or last_error(log)
    status = "out of memory" if is_out_of_memory(log + reason) else "failed"
    return Measurement(settings, repeat, status, f"{reason} (see {folder / 'log.txt'})", **facts)


def our_command(settings: Settings, run_dir: Path) -> list[str]:
    """Return the command of distexp."""
    strategy = "zero_stage=2" if settings.strategy == "zero2" else f"strategy={settings.strategy}"
    overrides = [
        f"model={settings.model}",
        *(_image_overrides(settings) if settings.data_root else _text_overrides(settings)),
        f"dataset.eval_size={settings.workers}",
        strategy,
        f"precision={settings.precision}",
        f"kernels={OURS[settings.peer]}",
        f"cluster.device={settings.device}",
        f"cluster.workers_per_node={settings.workers}",
        f"train.micro_batch_size={settings.micro_batch}",
        f"train.gradient_accumulation_steps={settings.accumulation}",
        "train.eval_batch_size=1",
        f"train.max_steps={settings.total_steps}",
        f"train.measure_after_step={settings.warmup}",
        "train.num_epochs=100",
        "train.schedule=constant",
        "train.warmup_steps=0",
        f"train.learning_rate={LEARNING_RATE}",
        f"train.weight_decay={WEIGHT_DECAY}",
    ]
    return [sys.executable, "-m", "distexp", *overrides, *settings.overrides, f"hydra.run.dir={run_dir}"]


def _text_overrides(settings: Settings) -> list[str]:
    return [
        "dataset=squad",
        f"dataset.train_path={settings.train_path}",
        f"dataset.eval_path={settings.eval_path}",
        f"dataset.train_size={settings.wanted_examples}",
        f"dataset.max_length={settings.max_length}",
        f"dataset.packing={str(settings.packs).lower()}",
        *([f"model.tokenizer={settings.tokenizer}"] if settings.tokenizer else []),
        *(["train.logits=all"] if settings.logits == "all" else []),
    ]


def _image_overrides(settings: Settings) -> list[str]:
    return [
        "dataset=tinyimagenet",
        f"dataset.root={settings.data_root}",
        f"dataset.train_size={settings.rows}",
        f"dataset.image_size={settings.image_size}",
        f"dataset.num_workers={settings.loader_processes}",
    ]


def peer_command(settings: Settings, folder: Path) -> list[str]:
    """Write the settings of a peer, and return its command."""
    path = folder / "settings.json"
    settings.write(path)
    module = IMAGES if settings.data_root else PEERS[settings.peer].module
    program = ["-m", module, str(path), str(folder / "result.json")]
    if settings.workers == 1:
        return [sys.executable, *program]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings.workers}"]
    return [sys.executable, *torchrun, *program]


def environment(settings: Settings) -> dict[str, str]:
    """Return the environment of a process; on GPUs, that of :func:`environment_of_gpus`."""
    return environment_of_gpus(settings.workers if settings.device == "cuda" else 0)


def environment_of_gpus(workers: int) -> dict[str, str]:
    """Return the environment of a process that sees as many GPUs as there are workers; all, if there are none.

    The Trainer would use DataParallel on further GPUs.
    """
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(visible_devices(workers))} if workers else {}
    return {**os.environ, "PYTHONPATH": path, **devices}


def visible_devices(gpus: int) -> list[str]:
    """Return the devices to use, of those that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (visible.split(",") if visible else [str(index) for index in range(gpus)])[:gpus]


def run(command: list[str], env: dict[str, str], log: Path, timeout_s: float) -> int | None:
    """Run a command, and return its exit code, or None after the time limit."""
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group, if it still runs."""
    for stop in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, stop)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                continue


def read_result(path: Path) -> dict[str, Any]:
    """Return the result of a peer, or an empty one."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def read_record(path: Path) -> dict[str, Any]:
    """Return the result of a run of distexp: its speed, memory and loss, or the reason why it has none."""
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    if record["status"] != "completed":
        return {"reason": f"{record['status']}: {(record['error'] or {}).get('message', '')}"}
    metrics, environment = record["metrics"], record["environment"] or {}
    return {
        "samples_per_second": metrics["train_samples_per_second"],
        "peak_mib": max((rank["peak_allocated_mib"] for rank in record["memory"]["torch"]), default=None),
        "loss": metrics["train_loss"],
        "device_name": environment.get("gpu_name") or "CPU",
        "padding_share": metrics.get("padding_share"),
        "step_ms": 1000 * metrics["step_time_s"]["p50"],
    }


def is_out_of_memory(text: str) -> bool:
    """Return whether a log shows that a GPU had too little memory."""
    return any(sign in text for sign in ("OutOfMemoryError", "CUDA out of memory", "oom_gpu"))


def last_error(log: str) -> str:
    """Return the last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exit|Exception)\b", line)]
    named = [line for line in errors if "ChildFailedError" not in line] or lines
    return named[-1][:300] if named else "no output"

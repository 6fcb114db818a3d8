"""Parts of a step's peaks: synthetic recordings with answers computed by hand, and a real one on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distexp.measure.memory import step_recording
from distexp.measure.memory import step_recording as process_memory
from distexp.measure.memory.step_parts import (
    END,
    Change,
    Frame,
    Mark,
    RecordedStep,
    is_communication,
    phase_peaks,
)
from distexp.measure.memory.step_recording import StepRecording, UsedBlock, known_parts, used_blocks
from distexp.runs.memory_trace import PEAK_PARTS, highest_peak, peak_entries
from distexp.runs.record import RunRecord
from distexp.runs.step_files import BACKWARD, FORWARD, OPTIMIZER
from distexp.strategies.optimizer import ModelTensors
from distexp.system.units import MIB
from tests.helpers.runs import run_distexp

KIB = 1024
PACKAGES = "/x/site-packages"
LINEAR = Frame(f"{PACKAGES}/torch/nn/modules/linear.py", 134, "forward")
MODEL = Frame("/home/me/model.py", 20, "forward")
FSDP = Frame(f"{PACKAGES}/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", 700, "alloc_all_gather_outputs")
ZERO = Frame(f"{PACKAGES}/deepspeed/runtime/zero/stage_1_and_2.py", 960, "average_tensor")
CHECKPOINT = Frame(f"{PACKAGES}/torch/utils/checkpoint.py", 1200, "recompute_fn")


def alloc(address: int, kib: float, *frames: Frame) -> Change:
    return Change(address, int(kib * KIB), frames=frames)


def free(address: int) -> Change:
    return Change(address, 0, is_free=True)


def recorded(changes: Sequence[Change], marks: Sequence[Mark], **options: Any) -> RecordedStep:
    settings: dict[str, Any] = {"start": {}, "known": {}, **options}
    return RecordedStep(changes=changes, marks=marks, **settings)


def kib(parts: dict[str, int]) -> dict[str, float]:
    """Return the parts that are not empty, in KiB, without the marks."""
    return {name: size // KIB for name, size in parts.items() if size // KIB}


def mark(number: int) -> Change:
    return alloc(900 + number, 0.001)


MARKS = (
    *(Mark(901, FORWARD), Mark(902, BACKWARD), Mark(903, OPTIMIZER, frozenset({50}))),
    Mark(904, END),
)


def test_each_phase_has_its_own_peak() -> None:
    """Weights have 10 KiB and states 20. The forward pass keeps 8 of 13, the backward pass makes 10 of gradients."""
    changes = [
        mark(1), alloc(30, 8, LINEAR, MODEL), alloc(31, 5, LINEAR, MODEL), free(31),
        mark(2), alloc(50, 10), alloc(32, 3), free(32), free(30),
        mark(3), alloc(33, 2), free(33), free(50),
        mark(4), alloc(34, 500),
    ]  # fmt: skip
    start = {10: 10 * KIB, 20: 20 * KIB, 40: KIB}
    step = recorded(changes, MARKS, start=start, known={10: "parameters", 20: "optimizer_states"})
    peaks = phase_peaks(step)
    states = {"parameters": 10, "optimizer_states": 20}
    assert list(peaks) == ["forward", "backward", "optimizer"]
    assert kib(peaks["forward"]) == {**states, "activations": 8, "temporaries": 5 + 1}
    assert kib(peaks["backward"]) == {**states, "activations": 8, "gradients": 10, "temporaries": 3 + 2}
    assert kib(peaks["optimizer"]) == {**states, "gradients": 10, "temporaries": 2 + 2}


def test_the_fp32_gradients_of_zero_are_gradients() -> None:
    """DeepSpeed copies the gradients to fp32 in its step. What its optimizer allocates inside is temporary."""
    step = Frame(f"{PACKAGES}/deepspeed/runtime/zero/stage_1_and_2.py", 2000, "step")
    wrapper = Frame(f"{PACKAGES}/deepspeed/utils/nvtx.py", 20, "wrapped_fn")
    adam = Frame(f"{PACKAGES}/deepspeed/runtime/zero/stage_1_and_2.py", 1900, "_optimizer_step")
    changes = [mark(1), mark(2), mark(3), alloc(31, 7, LINEAR, wrapper, step), alloc(32, 5, adam, step), mark(4)]
    peaks = phase_peaks(recorded(changes, MARKS))
    assert kib(peaks["optimizer"]) == {"gradients": 7, "temporaries": 5 + 1}, "three marks have 1.5 KiB"


def test_a_phase_may_be_highest_at_its_start() -> None:
    changes = [mark(1), alloc(30, 8), mark(2), free(30), alloc(50, 1), mark(3), free(50), mark(4)]
    peaks = phase_peaks(recorded(changes, MARKS))
    assert kib(peaks["backward"]) == {"activations": 8, "temporaries": 1}, "the two marks have 512 bytes each"
    assert kib(peaks["optimizer"])["gradients"] == 1


def test_a_phase_that_is_highest_at_its_end_does_not_count_the_next_mark() -> None:
    changes = [mark(1), alloc(30, 8), mark(2), free(30), alloc(50, 2), mark(3), alloc(33, 4), mark(4)]
    peaks = phase_peaks(recorded(changes, MARKS))
    marks = {FORWARD: 1, OPTIMIZER: 3}  # of 512 bytes each
    kept = {FORWARD: 8, OPTIMIZER: 2 + 4}
    assert {phase: peaks[phase].total() for phase in marks} == {
        phase: kept[phase] * KIB + marks[phase] * 512 for phase in marks
    }


def test_an_address_is_used_again() -> None:
    """Only the last allocation at the address of a mark is the mark, and each tensor has its own part."""
    changes = [
        alloc(902, 4), free(902), mark(1), alloc(30, 6), free(30), alloc(30, 7), mark(2), free(30), alloc(30, 2),
        mark(3), mark(4),
    ]  # fmt: skip
    peaks = phase_peaks(recorded(changes, MARKS))
    assert kib(peaks["forward"])["activations"] == 7
    assert "activations" not in kib(peaks["optimizer"])


def test_several_micro_batches_share_the_peaks() -> None:
    changes = [
        mark(1), alloc(30, 8), mark(2), free(30), alloc(50, 4),
        mark(5), alloc(31, 9), mark(6), alloc(32, 1), free(32), free(31), mark(3), mark(4),
    ]  # fmt: skip
    marks = (*MARKS[:2], Mark(905, FORWARD), Mark(906, BACKWARD), *MARKS[2:])
    peaks = phase_peaks(recorded(changes, marks))
    assert kib(peaks["forward"]) == {"activations": 9, "gradients": 4, "temporaries": 1}, "the marks have 1.5 KiB"
    assert kib(peaks["backward"])["activations"] == 9


def test_gradients_of_earlier_micro_batches_are_gradients() -> None:
    """DDP and FSDP replace the gradients that are summed without communication, so they are gone at the update.

    What Python code allocates meanwhile, such as the next batch, is temporary.
    """
    changes = [
        mark(1), mark(2), alloc(40, 6), alloc(41, 1, MODEL), mark(5), alloc(31, 9), mark(6), alloc(50, 3),
        free(40), free(31), mark(3), mark(4),
    ]  # fmt: skip
    marks = (*MARKS[:2], Mark(905, FORWARD), Mark(906, BACKWARD), *MARKS[2:])
    peaks = phase_peaks(recorded(changes, marks))
    assert kib(peaks["forward"]) == {"activations": 9, "gradients": 6, "temporaries": 1 + 1}
    assert kib(peaks["backward"]) == {"activations": 9, "gradients": 9, "temporaries": 2 + 1}


def test_gathered_parameters_and_buckets_are_communication() -> None:
    changes = [
        mark(1), alloc(30, 8, FSDP, LINEAR, MODEL), mark(2), alloc(31, 4, ZERO), alloc(50, 2, ZERO), mark(3), mark(4),
    ]  # fmt: skip
    start = {10: 16 * KIB}
    peaks = phase_peaks(recorded(changes, MARKS, start=start, known={10: "communication"}))
    assert kib(peaks["backward"]) == {"communication": 16 + 8 + 4, "gradients": 2, "temporaries": 1}


@pytest.mark.parametrize(
    ("file", "function", "expected"),
    [
        ("torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather", True),
        ("torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py", "compress", True),
        ("torch/distributed/tensor/_dispatch.py", "dispatch", False),
        ("torch/optim/adamw.py", "step", False),
        ("distexp/strategies/ddp_reduction.py", "add_to_masters", True),
        ("deepspeed/runtime/zero/partition_parameters.py", "all_gather_coalesced", True),
        ("deepspeed/runtime/zero/linear.py", "backward", False),
        ("deepspeed/runtime/zero/stage3.py", "_constant_buffered_norm2", False),
        ("deepspeed/runtime/engine.py", "forward", False),
        ("deepspeed/runtime/engine.py", "allreduce_bucket", True),
        ("transformers/models/bloom/modeling_bloom.py", "forward", False),
    ],
)
def test_the_innermost_call_decides_on_communication(file: str, function: str, expected: bool) -> None:
    frame = Frame(f"{PACKAGES}/{file}", 1, function)
    assert is_communication([LINEAR, frame, MODEL]) is expected
    assert is_communication([LINEAR, MODEL, frame]) is False
    assert is_communication([]) is False


def test_recomputed_tensors_are_activations_until_they_are_freed() -> None:
    """A checkpointed block is computed again: 6 KiB are kept for its backward pass, 3 only for a moment."""
    changes = [
        mark(1), alloc(30, 2), mark(2), alloc(31, 6, MODEL, CHECKPOINT), alloc(32, 3, MODEL, CHECKPOINT), free(32),
        alloc(33, 5), free(31), free(33), mark(3), mark(4),
    ]  # fmt: skip
    peaks = phase_peaks(recorded(changes, MARKS))
    assert kib(peaks["backward"]) == {"activations": 2 + 6, "temporaries": 5 + 1}


def test_logits_are_as_wide_as_the_vocabulary() -> None:
    """7 tokens and a vocabulary of 640 x 101 in bf16 are logits, and a weight of the same width is not."""
    vocabulary, width = 640 * 101, 16
    logits, weight = 7 * vocabulary * 2, width * vocabulary * 4
    changes = [mark(1), Change(30, logits), Change(31, weight), mark(2), Change(32, 2 * logits), mark(3), mark(4)]
    options: dict[str, Any] = {"weight_sizes": frozenset({width * vocabulary})}
    peaks = phase_peaks(recorded(changes, MARKS, vocabulary=vocabulary, **options))
    assert peaks["backward"]["logits"] == pytest.approx(3 * logits, abs=KIB)
    assert peaks["backward"]["activations"] == pytest.approx(weight, abs=KIB)
    byte_tokens = recorded(changes, MARKS, vocabulary=256)
    assert not byte_tokens.knows_logits
    assert not phase_peaks(byte_tokens)["backward"]["logits"], "256 divides most sizes"


def test_blocks_of_a_snapshot() -> None:
    block = {"address": 1, "size": 2048, "requested_size": 1500, "state": "active_allocated"}
    unused = {**block, "address": 2, "state": "inactive"}
    segments = [{"device": 0, "blocks": [block, unused]}, {"device": 1, "blocks": [{**block, "address": 3}]}]
    assert used_blocks(segments, 0) == [UsedBlock(1, 2048, requested=1500)]


def test_tensors_of_the_model_have_known_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view counts for its storage, and buckets that only DDP can reach are found by their sizes."""
    monkeypatch.setattr(step_recording, "_on_gpu", iter)
    weight, state, buffer = torch.zeros(10), torch.zeros(20), torch.zeros(5)
    blocks = [
        UsedBlock(1, 2048, requested=1500),
        UsedBlock(2, 2048, requested=1500),
        UsedBlock(3, 2048, requested=1501),
    ]
    tensors = ModelTensors([weight], [weight[:5]], [state], communication=[buffer], bucket_sizes=[1500])
    assert known_parts(tensors, blocks) == {
        weight.data_ptr(): "parameters", state.data_ptr(): "optimizer_states", buffer.data_ptr(): "communication",
        1: "communication",
    }  # fmt: skip


class FakeAllocator:
    """The functions of torch.cuda that a recording calls, with a history of one step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recording: StepRecording | None = None
        self.kept = self.resets = 0
        peaks = iter((0, 30, 40, 20))
        for name, result in {
            "memory_snapshot": lambda: [],
            "memory_stats": lambda _: dict.fromkeys(
                ("allocated_bytes.all.peak", "reserved_bytes.all.peak"), next(peaks) * MIB
            ),
            "reset_peak_memory_stats": self.reset,
            "memory_reserved": lambda _: 50 * MIB,
            "get_device_properties": lambda _: SimpleNamespace(uuid="1234"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, result)
        monkeypatch.setattr(step_recording.internals, "start_memory_history", lambda _: None)
        monkeypatch.setattr(step_recording.internals, "stop_memory_history", self.history)
        monkeypatch.setattr(step_recording, "process_memory", lambda uuid: (int(uuid) * MIB, "process"))
        monkeypatch.setattr(step_recording, "_on_gpu", iter)

    def reset(self, device: torch.device) -> None:
        self.resets += 1

    def keep(self) -> None:
        self.kept += 1

    def history(self, device: int) -> list[dict[str, Any]]:
        """Return the marks, with an allocation of 1 MiB more after each, that is never freed."""
        assert self.recording is not None
        assert device == 0
        entries = []
        for number, marker in enumerate(self.recording._markers):
            entries.append({"action": "alloc", "addr": marker.data_ptr(), "size": 1, "frames": []})
            entries.append({"action": "alloc", "addr": number, "size": MIB, "frames": []})
            entries.append({"action": "free_completed", "addr": number, "size": MIB})
        return entries


def test_a_recorded_step_gives_an_entry_for_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch)
    recording = allocator.recording = StepRecording(torch.device("cpu", 0), allocator.keep)
    model = nn.Linear(4, 4)
    recording.start(lambda: ModelTensors(list(model.parameters()), [], []))
    recording.start_forward()
    model(torch.ones(2, 4)).sum().backward()
    recording.start_update()
    forward, backward, update = recording.finish()
    assert [entry["phase"] for entry in (forward, backward, update)] == ["forward", "backward", "optimizer"]
    assert [entry["allocated_mib"] for entry in (forward, backward, update)] == [30, 40, 20]
    assert (forward["activations_mib"], backward["gradients_mib"]) == (1, 1), "what each pass leaves"
    assert forward["logits_mib"] is None, "the model has no vocabulary"
    assert backward["context_mib"] == 1234 - 50
    for entry in (forward, backward, update):
        assert sum(entry[name] or 0.0 for name in PEAK_PARTS) == pytest.approx(entry["allocated_mib"])
    assert allocator.kept == allocator.resets == 4, "each phase has its own peak, and no peak is lost"
    model(torch.ones(2, 4)).sum().backward()
    assert len(recording._marks) == 4, "later backward passes are not marked"


def test_memory_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container NVML lists no process of this run. Then it is the memory of the whole GPU."""
    listed: list[SimpleNamespace] = []
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: listed,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=7),
    )
    monkeypatch.setattr(process_memory.os, "getpid", lambda: 42)
    assert process_memory._read(nvml, "GPU-1") == (7, "gpu")
    listed += [SimpleNamespace(pid=1, usedGpuMemory=3), SimpleNamespace(pid=42, usedGpuMemory=5)]
    assert process_memory._read(nvml, "GPU-1") == (5, "process")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "strategy",
    ["strategy=single", "strategy=ddp", "strategy=fsdp", "zero_stage=1", "zero_stage=2", "zero_stage=3"],
)
def test_parts_add_up_on_a_gpu(strategy: str, tmp_path: Path) -> None:
    """The parts are known for 97 % of the allocated memory, and the peaks are those of the run."""
    overrides = (
        strategy, "model=gpt", "model.vocab_size=50000", "model.hidden_size=512", "model.ff_dim=2048", "precision=bf16",
        "cluster.device=cuda", "cluster.workers_per_node=1", "dataset.train_size=64", "dataset.eval_size=8",
        "train.micro_batch_size=4", "train.gradient_accumulation_steps=2", "train.num_epochs=1",
        "train.measure_after_step=1", "train.profile_steps=1", "hydra.run.dir=run",
    )  # fmt: skip
    done = run_distexp(*overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    record = RunRecord.read(tmp_path / "run" / "record.json")
    entries = peak_entries(record.memory)
    assert [entry["phase"] for entry in entries] == ["forward", "backward", "optimizer"]
    for entry in entries:
        assert sum(entry[name] or 0.0 for name in PEAK_PARTS) == pytest.approx(entry["allocated_mib"])
        assert abs(entry["other_mib"]) <= 0.03 * entry["allocated_mib"], entry
        assert entry["reserve_mib"] >= 0
        assert entry["context_mib"] > 100
    forward, _, update = entries
    assert forward["activations_mib"] > 10
    assert forward["logits_mib"] > 10
    assert update["activations_mib"] < 1, "no more than the loss"
    parameters = record.built.parameters if record.built else 0
    held = sum(update[name] for name in ("parameters_mib", "optimizer_states_mib", "gradients_mib")) * MIB
    # In fp32: weights, gradients and two moments. ZeRO-3 also has weights in bf16, and gradients for accumulation.
    bytes_per_parameter = 22 if strategy == "zero_stage=3" else 16
    assert held == pytest.approx(bytes_per_parameter * parameters, rel=0.3)
    (allocator,) = record.memory["torch"]
    assert highest_peak(record.memory)["allocated_mib"] <= allocator["peak_allocated_mib"]  # type: ignore[index]

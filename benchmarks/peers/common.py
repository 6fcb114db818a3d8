"""What the training loops share: the same samples, model sizes, step clock and result file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.peers.settings import Settings
from distexp.config import DatasetConfig, ModelConfig
from distexp.config.keys import conf_dir
from distexp.data.base import IGNORE
from distexp.data.squad import load
from distexp.measure.clock import StepClock
from distexp.system.processes import end_at_once
from distexp.system.units import MIB

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class PaddedSamples(Dataset[Mapping[str, Tensor]]):
    """SQuAD samples as distexp tokenizes them, padded to one length."""

    def __init__(self, settings: Settings) -> None:
        source = DatasetConfig(
            train_path=settings.train_path,
            eval_path=settings.eval_path,
            train_size=settings.wanted_examples,
            eval_size=settings.workers,
            max_length=settings.max_length,
        )
        data = load(source, model_config(settings), seed=0)
        if len(data.train) < settings.rows:
            raise SystemExit(f"{settings.train_path} has {len(data.train)} usable examples, fewer than {settings.rows}")
        batch = data.collate([data.train[index] for index in range(settings.rows)])
        self.columns = {**batch.inputs, "labels": batch.labels}
        self.padding_share = 1 - batch.inputs["attention_mask"].float().mean().item()
        self.vocabulary = data.num_classes

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def loader(self, settings: Settings, device: torch.device, *, sharded: bool) -> DataLoader[Mapping[str, Tensor]]:
        """Return a DataLoader over all samples, or over those of this worker."""
        sampler: DistributedSampler[Mapping[str, Tensor]] | None = None
        if sharded and settings.workers > 1:
            sampler = DistributedSampler(self, shuffle=False)
        return DataLoader(self, settings.micro_batch, sampler=sampler, pin_memory=device.type == "cuda", drop_last=True)


PADDING = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE}
PADDED_MULTIPLE = 8


class TrimmedSamples(PaddedSamples):
    """The same samples without padding."""

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        row = super().__getitem__(index)
        length = int(row["attention_mask"].sum())
        return {name: column[:length] for name, column in row.items()}


def pad_to_longest(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Collate rows of different lengths, padded to the longest one and to a multiple of 8."""
    longest = max(len(row["labels"]) for row in rows)
    length = -(-longest // PADDED_MULTIPLE) * PADDED_MULTIPLE
    return {
        name: torch.stack([pad(row[name], (0, length - len(row[name])), value=value) for row in rows])
        for name, value in PADDING.items()
    }


def model_config(settings: Settings) -> ModelConfig:
    """Return the model section of distexp's model group, with random weights."""
    content = OmegaConf.load(conf_dir() / "model" / f"{settings.model}.yaml")
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.select(content, "model"))
    config: ModelConfig = OmegaConf.to_object(merged)  # type: ignore[assignment]
    return replace(config, tokenizer=settings.tokenizer) if settings.tokenizer else config


def build_bloom(settings: Settings, device: torch.device) -> nn.Module:
    """Build the BLOOM of transformers with random weights on the device."""
    from transformers import BloomConfig, BloomForCausalLM

    sizes = model_config(settings)
    config = BloomConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        n_layer=sizes.num_layers,
        n_head=sizes.num_heads,
        use_cache=False,
    )
    with device:
        model: nn.Module = BloomForCausalLM(config)
    return model


def start_worker(settings: Settings, *, join: bool = True) -> torch.device:
    """Select the device of this worker, and join the process group if there are several.

    Args:
        settings: the settings of the measurement.
        join: False if a library joins the group.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if settings.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if join and settings.workers > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    return device


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return a copy of a batch on a device."""
    return {name: column.to(device, non_blocking=True) for name, column in batch.items()}


class StepRecorder:
    """Times and losses of the steps. It does not synchronize the device between steps."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.clock = StepClock(device)
        self.losses: list[Tensor] = []

    def start(self) -> None:
        """Start the clock; call it before the first step."""
        self.clock.restart()

    def end_step(self, loss: Tensor | None = None) -> None:
        """Record the end of an optimizer step, and its loss if it is known."""
        self.clock.mark()
        if loss is not None:
            self.losses.append(loss.detach())

    def result(self, mean_loss: float | None = None, padding_share: float | None = None) -> dict[str, object]:
        """Return the result of this worker."""
        durations = self.clock.durations()
        if len(durations) != self.settings.total_steps:
            raise SystemExit(f"{len(durations)} steps were trained instead of {self.settings.total_steps}")
        measured = durations[self.settings.warmup :]
        loss = torch.stack(self.losses).mean().item() if self.losses else mean_loss
        return {
            "samples_per_second": self.settings.rows_per_step * len(measured) / sum(measured),
            "peak_mib": self._peak_mib(),
            "loss": loss,
            "padding_share": padding_share,
            "step_ms": 1000 * median(measured),
            "warmup_s": sum(durations[: self.settings.warmup]),
            "device_name": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU",
        }

    def _peak_mib(self) -> float | None:
        """Return the peak of the allocator on the fullest GPU."""
        if self.device.type != "cuda":
            return None
        peak = torch.tensor(torch.cuda.max_memory_allocated() / MIB, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return float(peak)


def measure(train: Callable[[Settings], dict[str, object]]) -> None:
    """Train as the two arguments of the program request: ``SETTINGS.json RESULT.json``."""
    settings, output = Settings.read(Path(sys.argv[1])), Path(sys.argv[2])
    result = train(settings)
    if int(os.environ.get("RANK", "0")) == 0:
        output.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()
        end_at_once(0)  # Threads of gloo may abort an orderly exit.

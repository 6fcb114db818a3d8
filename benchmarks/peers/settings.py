"""Settings of one measurement, which its process reads from a JSON file. It imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

LEARNING_RATE = 1e-5
WEIGHT_DECAY = 0.01
CLIPPING = 1.0

OURS = {"ours": "fast", "reference": "reference"}
"""Peers that are distexp, with their ``kernels``."""

SAMPLES_PER_ROW = 8
"""Examples to read for each packed row. A row of 512 tokens has about three samples of SQuAD."""

SPARE_SAMPLES = 8
"""More examples are read than needed, because those without room for question and answer are left out."""


@dataclass(frozen=True)
class Settings:
    """What one process trains and measures.

    Attributes:
        peer: ours, or the name of a training loop.
        data_root: folder of TinyImageNet, for a model of images; then the paths of SQuAD are not used.
        tokenizer: name or folder of a tokenizer; empty: that of the model group, trained on the text.
        loader_processes: DataLoader processes of each worker, for images.
        strategy: single, ddp, fsdp or zero2.
        workers: processes, with one GPU each.
        warmup: first steps, which are not measured.
        steps: measured steps.
        logits: targets or all, as ``train.logits`` of distexp. The other loops always compute all.
        packing: whether distexp packs several samples into a row.
        overrides: further overrides of distexp.
    """

    peer: str
    model: str
    train_path: str
    eval_path: str
    data_root: str = ""
    strategy: str = "single"
    workers: int = 1
    micro_batch: int = 16
    accumulation: int = 1
    warmup: int = 10
    steps: int = 30
    max_length: int = 512
    tokenizer: str = ""
    image_size: int = 224
    loader_processes: int = 0
    logits: str = "targets"
    precision: str = "bf16"
    compile: bool = True
    device: str = "cuda"
    packing: bool = False
    overrides: tuple[str, ...] = ()

    @property
    def total_steps(self) -> int:
        """Steps with the warmup."""
        return self.warmup + self.steps

    @property
    def rows_per_step(self) -> int:
        """Rows of all workers in an optimizer step. A row is a sample, or several with packing."""
        return self.micro_batch * self.accumulation * self.workers

    @property
    def rows(self) -> int:
        """Rows of the whole training."""
        return self.total_steps * self.rows_per_step

    @property
    def wanted_examples(self) -> int:
        """Examples to read."""
        return self.rows * SAMPLES_PER_ROW if self.packs else self.rows + self.rows // 50 + SPARE_SAMPLES

    @property
    def packs(self) -> bool:
        """Whether rows have several samples."""
        return self.packing and self.peer in OURS

    def as_peer(self, peer: str) -> Settings:
        """Return the settings of another peer. The workshop has its own precision, and its own batch for text."""
        if peer != "workshop":
            return replace(self, peer=peer)
        workshop = replace(self, peer=peer, precision="fp16", compile=False)
        return workshop if self.data_root else replace(workshop, micro_batch=4, accumulation=4)

    def write(self, path: Path) -> None:
        """Write the settings as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read settings."""
        return cls.from_json(json.loads(path.read_text()))

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Settings:
        """Return the settings of a JSON object."""
        return cls(**{**content, "overrides": tuple(content["overrides"])})

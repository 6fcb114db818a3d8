"""The native training loop and a hand-written one, with the same model, batches, optimizer and clipping."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from distexp.config import Config
from distexp.data.base import TaskData
from distexp.data.loader import BatchSharding, ShardedBatchSampler
from distexp.distributed.context import Context
from distexp.measure.clock import synchronize
from distexp.runs.events import Events
from distexp.strategies.base import load_strategy
from distexp.system.seeding import seed_everything
from distexp.training.build import build_model, load_data, make_loaders, model_factory
from distexp.training.inputs import StepPlan, TrainingInputs
from distexp.training.loop import fit
from distexp.training.metrics_logger import MetricsLogger
from distexp.training.watchers import build_watchers
from tests.helpers.runs import resolve_cell

STEPS, BATCH = 10, 16
SMALL_GPT = (
    "model=gpt_tiny",
    "dataset=synthetic",
    "strategy=single",
    "cluster.device=cpu",
    "cluster.cpus_per_worker=1",
    "model.hidden_size=128",
    "model.ff_dim=512",
    "dataset.max_length=64",
    f"dataset.train_size={STEPS * BATCH}",
    f"dataset.eval_size={BATCH}",
    f"train.micro_batch_size={BATCH}",
    "train.num_epochs=1",
    "train.schedule=constant",
    "train.warmup_steps=0",
    "train.learning_rate=1e-4",
    "train.weight_decay=0",
)
"""Overrides of a training with STEPS steps per epoch."""


class NativeLoop:
    """``distexp.training.loop.fit``, timed until its evaluation starts."""

    def __init__(self, config: Config, data: TaskData, context: Context) -> None:
        self.config, self.context = config, context
        seed_everything(config.train.seed)
        self.model = load_strategy(config).setup(build_model(config, data, context), config, context)
        self.training, self.evaluation = make_loaders(config, data, context)
        self.model.module.eval = self._start_evaluation  # type: ignore[method-assign]
        self.losses: list[float] = []

    def _start_evaluation(self) -> nn.Module:
        synchronize(self.context.device)
        self.ended = time.perf_counter()
        return self.model.module.train(False)

    def train_epoch(self) -> float:
        """Train one epoch; return the time of its steps in seconds."""
        plan = StepPlan(self.config.train, self.training.steps_per_epoch)
        watchers = build_watchers(plan, self.config.measure, self.context)
        logger = MetricsLogger(plan, self.context, Events(self.context.run_dir, enabled=True), watchers)
        started = time.perf_counter()
        fit(self.model, TrainingInputs(self.training, self.evaluation, plan, logger, run_id=""))
        logger.finish()
        self.losses += logger.history.losses
        return self.ended - started


class HandWrittenLoop:
    """The loop of a tutorial, except that the losses are read from the device only every ten steps."""

    def __init__(self, config: Config, data: TaskData, context: Context) -> None:
        train, self.device = config.train, context.device
        on_gpu = self.device.type == "cuda"
        seed_everything(train.seed)
        self.model = model_factory(config, data)().to(self.device)
        beta1, beta2 = train.betas
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=train.learning_rate,
            betas=(beta1, beta2),
            eps=train.eps,
            weight_decay=0.0,
            fused=on_gpu,
        )
        sharding = BatchSharding(0, 1, train.micro_batch_size)
        self.loader = DataLoader(
            data.train,  # type: ignore[arg-type]
            batch_sampler=ShardedBatchSampler(len(data.train), sharding, seed=train.seed, shuffle=True),
            collate_fn=data.collate,
            pin_memory=on_gpu,
        )
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=config.precision.name == "bf16")
        self.losses: list[float] = []

    def train_epoch(self) -> float:
        """Train one epoch; return the time of its steps in seconds."""
        self.model.train()
        started = time.perf_counter()
        window = []
        for step, host_batch in enumerate(self.loader, start=1):
            batch = host_batch.to(self.device)
            with self.autocast:
                outputs = self.model(**batch.inputs)
            logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
            loss = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), batch.labels[:, 1:].flatten(), ignore_index=-100
            )
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            window.append(loss.detach())
            if step % 10 == 0:
                self.losses += torch.stack(window).tolist()
                window = []
        synchronize(self.device)
        return time.perf_counter() - started


def build_loops(overrides: tuple[str, ...], run_dir: Path, device: torch.device) -> tuple[NativeLoop, HandWrittenLoop]:
    """Build both loops for a configuration."""
    config = resolve_cell(*overrides)
    context = Context(rank=0, world_size=1, local_rank=0, workers_per_node=1, nodes=1, device=device, run_dir=run_dir)
    data = load_data(config, context)
    return NativeLoop(config, data, context), HandWrittenLoop(config, data, context)

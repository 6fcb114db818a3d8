"""Our loop against a loop that a person writes by hand: the same model, batches, optimizer and clipping."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from distexp.config import Config
from distexp.config.targets import load_strategy
from distexp.data.base import TaskData
from distexp.data.shards import BatchSharding, ShardedBatchSampler
from distexp.distributed.context import Context
from distexp.measure.clock import synchronize
from distexp.runs.events import Events
from distexp.system.seeding import seed_everything
from distexp.training.loop import fit
from distexp.training.metrics_logger import MetricsLogger, Plan
from distexp.worker.rank import build_model, builder, load_data, loaders
from tests.helpers.paired_timing import assert_ratio, paired_ratios
from tests.helpers.runs import resolve_cell

STEPS = 10  # of an epoch
EPOCHS = 6  # of each loop in one ratio, turn by turn: what disturbs one disturbs the other
BATCH = 16
SLOWEST_RATIO = 1 / 0.97
SETTINGS = (
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


class Ours:
    """``distexp.training.loop.fit``, timed from its first step to the start of its evaluation."""

    def __init__(self, config: Config, data: TaskData, context: Context) -> None:
        self.config, self.context = config, context
        seed_everything(config.train.seed)
        self.engine = load_strategy(config).setup(build_model(config, data, context), config, context)
        self.training, self.evaluation = loaders(config, data, context)
        self.engine.model.eval = self._eval  # type: ignore[method-assign]
        self.losses: list[float] = []

    def _eval(self) -> nn.Module:
        synchronize(self.context.device)
        self.ended = time.perf_counter()
        return self.engine.model.train(False)

    def epoch(self) -> float:
        """Seconds of the steps of one epoch."""
        plan = Plan(self.config.train, self.training.steps_per_epoch)
        logger = MetricsLogger(plan, self.context, Events(self.context.run_dir, enabled=True))
        started = time.perf_counter()
        fit(self.engine, self.training, self.evaluation, plan, logger)
        logger.finish()
        self.losses += logger.losses
        return self.ended - started


class Bare:
    """The loop of a tutorial, with the loss left on the device and read every ten steps."""

    def __init__(self, config: Config, data: TaskData, context: Context) -> None:
        train, self.device = config.train, context.device
        on_gpu = self.device.type == "cuda"
        seed_everything(train.seed)
        self.model = builder(config, data)().to(self.device)
        beta1, beta2 = train.betas
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=train.learning_rate,
            betas=(beta1, beta2),
            eps=train.eps,
            weight_decay=0.0,
            fused=on_gpu,
        )
        batches = ShardedBatchSampler(
            len(data.train), BatchSharding(0, 1, train.micro_batch_size), seed=train.seed, shuffle=True
        )
        self.loader = DataLoader(
            data.train,  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=data.collate,
            pin_memory=on_gpu,
        )
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=config.precision.name == "bf16")
        self.losses: list[float] = []

    def epoch(self) -> float:
        """Seconds of the steps of one epoch."""
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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A second thread would measure whatever else runs on this machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_loop_is_as_fast_as_one_written_by_hand(tmp_path: Path) -> None:
    config = resolve_cell(*SETTINGS)
    context = Context(
        rank=0, world_size=1, local_rank=0, workers_per_node=1, nodes=1, device=torch.device("cpu"), run_dir=tmp_path
    )
    data = load_data(config, context)
    ours, bare = Ours(config, data, context), Bare(config, data, context)
    warm = ours.epoch(), bare.epoch()
    assert ours.losses == pytest.approx(bare.losses, rel=1e-4), "not the same training"
    assert min(warm) / STEPS >= 0.02, "a step must outweigh what a loop does around it"
    assert_ratio(lambda: paired_ratios(ours.epoch, bare.epoch, repeats=5, turns=EPOCHS), at_most=SLOWEST_RATIO)

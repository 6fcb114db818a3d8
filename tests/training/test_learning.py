"""The small models learn their data sets, in a simple loop without a strategy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from distexp.config import Config
from distexp.config.custom_code import locate
from distexp.data.base import TaskData
from distexp.models.objective import count_correct, loss_sum
from distexp.training.inputs import StepPlan
from tests.helpers.runs import resolve_cell


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, which is faster for small matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def learn(config: Config, steps: int) -> tuple[float, float, float]:
    """Return the evaluation loss before and after some steps, and the accuracy after them."""
    torch.manual_seed(config.train.seed)
    data: TaskData = locate(config.dataset._target_)(config.dataset, config.model, config.train.seed)
    model: nn.Module = locate(config.model._target_)(config.model, data.num_classes)
    optimizer: torch.optim.Optimizer
    if config.train.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), config.train.learning_rate, momentum=config.train.momentum)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), config.train.learning_rate)
    before, _ = evaluate(model, data)
    model.train()
    for _ in range(steps):
        indices = torch.randint(len(data.train), (2 * config.train.micro_batch_size,)).tolist()
        batch = data.collate([data.train[index] for index in indices]).to(torch.device("cpu"))
        optimizer.zero_grad()
        (loss_sum(data.task, model(**batch.inputs), batch) / batch.num_targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return before, *evaluate(model, data)


@torch.no_grad()
def evaluate(model: nn.Module, data: TaskData) -> tuple[float, float]:
    """Return the mean loss and the accuracy over the evaluation set."""
    model.eval()
    batch = data.collate([data.evaluation[index] for index in range(len(data.evaluation))]).to(torch.device("cpu"))
    outputs = model(**batch.inputs)
    hits = count_correct("image_classification", outputs, batch)
    return float(loss_sum(data.task, outputs, batch)) / batch.num_targets, float(hits) / batch.num_targets


@pytest.mark.parametrize("model", ["bloom_tiny", "gpt_tiny"])
def test_a_small_language_model_learns_the_sample(model: str) -> None:
    before, after, _ = learn(resolve_cell(f"model={model}"), steps=60)
    assert before > 6.5
    assert after < 2.5, "about 1.9; rounding on another CPU changes it by 0.05"


def test_a_small_resnet_learns_the_sample() -> None:
    config = resolve_cell("model=resnet_tiny")
    assert config.dataset.name == "tinyimagenet_sample"
    before, after, accuracy = learn(config, steps=60)
    assert before > 2
    assert after < 1.2
    assert accuracy > 0.5, "guessing gives 0.1"


def test_another_data_set_can_be_chosen_for_an_image_model() -> None:
    config = resolve_cell("model=resnet_tiny", "dataset=synthetic")
    assert config.dataset.name == "synthetic"


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_schedule_has_the_learning_rates_of_transformers(schedule: str, warmup: int) -> None:
    from transformers import get_scheduler

    chosen = (f"train.schedule={schedule}", f"train.warmup_steps={warmup}", "train.learning_rate=0.5")
    plan = StepPlan(resolve_cell(*chosen, "train.num_epochs=2").train, steps_per_epoch=5)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    expected = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=plan.total_steps)
    for step in range(plan.total_steps):
        assert plan.learning_rate(step) == pytest.approx(expected.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        expected.step()

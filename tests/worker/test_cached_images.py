"""Training on cached images, from the configuration to the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from distexp.data.base import TaskData, Workload
from distexp.data.image_cache import cache_images, describe_cache
from distexp.distributed.context import Context
from distexp.measure.flops import training_flops
from distexp.models import transforms
from distexp.models.blueprint import Blueprint
from distexp.models.objective import evaluation_sums
from distexp.models.resnet import build as build_resnet
from distexp.models.transforms import read_memory_format
from distexp.runs.events import Events
from distexp.runs.record import RunRecord
from distexp.strategies.base import load_strategy
from distexp.training import build
from distexp.training.loop import train_step
from distexp.worker import rank
from tests.helpers.runs import make_spec

pytestmark = pytest.mark.slow

SMALL = (
    "model=resnet_tiny", "strategy=single", "cluster.workers_per_node=1", "cluster.device=cpu",
    "model.depths=[1,1,1,1]", "dataset.train_size=24", "dataset.eval_size=8",
    "train.micro_batch_size=4", "train.gradient_accumulation_steps=2", "train.num_epochs=2", "train.max_steps=5",
    "train.measure_after_step=1",
)  # fmt: skip

Train = Callable[..., RunRecord]


@pytest.fixture
def train(one_rank_group: None, tmp_path: Path) -> Iterator[Train]:
    """Return a function that trains with some overrides in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for small images

    def run(*overrides: str) -> RunRecord:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        spec = make_spec(*SMALL, *overrides)
        spec.write(folder)
        return rank.train(spec, Context(0, 1, 0, 1, 1, torch.device("cpu"), folder), Events(folder, enabled=True))

    yield run
    torch.set_num_threads(threads)


def keep_on_device(data: TaskData, place: str, device: torch.device) -> TaskData:
    """Cache images as on a GPU, which a CPU run refuses."""
    return cache_images(data, "gpu", device)


def test_a_cache_changes_no_loss(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train()
    cached = train("dataset.cache=cpu")
    monkeypatch.setattr(build, "cache_images", keep_on_device)
    on_device = train("dataset.cache=cpu")
    assert plain.built is not None
    assert cached.built is not None
    assert (plain.built.image_cache, cached.built.image_cache) == ("none", "cpu")
    assert len(plain.metrics.train_losses) == 2
    for other in (cached, on_device):
        assert other.metrics.train_losses == plain.metrics.train_losses
        assert other.metrics.eval_losses == plain.metrics.eval_losses
        assert other.metrics.eval_accuracies == plain.metrics.eval_accuracies
        assert other.metrics.tflops_per_device is not None


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_weights_in_the_format_of_images_change_no_loss(train: Train, strategy: str) -> None:
    plain, changed = train(f"strategy={strategy}"), train(f"strategy={strategy}", "train.channels_last=true")
    assert plain.built is not None
    assert changed.built is not None
    assert (plain.built.channels_last, changed.built.channels_last) == (False, True)
    assert changed.metrics.train_losses == pytest.approx(plain.metrics.train_losses, rel=1e-4)


@pytest.mark.usefixtures("one_rank_group")
def test_a_checkpoint_has_weights_of_any_format(tmp_path: Path) -> None:
    context = Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path)
    models = []
    for seed, overrides in enumerate(((), ("train.channels_last=true",))):
        config = make_spec(*SMALL, *overrides).config
        torch.manual_seed(seed)
        build = partial(build_resnet, config.model, 10)
        models.append(load_strategy(config).setup(Blueprint(build, context), config, context))
    for source, target in (models, models[::-1]):
        folder = tmp_path / str(id(source))
        source.save(folder)
        with torch.no_grad():
            next(target.module.parameters()).zero_()
        target.load(folder)
        for (name, weight), (_, loaded) in zip(source.weights(), target.weights(), strict=True):
            assert weight.equal(loaded), name
            assert loaded.is_contiguous(), "safetensors writes no other format"
    assert [read_memory_format(model.module) for model in models] == [False, True]


def test_flops_do_not_depend_on_the_cache(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    context = Context(0, 1, 0, 1, 1, cpu, tmp_path)
    config = make_spec(*SMALL).config
    data = build.load_data(config, context)
    expected = training_flops(config, data, Workload(samples=7, rows=8), cpu)
    assert expected.model > 0
    for place in ("cpu", "gpu"):
        cached = cache_images(data, place, cpu)
        assert training_flops(config, cached, Workload(samples=7, rows=8), cpu) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["cpu", "gpu"])
def test_no_step_on_images_waits_for_the_gpu(cache: str, tmp_path: Path) -> None:
    """Torch raises an error if an operation copies a value to the host."""
    device = torch.device("cuda", 0)
    overrides = (*SMALL, "cluster.device=cuda", "precision=bf16", f"dataset.cache={cache}")
    config, context = make_spec(*overrides).config, Context(0, 1, 0, 1, 1, device, tmp_path)
    data = build.load_data(config, context)
    assert describe_cache(data) == cache
    training, evaluation = build.make_loaders(config, data, context)
    model = load_strategy(config).setup(build.build_model(config, data, context), config, context)

    def run(epoch: int) -> None:
        for step in training.iter_steps(epoch):
            train_step(model, step)
            model.step(0.01)
        for step in evaluation.iter_steps(0):
            for batch in step.micro_batches:
                evaluation_sums(data.task, model.forward(batch), batch)

    run(0)  # allocates what is copied to the GPU once
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_resnet_is_compiled_as_one_graph(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo captures the model for training and for evaluation. The backend changes nothing."""
    torch.compiler.reset()
    monkeypatch.setattr(transforms, "BACKEND", "eager")
    options = ("dataset.cache=cpu", "precision=bf16", "train.compute_weights=step")
    eager, compiled = train(*options), train(*options, "train.compile=model")
    assert compiled.built is not None
    assert (compiled.built.compiled, compiled.built.compute_weights) == ("model", "step")
    assert compiled.metrics.train_losses == pytest.approx(eager.metrics.train_losses, rel=1e-3)
    assert (compiled.metrics.compile or {})["graphs"] == 2

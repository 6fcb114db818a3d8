"""The prediction of the memory of one training step, without a GPU and without weights.

The real model, strategy and training step run with fake tensors: they have a shape, and no values. The process group is
fake too. A recorder lists the storages that are allocated and freed.
"""

import copy
import io
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, redirect_stdout
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distexp.config import Config, ConfigError, custom_code
from distexp.data.base import Batch, Samples
from distexp.data.images import ImageFiles, channel_statistics, decoded_bytes
from distexp.distributed.context import Context
from distexp.hardware.facts import cublas_workspace, gpu_facts
from distexp.models import attention, objective, transforms
from distexp.models import blueprint as introspection
from distexp.models.blueprint import Blueprint, BlueprintOfZeros
from distexp.plan.replay import PlanError, StepTrace, replay
from distexp.plan.trace import compiled, cuda_semantics, traced_run, zero12
from distexp.plan.trace.recorder import GPU, StorageRecorder, tensors_in
from distexp.strategies.base import load_strategy
from distexp.strategies.parallel.tensor import shares_vocabulary
from distexp.strategies.torch_model import TorchModel
from distexp.strategies.zero.ds_initialization import parameter_sizes
from distexp.system.torch_internals import collectives, tensors
from distexp.training.build import build_model, load_data

STEPS_BEFORE, STEPS_BEFORE_DDP_REPEATS = 1, 2
"""Steps before the recorded one. The first one allocates the optimizer's states, the second one DDP's final buckets."""

MICRO_BATCHES = 3
"""Micro-batches of a step that are traced: the first one, one that adds to gradients, and the last one."""


def trace_step(config: Config, *, on_gpu: bool = True) -> StepTrace:
    """Return the allocations of an optimizer step. Raise PlanError if it cannot be traced.

    They are those of rank 0. In a pipeline, and at ZeRO stages 1 and 2, they are those of the worker that needs most.
    """
    started = time.perf_counter()
    images_on_gpu = config.dataset.cache == "gpu"
    config, notes = _prepare(config)
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(printed):
            warnings.simplefilter("ignore")
            options = {"images_on_gpu": images_on_gpu, "on_gpu": on_gpu}
            tensor = config.parallel.tensor  # Workers that share layers have the same sizes.
            traces = [_record(config, 0, **options)]
            ranks = (*range(tensor, config.parallel.pipeline * tensor, tensor), *traces[0].other_ranks)
            traces += [_record(config, rank, **options) for rank in ranks]
            trace = max(traces, key=_needed) if len(traces) > 1 else traces[0]
    except (PlanError, ConfigError):
        raise
    except Exception as error:
        raise PlanError(traced_run.describe_failure(error)) from error
    notes += [line.removeprefix("note: ") for line in printed.getvalue().splitlines()]
    return replace(trace, seconds=time.perf_counter() - started, notes=tuple(notes))


def _needed(trace: StepTrace) -> int:
    """Return the sum of both peaks, because ranks with the same allocated memory may reserve more."""
    found = replay(trace.events, trace.history, trace.evaluation)
    return found.peak_allocated + found.peak_reserved


def _prepare(config: Config) -> tuple[Config, list[str]]:
    """Return a copy of the configuration that can be traced, and notes about what differs."""
    config = copy.deepcopy(config)
    notes: list[str] = []
    if load_strategy(config).tracer is None:
        config.offload.pin_memory = False  # needs a GPU, and takes the same memory
    elif note := zero12.version_note():
        notes.append(note)
    config.dataset.num_workers = 0
    config.precision.name = config.precision.outside_products
    if config.train.compiled == "graphs":
        notes.append("train.compile=graphs: predicted without graphs; torch does not count their memory as allocated")
    if config.dataset.cache == "gpu":
        notes.append("dataset.cache=gpu: the images count as temporaries")
    elif config.dataset.cache == "cpu":
        notes.append("dataset.cache=cpu: the images are not in the predicted host memory")
    config.dataset.cache = "none"  # To decode all images takes minutes, and does not change the step.
    return config, notes


def _decoded_bytes(samples: Samples) -> int:
    if not isinstance(samples, ImageFiles):  # A run refuses them too.
        raise PlanError("dataset.cache=gpu needs data of distexp.data.images.ImageFiles: use dataset.cache=none")
    return decoded_bytes(samples)


def _record(config: Config, rank: int, *, images_on_gpu: bool, on_gpu: bool) -> StepTrace:
    """Build the model, run two steps (three with DDP) and an evaluation if it is needed; return what was recorded."""
    context = traced_run.traced_context(config, rank)
    data = load_data(config, context)
    image_bytes = sum(map(_decoded_bytes, (data.train, data.evaluation))) if images_on_gpu else 0
    batch = traced_run.largest_batch(config, data)
    train, evaluated = config.train, None
    # A compiled evaluation takes long to trace, and seldom needs more memory.
    if train.evaluate and (train.compiled == "none" or (train.eval_batch_size or 0) > train.micro_batch):
        evaluated = traced_run.evaluation_batch(config, data)
    fake_mode = tensors.make_fake_mode()
    kernels = compiled.KernelBuffers(gpu_facts(config.plan.gpu).multiprocessors) if on_gpu else None
    recorder = StorageRecorder(fake_mode, kernels)

    def start_backward() -> None:
        recorder.phase = "backward"
        recorder.end_forward()

    with ExitStack() as stack:
        for clear in (channel_statistics.cache_clear, attention.clear_caches):
            stack.callback(clear)  # They would keep fake tensors.
        for replacement in _replacements(config, context, recorder, fake_mode, on_gpu=on_gpu):
            stack.enter_context(replacement)
        blueprint = build_model(config, data, context, BlueprintOfZeros)
        if not traced_run.has_padding(data, batch):
            stack.enter_context(traced_run.without_padding())
        vocabulary = _vocabulary(blueprint.model)
        sizes, trained = parameter_sizes(blueprint.model)
        tied = _tied_parameters(blueprint.model)
        stack.enter_context(fake_mode)
        stack.enter_context(recorder.recording())
        stack.enter_context(cuda_semantics.CudaFunctions(start_backward, on_gpu=on_gpu).used())
        images = torch.empty(image_bytes, dtype=torch.uint8, device=GPU)
        recorder.assign("batch", [images])
        step = TracedStep(config, blueprint, context, recorder, on_gpu=on_gpu)
        if vocabulary is not None and shares_vocabulary(blueprint.model):
            vocabulary //= context.tensor
        steps = STEPS_BEFORE_DDP_REPEATS if step.is_ddp else STEPS_BEFORE
        for number in range(steps + 1):
            if number == steps:
                recorder.start()
            recorder.phase = "forward"
            # As in a run, the batches of the previous step are still there.
            batches = [_to_fake(batch) for _ in range(config.train.gradient_accumulation_steps)]
            recorder.assign("batch", tensors_in([(batch.inputs, batch.labels) for batch in batches]))
            step.run(batches)
        end = len(recorder.changes)
        work = recorder.step_work(config.train.gradient_accumulation_steps, step.most_traced)
        recorder.phase = "evaluation"
        if evaluated is not None:
            step.evaluate(_to_fake(evaluated))
        # The model is freed after this block, which is no part of the step.
        trace = recorder.trace(end, vocabulary, cublas_workspace(config.plan.gpu) if on_gpu else 0)
        share, others = sum(trained) / max(1, sum(sizes)), getattr(step.model, "other_ranks", ())
        known: dict[str, Any] = {"parameters": sum(sizes), "tied_parameters": tied, "trained_share": share}
        return replace(trace, work=work, other_ranks=others, **known)


def _tied_parameters(model: nn.Module) -> int:
    """Return the parameters of the output head if its weight is that of the embedding, else 0."""
    sides = (transforms.embedding_of(model, side) for side in ("input", "output"))
    embedding, head = (getattr(side, "weight", None) for side in sides)
    return head.numel() if embedding is head and isinstance(head, Tensor) else 0


def _replacements(
    config: Config, context: Context, recorder: StorageRecorder, fake_mode: tensors.FakeMode, *, on_gpu: bool
) -> Iterator[AbstractContextManager[Any]]:
    """Yield the contexts that replace what a step needs of the machine: other processes, GPUs and the compiler."""
    yield collectives.fake_process_group(context.world_size, context.rank)
    yield collectives.stages_of_known_shapes()
    if on_gpu:
        yield cuda_semantics.cuda_autocast()
    yield collectives.fsdp_device(GPU)
    yield collectives.meshes_with_values()
    yield collectives.propagation_without_memory()
    yield tensors.grouped_products_of_any_precision()
    yield traced_run.without_layer_drop()
    yield tensors.replaced(transforms.__name__, "saved_on_cpu", lambda _: traced_run.make_copies_on_host(on_gpu=on_gpu))
    if config.train.compiled != "none" or (on_gpu and config.model.attention == "flex"):
        yield compiled.traced_compilation(fake_mode, lambda: recorder)


def _vocabulary(model: nn.Module) -> int | None:
    sizes = (getattr(module, "weight", None) for _, module in introspection.find_embeddings(model))
    return next((len(weight) for weight in sizes if isinstance(weight, Tensor)), None)


def _to_fake(batch: Batch) -> Batch:
    """Return a batch on the GPU. In the fake mode its tensors have no values."""

    def convert(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    inputs = {name: convert(tensor) for name, tensor in batch.inputs.items()}
    return replace(batch, inputs=inputs, labels=convert(batch.labels)).to(GPU)


class TracedStep:
    """The model of a run, and its training step."""

    def __init__(
        self, config: Config, blueprint: Blueprint, context: Context, recorder: StorageRecorder, *, on_gpu: bool
    ) -> None:
        self.recorder, self.task = recorder, config.model.task
        self.model = _set_up(config, blueprint, context, recorder)
        # How many micro-batches a pipeline keeps depends on all of them.
        self.most_traced = config.train.gradient_accumulation_steps if context.stages > 1 else MICRO_BATCHES
        if context.stages > 1:
            _mark_passes(self.model, recorder)
        self.is_ddp = isinstance(self.model.module, traced_run.TracedDDP)
        self.model.module.train()
        self.normalizer = torch.ones((), dtype=torch.int64, device=GPU)
        if isinstance(self.model, TorchModel):
            module, optimizer = self.model.module, self.model.optimizer
            if on_gpu:
                cuda_semantics.use_cuda_kernels(config, optimizer)
            self.model.scaler = torch.amp.GradScaler("cpu", enabled=False)  # it reads whether gradients are finite
            self.parameters = [*module.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
            recorder.assign("parameters", tensors_in([self.parameters, list(module.buffers())]))
            # With train.compile=graphs the gradients live as long as the model.
            recorder.assign("gradients", tensors_in([parameter.grad for parameter in self.parameters]))

    def run(self, batches: list[Batch]) -> None:
        """Run one optimizer step."""
        most = self.most_traced
        traced = [*batches[: most - 1], batches[-1]] if len(batches) > most else batches
        contributions = []
        for position, batch in enumerate(traced, start=1):
            start = len(self.recorder.changes)
            self.recorder.phase = "forward"
            contributions.append(
                self.model.forward_backward(batch, normalizer=self.normalizer, last_micro=position == len(traced))
            )
            self.recorder.label_gradients(start)
        torch.stack(contributions).sum(dim=0)
        self.recorder.phase = "optimizer"
        self.model.step(0.1)
        if isinstance(self.model, TorchModel):
            self.recorder.assign("optimizer_states", tensors_in(list(self.model.optimizer.state.values())))

    def evaluate(self, batch: Batch) -> None:
        """Evaluate one batch."""
        self.recorder.assign("batch", tensors_in((batch.inputs, batch.labels)))
        self.model.module.eval()
        with torch.no_grad():
            objective.evaluation_sums(self.task, self.model.forward(batch), batch)


def _mark_passes(model: Any, recorder: StorageRecorder) -> None:
    """Let the recorder know the forward passes of a pipeline. What runs between them are backward passes."""
    plain = model.compute

    def compute(*arguments: Any) -> Tensor:
        recorder.phase = "forward"
        try:
            computed: Tensor = plain(*arguments)
        finally:
            recorder.phase = "backward"
            recorder.end_forward()
        return computed

    model.compute = compute


class Traceable(Protocol):
    """A training step on fake tensors: a TorchModel, or an object of the class that ``Strategy.tracer`` names."""

    module: nn.Module

    def forward_backward(self, batch: Batch, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        """Run one micro-batch, and allocate what the real one allocates."""

    def forward(self, batch: Batch) -> Any:
        """Return the outputs of the module."""

    def step(self, learning_rate: float) -> Any:
        """Update the weights."""


def _set_up(config: Config, blueprint: Blueprint, context: Context, recorder: StorageRecorder) -> Traceable:
    strategy = load_strategy(config)
    if strategy.tracer is not None:
        traced: Traceable = custom_code.locate(strategy.tracer)(blueprint, config, context, recorder)
        return traced
    with traced_run.traced_ddp(recorder.assign):
        model = strategy.setup(blueprint, config, context)
    if not isinstance(model, TorchModel):
        raise PlanError(f"strategy={config.strategy.name} cannot be traced")
    return model

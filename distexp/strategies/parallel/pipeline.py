"""Pipeline parallelism: each worker of a group has some of the blocks, and computes them for all micro-batches.

A *stage* is a number of consecutive blocks. The first stage has the embedding too, and the last one the norm and the
output head. A schedule of ``torch.distributed.pipelining`` decides in which order a worker computes the micro-batches
of a step, and sends the hidden states and their gradients.

A worker keeps the whole model, without the weights of other stages. So all names stay those of the model. For a stage,
the forward pass of the model runs as it is: what belongs to other stages returns its input, and the first own block
gets the hidden states of the previous stage. So each stage computes masks and positions from the tokens, which all
workers of a group read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from distexp.config import Config, ConfigError
from distexp.data.base import Batch
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.models.blueprint import Blueprint, find_embeddings, has_tied_embeddings, persistent_buffers
from distexp.models.objective import loss_sum, partial_metrics
from distexp.models.transforms import dropout_rates, find_blocks
from distexp.runs.record_sections import Built
from distexp.strategies.optimizer import clip_gradients, gradient_norm, trained_parameters
from distexp.strategies.parallel.checks import PIPELINE, PIPELINE_TYPES, cut_evenly, schedule_of, stages_of_worker
from distexp.strategies.parallel.context import OTHER_HEADS
from distexp.strategies.parallel.tensor import hidden_of, is_bloom, with_hidden
from distexp.strategies.torch_model import Distribution, TorchModel

T = TypeVar("T")

WHOLE = f"{PIPELINE}=1"

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleZBVZeroBubble,
}


class PipelineCut:
    """The stages of a model, and those of this worker. After ``materialize`` the others have no weights.

    Attributes:
        own: Numbers of the stages of this worker, in ascending order.
        owners: Worker that has each parameter, by its name, in the order of the model. Of a weight that the first and
            the last stage share, it is the worker of the first one.
    """

    def __init__(self, model: nn.Module, config: Config, context: Context) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.model, self.schedule = model, schedule_of(config)
        self.workers, self.worker = context.stages, context.rank % context.stages
        shape = (context.data_parallel, self.workers)
        mesh = init_device_mesh(context.device.type, shape, mesh_dim_names=("data", "pipeline"))
        self.group, self.data_group = mesh.get_group("pipeline"), mesh.get_group("data")
        places = [stages_of_worker(worker, self.workers, self.schedule) for worker in range(self.workers)]
        self.worker_of = {stage: worker for worker, stages in enumerate(places) for stage in stages}
        self.own, self.last = places[self.worker], len(self.worker_of) - 1
        typed = f"{PIPELINE}={self.workers}"
        self.blocks = [block for _, block in find_blocks(model, needed_for=typed, alternative=WHOLE)]
        _check(model, typed, len(self.blocks), len(self.worker_of))
        self.before, self.after = _outer_modules(model, self.blocks)
        sizes = [_size([block]) for block in self.blocks]
        self.bounds = cut_evenly(_size(self.before), sizes, _size(self.after), len(self.worker_of))
        self.has_tied = has_tied_embeddings(model)
        embedding: Any = find_embeddings(model)[0][1]
        self.width: int = embedding.weight.shape[-1]
        self.returns_tuples = is_bloom(model)
        named_tensors = [*model.named_parameters(), *persistent_buffers(model)]
        self.layout = {name: (tensor.shape, tensor.dtype) for name, tensor in named_tensors}
        self.owners = dict(self._find_owners())
        self.tied_group: Any = None  # of the workers that share a weight
        self.stage = 0  # of the current forward pass
        self.received: Tensor | None = None
        self.sent: Tensor | None = None
        self._wrap()

    def _find_owners(self) -> Iterator[tuple[str, int]]:
        owner_of: dict[int, int] = {}
        for stage in range(self.last + 1):
            for module in self.modules_of(stage):
                for parameter in module.parameters():
                    owner_of.setdefault(id(parameter), self.worker_of[stage])
        for name, parameter in self.model.named_parameters():
            yield name, owner_of[id(parameter)]

    def modules_of(self, stage: int) -> list[nn.Module]:
        """Return the modules with the weights of a stage, in forward order."""
        before, after = (self.before if stage == 0 else []), (self.after if stage == self.last else [])
        return [*before, *(self.blocks[number] for number in self.bounds[stage]), *after]

    def _wrap(self) -> None:
        """Let the modules return their inputs in forward passes of other stages."""
        for number, block in enumerate(self.blocks):
            block.forward = partial(self._block, number, block.forward)
        for modules, stage in ((self.before, 0), (self.after, self.last)):
            for module in modules:
                module.forward = partial(self._outer, module, stage, module.forward)

    def _block(self, number: int, plain: Callable[..., Any], *arguments: Any, **inputs: Any) -> Any:
        own = self.bounds[self.stage]
        if number not in own:
            hidden = hidden_of(arguments, inputs)
            return (hidden, None) if self.returns_tuples else hidden
        if number == own.start and self.stage:
            arguments, inputs = with_hidden(self.received, arguments, inputs)  # type: ignore[arg-type]
        outputs = plain(*arguments, **inputs)
        if number == own[-1]:
            self.sent = outputs if isinstance(outputs, Tensor) else outputs[0]
        return outputs

    def _outer(self, module: nn.Module, stage: int, plain: Callable[..., Any], *arguments: Any, **inputs: Any) -> Any:
        if self.stage == stage:
            return plain(*arguments, **inputs)
        first = arguments[0] if arguments else next(iter(inputs.values()))
        if isinstance(module, nn.Embedding):  # Only the shape is used.
            return torch.zeros((), device=first.device).expand(*first.shape, module.embedding_dim)
        return first

    def compute(self, stage: int, received: Tensor | None, inputs: Mapping[str, Tensor]) -> Any:
        """Return the outputs of the model if the stage is the last one, otherwise the hidden states to send."""
        self.stage, self.received = stage, received
        outputs = self.model(**inputs)
        sent, self.received, self.sent = self.sent, None, None
        assert sent is not None, "a stage has blocks"
        return outputs if stage == self.last else sent.float()  # Others expect fp32, also with autocast.

    def materialize(self, blueprint: Blueprint) -> None:
        """Give this worker the weights of its stages, module by module; a collective."""
        kept = {part for stage in self.own for module in self.modules_of(stage) for part in module.modules()}
        if self.has_tied and not {0, self.last}.isdisjoint(self.own):  # The weight keeps its name.
            kept.update(module for _, module in find_embeddings(self.model))
        foreign = [
            part
            for module in (*self.before, *self.blocks, *self.after)
            for part in module.modules()
            if part not in kept
        ]
        for part in self.model.modules():
            blueprint.materialize(part, recurse=False)
            if part in foreign:
                _remove_weights(part)
        ends = (self.worker_of[0], self.worker_of[self.last])
        if self.has_tied and ends[0] != ends[1]:
            for first in range(0, dist.get_world_size(), self.workers):
                group = dist.new_group([first + end for end in ends])
                if dist.get_rank() in (first + end for end in ends):
                    self.tied_group = group

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """Return the weight that another worker has too; None if there is none."""
        if self.tied_group is None:
            return None
        weight: Any = find_embeddings(self.model)[0][1].weight
        return weight  # type: ignore[no-any-return]

    @torch.no_grad()
    def whole(self, own: Iterable[tuple[str, Tensor]], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of the model from those of each worker, which are in the order of the model; a collective.

        Other workers send theirs. Only one of these is in memory at a time.
        """
        mine = iter(own)
        name_here, here = next(mine, ("", None))
        for name, (shape, dtype) in self.layout.items():
            owner = self.owners.get(name, self.worker)  # All workers have the same buffers.
            tensor = here if name == name_here and owner == self.worker else None
            if name == name_here:
                name_here, here = next(mine, ("", None))
            if tensor is None:
                tensor = torch.empty(shape, dtype=dtype, device=device)
            if name in self.owners:
                dist.broadcast(tensor, group_src=owner, group=self.group)
            yield name, tensor

    def merge(self, own: Mapping[str, T]) -> dict[str, T]:
        """Return what the workers have by the names of parameters, in the order of the model; a collective."""
        found: list[Any] = [None] * self.workers
        dist.all_gather_object(found, dict(own), group=self.group)
        merged = {name: value for part in reversed(found) for name, value in part.items()}
        return {name: merged[name] for name in self.layout if name in merged}

    def merge_groups(self, own: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
        """Return the groups of the whole optimizer from those of each worker; ``key`` has the names; a collective."""
        found: list[Any] = [None] * self.workers
        dist.all_gather_object(found, own, group=self.group)
        merged: list[dict[str, Any]] = []
        for group in (group for groups in found for group in groups):
            rest = {name: value for name, value in group.items() if name != key}
            same = [other for other in merged if {n: v for n, v in other.items() if n != key} == rest]
            if same:
                same[0][key] += [name for name in group[key] if name not in same[0][key]]
            else:
                merged.append({**rest, key: [*group[key]]})
        order = {name: position for position, name in enumerate(self.layout)}
        return [{**group, key: sorted(group[key], key=lambda name: order.get(name, -1))} for group in merged]


def _check(model: nn.Module, typed: str, blocks: int, stages: int) -> None:
    """Raise ConfigError if a model cannot be cut into stages. The launcher has not seen all models."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is not None and kind not in PIPELINE_TYPES:
        raise ConfigError(
            f"{typed} is not supported by {type(model).__name__} ({kind}): use {WHOLE}, or one of "
            f"{', '.join(PIPELINE_TYPES)}"
        )
    if blocks < stages:
        raise ConfigError(
            f"{typed} has {stages} stages of at least one block, but {type(model).__name__} has {blocks} blocks: use "
            f"{WHOLE}, or a smaller number"
        )
    rates = {name: rate for name, rate in dropout_rates(model).items() if name not in OTHER_HEADS}
    for name, rate in rates.items():
        raise ConfigError(
            f"{typed} does not support dropout, because the workers of a group have the same random numbers, but "
            f"{type(model).__name__} has {name}={rate:g}: set model.dropout=0"
        )


def _outer_modules(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules with weights before the blocks, and those after them."""
    inside = {part for block in blocks for part in block.modules()}
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    seen_blocks = False
    for module in model.modules():
        seen_blocks = seen_blocks or module is blocks[0]
        if module not in inside and module._parameters:
            (after if seen_blocks else before).append(module)
    return before, after


def _size(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _remove_weights(module: nn.Module) -> None:
    for name in [*module._parameters]:
        delattr(module, name)


class Stage(nn.Module):
    """A stage as ``torch.distributed.pipelining`` calls it. Each schedule computes the micro-batches in their order."""

    def __init__(self, modules: Iterable[nn.Module], compute: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)  # torch finds the weights of the stage by them
        self.compute = compute
        self.position = 0  # of the next micro-batch in the step

    def forward(self, received: Tensor) -> Tensor:
        """Return hidden states, shape (batch, length, width), or the loss of the last stage, shape (1,)."""
        self.position += 1
        return self.compute(received, self.position - 1)


class _PlacedStage(pipelining.PipelineStage):
    """A stage whose first messages, before torch 2.13, do not go to its own worker, which Gloo refuses."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group_rank]


class PipelineModel(TorchModel):
    """A model in stages: the last micro-batch of a step starts the schedule for all of them."""

    def __init__(self, cut: PipelineCut, config: Config, context: Context) -> None:
        super().__init__(
            cut.model,
            config,
            context,
            sync_context=lambda last_micro: nullcontext(),
            autocast=True,
            distribution=lambda: Distribution("pipeline", mesh=[dist.get_world_size(cut.data_group), 1]),
        )
        self.cut = cut
        self.batches: list[Batch] = []
        self.normalizer = self.metrics = torch.zeros((), device=self.device)
        self.schedules: dict[tuple[int, ...], tuple[Any, list[Stage]]] = {}

    def forward_backward(self, batch: Batch, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        """Keep a micro-batch. After the last one, run all of them, and return the metrics of the step.

        Only the worker with the last stage has metrics that are not 0. Raise ConfigError if the shapes differ.
        """
        self.batches.append(batch)
        shape, expected = (tuple(each.inputs["input_ids"].shape) for each in (batch, self.batches[0]))
        if shape != expected:
            raise ConfigError(
                f"{PIPELINE}={self.cut.workers} needs micro-batches of one shape, but one has {shape} tokens and "
                f"another one {expected}: pad all samples to dataset.max_length, or use {PIPELINE}=1"
            )
        self.metrics = torch.zeros(2, device=self.device)
        if last_micro:
            self.normalizer = normalizer
            self._run()
            self.batches = []
        return self.metrics

    def _run(self) -> None:
        """Run the schedule, and sum the gradients over the workers that have the same weights."""
        schedule, stages = self._schedule()
        for stage in stages:
            stage.position = 0
        rows = torch.zeros(len(self.batches))  # torch splits them into micro-batches. The stages read ``batches``.
        schedule.step(*((rows,) if 0 in self.cut.own else ()), target=rows)
        if (tied := self.cut.tied_weight) is not None and tied.grad is not None:
            dist.all_reduce(tied.grad, group=self.cut.tied_group)
        if dist.get_world_size(self.cut.data_group) > 1:
            gradients = [p.grad for p in trained_parameters(self.optimizer) if p.grad is not None]
            for work in [dist.all_reduce(each, group=self.cut.data_group, async_op=True) for each in gradients]:
                work.wait()

    def _schedule(self) -> tuple[Any, list[Stage]]:
        """Return the schedule for the shape of the micro-batches, which torch fixes, and its stages."""
        shape = (len(self.batches), *self.batches[0].inputs["input_ids"].shape)
        if shape not in self.schedules:
            kind, cut = SCHEDULES[self.cut.schedule], self.cut
            stages = [Stage(cut.modules_of(number), partial(self.compute, number)) for number in cut.own]
            placed = [self._place(stage, number, shape[1:]) for stage, number in zip(stages, cut.own, strict=True)]
            is_single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
            # The loss is divided by the targets of the step, and not by the micro-batches.
            options = {"loss_fn": lambda output, _: output.sum(), "scale_grads": False}
            self.schedules[shape] = (kind(placed[0] if is_single else placed, shape[0], **options), stages)
        return self.schedules[shape]

    def _place(self, stage: Stage, number: int, shape: Sequence[int]) -> _PlacedStage:
        """Return a stage in its pipeline, for micro-batches of a shape (batch, length). Given shapes need no trial."""
        cut = self.cut
        hidden = torch.empty(*shape, cut.width, device="meta", requires_grad=True)
        loss = torch.empty(1, device="meta", requires_grad=True)
        return _PlacedStage(
            stage,
            number,
            cut.last + 1,
            self.device,
            input_args=hidden if number else torch.empty(1, device="meta"),
            output_args=loss if number == cut.last else hidden,
            group=cut.group,
        )

    def compute(self, stage: int, received: Tensor, position: int) -> Tensor:
        """Return the hidden states that a stage sends, or its part of the loss, shape (1,)."""
        batch = self.batches[position]
        with self.autocast:
            outputs = self.cut.compute(stage, received if stage else None, batch.inputs)
        if stage < self.cut.last:
            sent: Tensor = outputs
            return sent
        loss = loss_sum(self.task, outputs, batch, self.entropy) / self.normalizer
        self.metrics += partial_metrics(self.task, outputs, batch, loss, self.normalizer)
        return loss[None]

    def _clip(self) -> Tensor:
        """Clip by the norm of all stages. The first stage counts a weight that the last one shares."""
        tied = self.cut.tied_weight
        repeated = tied.grad if tied is not None and 0 not in self.cut.own else None

        def norm_of_stages(gradients: Sequence[Tensor]) -> Tensor:
            squared = gradient_norm([each for each in gradients if each is not repeated]).square()
            dist.all_reduce(squared, group=self.cut.group)
            return squared.sqrt()

        return clip_gradients(trained_parameters(self.optimizer), self.clipping, norm_of_stages)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Any:
        """Return the outputs of the model on the worker with the last stage, and None on the others."""
        cut, outputs = self.cut, None
        shape = (*batch.inputs["input_ids"].shape, cut.width)
        for stage in cut.own:
            previous, following = cut.worker_of.get(stage - 1), cut.worker_of.get(stage + 1)
            if previous not in (None, cut.worker):
                outputs = torch.empty(shape, device=self.device)
                dist.recv(outputs, group_src=previous, group=cut.group)
            with self.autocast:
                outputs = cut.compute(stage, outputs, batch.inputs)
            if following not in (None, cut.worker):
                dist.send(outputs.contiguous(), group_dst=following, group=cut.group)
        return outputs if cut.last in cut.own else None

    def _state(self) -> dict[str, Any]:
        """Return the state of this worker by the names of the whole model, with the groups of the whole optimizer."""
        state = super()._state()
        optimizer = state["optimizer"]
        optimizer["param_groups"] = self.cut.merge_groups(optimizer["param_groups"], "params")
        return state

    def describe(self) -> Built:
        """Return what was built; the stages and the number of parameters are those of all workers."""
        built, cut = super().describe(), self.cut
        counted = [parameter for name, parameter in self.module.named_parameters() if cut.owners[name] == cut.worker]
        blocks = {stage: sum(_size([cut.blocks[n]]) > 0 for n in cut.bounds[stage]) for stage in cut.own}
        stated = gather_to_all((cut.worker, blocks, sum(p.numel() for p in counted)))
        built.parameters = sum(size for worker, size in {(worker, size) for worker, _, size in stated})
        built.trained_parameters = built.parameters
        stages = {stage: count for _, blocks, _ in stated for stage, count in blocks.items()}
        built.pipeline, built.schedule = len({worker for worker, _, _ in stated}), cut.schedule
        built.stages = [stages[stage] for stage in sorted(stages)]
        return built


def pipeline_model(blueprint: Blueprint, config: Config, context: Context) -> PipelineModel:
    """Return a model whose stages this worker shares with others of its group; a collective."""
    cut = PipelineCut(blueprint.model, config, context)
    cut.materialize(blueprint)
    blueprint.model.pipeline_cut = cut  # type: ignore[assignment]  # read by ``unsharded_weights`` and verify
    return PipelineModel(cut, config, context)

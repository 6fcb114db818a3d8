"""Pipeline parallelism: each worker of a group has some of the blocks, and computes them for all micro-batches.

A schedule of ``torch.distributed.pipelining`` decides in which order a worker computes the micro-batches of a step, and
sends the hidden states and their gradients.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.tensor import DTensor

from distexp.config import Config, ConfigError
from distexp.data.base import Batch
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.models.blueprint import Blueprint
from distexp.models.objective import loss_sum, partial_metrics
from distexp.runs.record_sections import Built
from distexp.strategies.communication import DATA, sharding_of
from distexp.strategies.fsdp_units import read_distribution, shard_units
from distexp.strategies.optimizer import clip_gradients, gradient_norm, trained_parameters
from distexp.strategies.parallel.checks import PIPELINE
from distexp.strategies.parallel.stages import PipelineCut, size_of
from distexp.strategies.torch_model import DTYPES, Distribution, TorchModel

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleZBVZeroBubble,
}


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

    before_backward: Callable[[bool], None]  # gets whether it is the last backward pass of the step

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        """Run a backward pass. FSDP reduces gradients in the last one."""
        self.before_backward(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group_rank]


class PipelineModel(TorchModel):
    """A model in stages: the last micro-batch of a step starts the schedule for all of them.

    ``units`` are the own blocks that FSDP shards or replicates over the groups. Without them, gradients are summed.
    """

    def __init__(
        self, cut: PipelineCut, config: Config, context: Context, units: Sequence[nn.Module] | None = None
    ) -> None:
        groups = context.data_parallel
        super().__init__(
            cut.model,
            config,
            context,
            sync_context=lambda last_micro: nullcontext(),
            autocast=units is None,
            distribution=lambda: (
                Distribution("pipeline", mesh=[groups, 1]) if units is None else read_distribution(cut.model, units)
            ),
        )
        self.cut, self.has_units = cut, units is not None
        self.averaged = groups if self.has_units else 1  # FSDP averages gradients
        self.keeps_parameters = not sharding_of(config).reshards_after_forward
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
        try:
            schedule.step(*((rows,) if 0 in self.cut.own else ()), target=rows)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch's own error names a stage only, and not that a memory is full
        if (tied := self.cut.tied_weight) is not None and tied.grad is not None:
            own = tied.grad.to_local() if isinstance(tied.grad, DTensor) else tied.grad
            dist.all_reduce(own, group=self.cut.tied_group)
        if not self.has_units and self.cut.mesh[DATA].size() > 1:
            gradients = [p.grad for p in trained_parameters(self.optimizer) if p.grad is not None]
            group = self.cut.mesh.get_group(DATA)
            for work in [dist.all_reduce(each, group=group, async_op=True) for each in gradients]:
                work.wait()

    def _before_backward(self, is_last: bool) -> None:
        """Let FSDP reduce and free in the last backward pass of a step only what the earlier ones need."""
        if not self.has_units:
            return
        module: Any = self.module
        module.set_requires_gradient_sync(is_last)
        module.set_is_last_backward(is_last)
        # The hidden states that a stage sends are no outputs of the root unit, so it would not be gathered again.
        module.set_reshard_after_backward(is_last, recurse=self.keeps_parameters)

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
        hidden = torch.empty(*cut.hidden_shape(*shape), device="meta", requires_grad=True)
        loss = torch.empty(1, device="meta", requires_grad=True)
        placed = _PlacedStage(
            stage,
            number,
            cut.last + 1,
            self.device,
            input_args=hidden if number else torch.empty(1, device="meta"),
            output_args=loss if number == cut.last else hidden,
            group=cut.group,
        )
        placed.before_backward = self._before_backward
        return placed

    def compute(self, stage: int, received: Tensor, position: int) -> Tensor:
        """Return the hidden states that a stage sends, or its part of the loss, shape (1,)."""
        batch = self.batches[position]
        with self.autocast:
            outputs = self.cut.compute(stage, received if stage else None, batch.inputs)
        if stage < self.cut.last:
            sent: Tensor = outputs
            return sent
        loss = loss_sum(self.task, outputs, batch, self.entropy) / self.normalizer
        self.metrics += partial_metrics(self.task, outputs, batch, loss, self.normalizer) / self.tensor
        return loss[None] * self.averaged

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
        shape = cut.hidden_shape(*batch.inputs["input_ids"].shape)
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
        blocks = {stage: sum(size_of([cut.blocks[n]]) > 0 for n in cut.bounds[stage]) for stage in cut.own}
        stated = gather_to_all((cut.worker, blocks, sum(p.numel() for p in counted)))
        built.parameters = sum(size for worker, size in {(worker, size) for worker, _, size in stated})
        built.trained_parameters = built.parameters
        stages = {stage: count for _, blocks, _ in stated for stage, count in blocks.items()}
        built.pipeline, built.schedule = len({worker for worker, _, _ in stated}), cut.schedule
        built.stages = [stages[stage] for stage in sorted(stages)]
        return built


def pipeline_model(
    blueprint: Blueprint, config: Config, context: Context, shard: Callable[..., Any] | None = None
) -> PipelineModel:
    """Return a model whose stages this worker shares with others of its group; a collective.

    ``shard`` is ``fully_shard`` or ``replicate``, for units of FSDP. Without it, all groups have whole stages.
    """
    cut, units = PipelineCut(blueprint.model, config, context), None
    if shard is None:
        cut.materialize(blueprint)
    else:
        cut.dtype = DTYPES[config.precision.name] if config.precision.name != "fp32" else None
        units = shard_units(blueprint, config, context, shard, cut)
    blueprint.model.pipeline_cut = cut  # type: ignore[assignment]  # read by ``unsharded_weights`` and verify
    return PipelineModel(cut, config, context, units)

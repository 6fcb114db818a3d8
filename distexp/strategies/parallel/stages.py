"""The stages of a model: which blocks each worker of a pipeline has, and how it computes with them.

A *stage* is a number of consecutive blocks. The first stage has the embedding too, and the last one the norm and the
output head.

A worker keeps the whole model, without the weights of other stages. So all names stay those of the model. For a stage,
the forward pass of the model runs as it is: what belongs to other stages returns its input, and the first own block
gets the hidden states of the previous stage. So each stage computes masks and positions from the tokens, which all
workers of a group read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distexp.config import Config, ConfigError
from distexp.distributed.context import Context
from distexp.models.blueprint import Blueprint, find_embeddings, has_tied_embeddings, persistent_buffers
from distexp.models.dropout import dropout_rates, zero_hint
from distexp.models.transforms import find_blocks
from distexp.strategies.communication import STAGES, build_shared_mesh
from distexp.strategies.parallel.checks import PIPELINE, PIPELINE_TYPES, cut_evenly, schedule_of, stages_of_worker
from distexp.strategies.parallel.context import OTHER_HEADS
from distexp.strategies.parallel.tensor import hidden_of, is_bloom, with_hidden

T = TypeVar("T")

WHOLE = f"{PIPELINE}=1"


class PipelineCut:
    """The stages of a model, and those of this worker. After ``materialize`` the others have no weights.

    Attributes:
        own: Numbers of the stages of this worker, in ascending order.
        owners: Worker that has each parameter, by its name, in the order of the model. Of a weight that the first and
            the last stage share, it is the worker of the first one.
    """

    def __init__(self, model: nn.Module, config: Config, context: Context) -> None:
        self.model, self.schedule = model, schedule_of(config)
        self.workers, self.worker = context.stages, context.rank // context.tensor % context.stages
        self.tensor, self.mesh = context.tensor, build_shared_mesh(config, context)
        self.group = self.mesh.get_group(STAGES)
        places = [stages_of_worker(worker, self.workers, self.schedule) for worker in range(self.workers)]
        self.worker_of = {stage: worker for worker, stages in enumerate(places) for stage in stages}
        self.own, self.last = places[self.worker], len(self.worker_of) - 1
        typed = f"{PIPELINE}={self.workers}"
        self.blocks = [block for _, block in find_blocks(model, needed_for=typed, alternative=WHOLE)]
        _check(model, config, len(self.blocks), len(self.worker_of))
        self.before, self.after = _outer_modules(model, self.blocks)
        sizes = [size_of([block]) for block in self.blocks]
        self.bounds = cut_evenly(size_of(self.before), sizes, size_of(self.after), len(self.worker_of))
        self.has_tied = has_tied_embeddings(model)
        embedding: Any = find_embeddings(model)[0][1]
        self.width: int = embedding.weight.shape[-1]
        self.returns_tuples = is_bloom(model)
        named_tensors = [*model.named_parameters(), *persistent_buffers(model)]
        self.layout = {name: (tensor.shape, tensor.dtype) for name, tensor in named_tensors}
        self.owners = dict(self._find_owners())
        self.foreign = set(self._find_foreign())
        self.dtype: torch.dtype | None = None  # of the hidden states, if units of FSDP cast instead of autocast
        self.tied_group: Any = None  # of the workers that share a weight
        self.stage = 0  # of the current forward pass
        self.received: Tensor | None = None
        self.sent: Tensor | None = None

    def _find_foreign(self) -> Iterator[nn.Module]:
        """Yield the modules whose weights are on other workers."""
        kept = {part for stage in self.own for module in self.modules_of(stage) for part in module.modules()}
        if self.has_tied and not {0, self.last}.isdisjoint(self.own):  # The weight keeps its name.
            kept.update(module for _, module in find_embeddings(self.model))
        for module in (*self.before, *self.blocks, *self.after):
            yield from (part for part in module.modules() if part not in kept)

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
            return torch.zeros((), device=first.device, dtype=self.dtype).expand(*first.shape, module.embedding_dim)
        return first

    def compute(self, stage: int, received: Tensor | None, inputs: Mapping[str, Tensor]) -> Any:
        """Return the outputs of the model if the stage is the last one, otherwise the hidden states to send."""
        self.stage, self.received = stage, received if received is None else received.to(self.dtype or received.dtype)
        outputs = self.model(**inputs)
        sent, self.received, self.sent = self.sent, None, None
        assert sent is not None, "a stage has blocks"
        return outputs if stage == self.last else sent.float()  # Others expect fp32, also with autocast.

    def materialize(self, blueprint: Blueprint) -> None:
        """Give this worker the weights of its stages, module by module; a collective."""
        for part in self.model.modules():
            blueprint.materialize(part, recurse=False)
            self.remove_foreign([part])
        self.finish()

    def remove_foreign(self, parts: Iterable[nn.Module]) -> None:
        """Remove the weights of other workers from modules."""
        for part in self.foreign.intersection(parts):
            for name in [*part._parameters]:
                delattr(part, name)

    def finish(self) -> None:
        """Let the modules compute stages, after all others have replaced their ``forward``; a collective."""
        self._wrap()
        ends = (self.worker_of[0], self.worker_of[self.last])
        if self.has_tied and ends[0] != ends[1]:
            size = self.workers * self.tensor
            for first in range(0, dist.get_world_size(), size):
                for other in range(first, first + self.tensor):
                    ranks = [other + end * self.tensor for end in ends]
                    group = dist.new_group(ranks)
                    if dist.get_rank() in ranks:
                        self.tied_group = group

    def hidden_shape(self, rows: int, tokens: int) -> tuple[int, int, int]:
        """Return the shape of the hidden states between stages. With ``parallel.tensor`` a worker has some tokens."""
        return rows, tokens if tokens % self.tensor else tokens // self.tensor, self.width

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


def _check(model: nn.Module, config: Config, blocks: int, stages: int) -> None:
    """Raise ConfigError if a model cannot be cut into stages. The launcher has not seen all models."""
    typed = f"{PIPELINE}={config.parallel.pipeline}"
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
            f"{type(model).__name__} has {name}={rate:g}: {zero_hint(config.model, name)}"
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


def size_of(modules: Iterable[nn.Module]) -> int:
    """Return the number of parameters of modules."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())

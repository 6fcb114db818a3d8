"""Expert parallelism: the workers of a group share the experts of each layer, and send each token to those it chose.

Each worker has its own rows and, in each layer, some of the experts. Their weights are DTensors, which FSDP shards or
replicates over the workers with the same experts. Everything else is distributed over all workers.

The tokens of a layer travel twice: sorted by expert to the workers that have these, and back, where they are multiplied
with the weights of the router. In the backward pass their gradients do the same. So the gradient of an expert is a sum
over the tokens of the whole group. FSDP divides it by the workers with the same experts only, and other weights by all.
So the gradients that experts get are divided by the size of the group, and what they return is multiplied by it.

With ``parallel.tensor`` the workers of a group of it have a share of the tokens each, in a part of the model that
computes each token alone, as experts do. So each worker sends its tokens as if they were other rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from distexp.config import ConfigError
from distexp.distributed.process_group import sum_over_ranks
from distexp.strategies.communication import EXPERT, EXPERT_DATA
from distexp.system.torch_internals.tensors import has_values

WHOLE = "parallel.expert=1"

Split = list[int]
"""Rows for each worker of a group, or from each."""


class _AllToAll(torch.autograd.Function):
    """Send rows to the workers of a group, and return those that they have sent to this one."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes no keyword arguments)
        ctx: Any, rows: Tensor, sent: Split, received: Split, group: Any, factor: float
    ) -> Tensor:
        """Return the received rows, whose gradients will be multiplied by a factor."""
        ctx.sent, ctx.received, ctx.group, ctx.factor = sent, received, group, factor
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return each gradient to the worker that sent the row."""
        return _exchange(gradient, ctx.received, ctx.sent, ctx.group).mul_(ctx.factor), None, None, None, None


def _exchange(rows: Tensor, sent: Split, received: Split, group: Any) -> Tensor:
    """Return the received rows. The splits have the numbers of rows for and from each worker."""
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


class Dispatch:
    """The ``forward`` of the experts of a layer, of which this worker has some."""

    def __init__(self, experts: nn.Module, mesh: DeviceMesh, sharing: Callable[[], int] | None) -> None:
        self.experts, self.plain, self.sharing = experts, experts.forward, sharing
        self.group, self.workers = mesh.get_group(), mesh.size()
        self.total = number_of(experts)
        self.load: Tensor | None = None  # tokens that this worker has sent to each expert, in the training

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted outputs of the chosen experts, shape (tokens, width).

        Index and weights of the experts that each token chose have the shape (tokens, choices).
        """
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)  # by worker, and by expert
        counts = torch.zeros(self.total, dtype=torch.long, device=chosen.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        self._count(counts)
        counts = counts.view(self.workers, -1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        sent, back = self._splits(counts, received, len(chosen))
        rows = hidden_states.index_select(0, order // top_k_index.shape[-1])
        factor = self.workers / (self.sharing() if self.sharing else 1)
        tokens = self._send(rows, sent, back, factor)
        own = torch.arange(counts.shape[1], device=chosen.device).repeat(self.workers)
        own = own.repeat_interleave(received.flatten(), output_size=sum(back))
        outputs = self._send(self._compute(tokens, own[:, None]), back, sent, 1 / factor)
        placed = torch.zeros_like(outputs).index_copy(0, order, outputs)
        weighted = placed.view(*top_k_index.shape, -1) * top_k_weights[..., None]
        return weighted.sum(dim=1).to(hidden_states.dtype)

    def _send(self, rows: Tensor, sent: Split, received: Split, factor: float) -> Tensor:
        found: Tensor = _AllToAll.apply(rows, sent, received, self.group, factor)  # type: ignore[no-untyped-call]
        return found

    def _count(self, counts: Tensor) -> None:
        if self.experts.training:
            self.load = counts.clone() if self.load is None else self.load + counts

    def _splits(self, counts: Tensor, received: Tensor, rows: int) -> tuple[Split, Split]:
        """Return the rows for and from each worker. A trace knows no values, and assumes that they are balanced."""
        if not has_values(counts):
            balanced = [rows // self.workers + (number < rows % self.workers) for number in range(self.workers)]
            return balanced, balanced
        sent, back = torch.stack([counts.sum(dim=1), received.sum(dim=1)]).tolist()
        return sent, back

    def _compute(self, tokens: Tensor, own: Tensor) -> Tensor:
        """Return the outputs of the own experts, each of which gets the tokens with its number, shape (tokens, 1)."""
        if not len(tokens):  # One of zeros keeps the gradients, for which the other workers wait.
            return self._compute(tokens.sum(dim=0, keepdim=True), own.new_zeros(1, 1))[:0]
        own_parameters: dict[str, Any] = self.experts._parameters
        whole = dict(own_parameters)
        try:
            own_parameters.update({name: each.to_local() for name, each in whole.items() if isinstance(each, DTensor)})
            outputs: Tensor = self.plain(tokens, own, tokens.new_ones(own.shape))
            return outputs
        finally:
            own_parameters.update(whole)


def number_of(experts: nn.Module) -> int:
    """Return the number of experts of a module that ``find_experts`` has found."""
    return max(len(parameter) for parameter in experts.parameters(recurse=False) if parameter.dim() == MATRICES)


MATRICES = 3
"""Axes of the weights of experts in transformers: expert, outputs, inputs."""


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of the experts of each layer: those whose parameters are matrices of each expert."""
    for name, module in model.named_modules():
        number = getattr(module, "num_experts", None)
        own = list(module.parameters(recurse=False))
        if any(parameter.dim() == MATRICES for parameter in own) and all(len(each) == number for each in own):
            yield name, module


class ExpertCutter:
    """Gives this worker its experts. Call it for each module that has its weights.

    ``shard`` distributes a module as ``fully_shard`` does, with the options ``policy`` of the other units. ``sharing``
    returns how many workers have a share of the tokens of the same rows in the current forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        shard: Callable[..., Any],
        policy: Mapping[str, Any],
        sharing: Callable[[], int] | None = None,
    ) -> None:
        self.mesh, self.shard, self.sharing = mesh, shard, sharing
        self.policy = {**policy, "mesh": mesh[EXPERT_DATA]}
        if (mixed := policy.get("mp_policy")) is not None:  # The weights of the router stay in their precision.
            self.policy["mp_policy"] = replace(mixed, cast_forward_inputs=False)
        found = dict(find_experts(model))
        degree = mesh[EXPERT].size()
        if not found:
            raise ConfigError(
                f"parallel.expert={degree} needs a mixture of experts of transformers, but {type(model).__name__} has "
                f"no layer with experts that it knows: use {WHOLE} sharding=full_shard"
            )
        for name, experts in found.items():
            if (total := number_of(experts)) % degree:
                fitting = max(number for number in range(1, degree) if total % number == 0)
                raise ConfigError(
                    f"parallel.expert={degree} must divide the {total} experts of {name}: use parallel.expert={fitting}"
                )
        self.left = set(found.values())

    def __call__(self, module: nn.Module) -> None:
        """Cut the experts in a module that are whole, and let FSDP distribute them."""
        for part in module.modules():
            if part in self.left:
                self.left.remove(part)
                self._cut(part)

    def finish(self) -> None:
        """Check that all experts are cut."""
        assert not self.left, "each layer is in a unit"

    def _cut(self, experts: Any) -> None:
        own, data = self.mesh[EXPERT], self.mesh[EXPERT_DATA]
        experts.forward = Dispatch(experts, own, self.sharing)
        experts.num_experts = number_of(experts) // own.size()
        for name, parameter in list(experts.named_parameters(recurse=False)):
            local = parameter.detach().chunk(own.size())[own.get_local_rank()].clone()
            cut = DTensor.from_local(local, own, [Shard(0)], run_check=False)
            experts.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        self.shard(experts, **self.policy, shard_placement_fn=partial(_axis, data.size()))


def _axis(workers: int, parameter: nn.Parameter) -> Shard | None:
    """Return the axis along which FSDP shards the own experts: one of equal parts."""
    assert isinstance(parameter, DTensor)
    shape = parameter.to_local().shape
    return Shard(next((axis for axis, size in enumerate(shape) if size % workers == 0), 0))


def split_by_mesh(parameters: Sequence[DTensor]) -> tuple[list[DTensor], list[DTensor]]:
    """Return the parameters of experts that workers share, and the others."""
    is_expert = [EXPERT in (parameter.device_mesh.mesh_dim_names or ()) for parameter in parameters]
    pairs = list(zip(parameters, is_expert, strict=True))
    return [each for each, found in pairs if found], [each for each, found in pairs if not found]


def largest_load(model: nn.Module) -> float | None:
    """Return the largest share of the tokens of a layer that one expert got; None without shared experts. A collective.

    The shares are those of the training steps of this process, over all workers, with padding.
    """
    forwards = [vars(module).get("forward") for module in model.modules()]
    loads = [each.load for each in forwards if isinstance(each, Dispatch) and each.load is not None]
    if not loads:
        return None
    total = sum_over_ranks(torch.stack(loads)).double()
    return float((total.amax(dim=1) / total.sum(dim=1)).max())

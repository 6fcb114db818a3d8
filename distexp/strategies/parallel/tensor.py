"""Tensor parallelism: the workers of a group share the matrices of each block, the embedding and the head.

The first matrix of an attention or an MLP is cut by its outputs, and the last one by its inputs. Between two of these
parts, each worker has a share of the tokens (sequence parallelism), if their number divides evenly. Embedding and head
are cut by the vocabulary.

Weights are DTensors, which FSDP and checkpoints know. Modules compute with the local part, so that they need no support
for DTensors. The collectives are those of ``DTensor.redistribute``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.weak import WeakTensorKeyDictionary

from distexp.config import Config, ConfigError
from distexp.distributed.context import Context
from distexp.models.adapter import ADAPTER
from distexp.models.blueprint import find_embeddings
from distexp.models.dropout import dropout_rates, zero_hint
from distexp.models.transforms import find_blocks
from distexp.strategies.communication import TENSOR
from distexp.strategies.parallel.expert import find_experts

COLUMNS, FUSED_COLUMNS, GATHERED_COLUMNS = "colwise", "fused_colwise", "colwise_gather_output"
ROWS, SPLIT_ROWS, HEADS = "rowwise", "rowwise_split_input", "replicated_with_grad_allreduce"
OWN_TOKENS = "own_tokens"
STYLES = (COLUMNS, FUSED_COLUMNS, GATHERED_COLUMNS, ROWS, SPLIT_ROWS, HEADS)
"""How a module of a block is cut. The names are those of transformers, except FUSED_COLUMNS: query, key and value.

OWN_TOKENS is in no plan: each worker has the whole matrix, and applies it to its tokens.
"""

Plan = Mapping[str, str]
"""Styles by the names of modules. A ``*`` is the number of a block."""

FUSED_PARTS = 3


def plan_of(model: nn.Module, *, with_experts: bool = True) -> Plan:
    """Return how the blocks of a model are cut, with their experts or without.

    Raise ConfigError if the model has no plan, or one of other styles.
    """
    plan: Plan = getattr(model, "tensor_plan", None) or getattr(model, "_tp_plan", None) or {}
    if is_bloom(model):
        from distexp.models import bloom

        plan = bloom.TENSOR_PLAN
    blocks = {name: style for name, style in plan.items() if "*" in name and (with_experts or ".experts" not in name)}
    name, others = type(model).__name__, sorted(set(blocks.values()) - set(STYLES))
    if not blocks:
        raise ConfigError(
            f"parallel.tensor needs a plan of the layers, which {name} lacks: add an attribute tensor_plan to the "
            "model, as models.gpt.GPT has, or use parallel.tensor=1 sharding=full_shard"
        )
    if others:
        raise ConfigError(
            f"parallel.tensor: the plan of {name} has layers that cannot be cut here ({', '.join(others)}): use "
            "parallel.tensor=1 sharding=full_shard"
        )
    return blocks


def is_bloom(model: nn.Module) -> bool:
    """Return whether a model is a BLOOM of transformers, whose blocks return tuples."""
    return getattr(getattr(model, "config", None), "model_type", None) == "bloom"


def move(
    tensor: Tensor, mesh: DeviceMesh, source: Placement, target: Placement, gradient: Placement | None = None
) -> Tensor:
    """Return the local part of a tensor with another placement; its gradient has ``gradient``, by default the target.

    The backward pass has the opposite collective.
    """
    moved = DTensor.from_local(tensor, mesh, [source], run_check=False).redistribute(placements=[target])
    return moved.to_local(grad_placements=[gradient or target])


@dataclass
class Region:
    """The blocks, and how the tokens are placed between their parts in the current forward pass."""

    mesh: DeviceMesh
    rank: int  # of this worker in its group
    layout: Placement = field(default_factory=Replicate)

    @property
    def weight_gradient(self) -> Placement:
        """Return the placement of the gradient of a weight that each worker applies to its tokens."""
        return Replicate() if self.layout.is_replicate() else Partial()

    def workers_with_own_tokens(self) -> int:
        """Return how many workers have a share of the tokens each, or 1 if each of them has all."""
        return 1 if self.layout.is_replicate() else self.mesh.size()

    def start(self, module: nn.Module, arguments: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        """Give each worker its share of the tokens before the first block."""
        hidden = hidden_of(arguments, inputs)
        self.layout = Replicate() if hidden.shape[1] % self.mesh.size() else Shard(1)
        return with_hidden(move(hidden, self.mesh, Replicate(), self.layout), arguments, inputs)

    def gather(self, module: nn.Module, arguments: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        """Give an attention or an MLP all tokens. Each worker uses some columns, so its gradients are partial."""
        hidden = hidden_of(arguments, inputs)
        return with_hidden(move(hidden, self.mesh, self.layout, Replicate(), Partial()), arguments, inputs)

    def end(self, module: nn.Module, arguments: Any, outputs: Any) -> Any:
        """Give each worker all tokens after the last block."""
        hidden = outputs if isinstance(outputs, Tensor) else outputs[0]
        hidden = move(hidden, self.mesh, self.layout, Replicate())
        return hidden if isinstance(outputs, Tensor) else (hidden, *outputs[1:])


def has_parameters(module: nn.Module, *, recurse: bool = True) -> bool:
    """Return whether a module has parameters here."""
    return any(True for _ in module.parameters(recurse))


def hidden_of(arguments: tuple[Any, ...], inputs: dict[str, Any]) -> Tensor:
    """Return the hidden states among the inputs of a block."""
    hidden: Tensor = arguments[0] if arguments else inputs["hidden_states"]
    return hidden


def with_hidden(hidden: Tensor, arguments: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
    """Return the inputs of a block with other hidden states."""
    return ((hidden, *arguments[1:]), inputs) if arguments else ((), {**inputs, "hidden_states": hidden})


Call = Callable[..., Tensor]


@dataclass
class Cut(ParallelStyle):
    """The part of a module that a worker has, and how it computes with it.

    ``compute`` gets the plain ``forward`` with local weights, and its inputs. ``gradient`` returns the placement of the
    gradients of whole weights.
    """

    axis: int | None = None  # of the matrix; None: each worker has the whole module
    compute: Callable[..., Tensor] = lambda call, *inputs: call(*inputs)
    gradient: Callable[[], Placement] = Replicate
    parts: int = 1  # matrices in one
    made: Any = field(default_factory=WeakTensorKeyDictionary)  # parameters that are cut, for tied weights

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in self.made:
                self.made[parameter] = self._cut(parameter, device_mesh)
            module.register_parameter(name, self.made[parameter])
        if self.parts > 1:
            module.fused_rows = (self.parts, device_mesh.size())  # type: ignore[assignment]  # read by ``whole_rows``
        module.forward = partial(self._forward, module, module.forward)
        return module

    def _cut(self, parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        whole, axis = parameter.detach(), self._axis(parameter)
        if axis is not None:
            rank = mesh.get_local_rank()
            pieces = [part.chunk(mesh.size(), axis)[rank] for part in whole.chunk(self.parts, axis)]
            whole = torch.cat(pieces, axis) if self.parts > 1 else pieces[0].clone()
        placement = Replicate() if axis is None else Shard(axis)
        local = DTensor.from_local(whole, mesh, [placement], run_check=False)
        return nn.Parameter(local, requires_grad=parameter.requires_grad)

    def _axis(self, parameter: Tensor) -> int | None:
        """Return the axis along which a parameter is cut. A bias is added to whole outputs if the inputs are cut."""
        return None if self.axis is None or self.axis >= parameter.dim() else self.axis

    def _forward(self, module: nn.Module, plain: Call, *inputs: Any, **options: Any) -> Tensor:
        whole = dict(module._parameters)

        def local(parameter: Tensor) -> Tensor:
            assert isinstance(parameter, DTensor)
            placement = self.gradient() if parameter.placements[0].is_replicate() else parameter.placements[0]
            return parameter.to_local(grad_placements=[placement])

        try:
            for name, parameter in whole.items():
                if parameter is not None:
                    module._parameters[name] = local(parameter)  # type: ignore[assignment]
            return self.compute(plain, *inputs, **options)
        finally:
            module._parameters.update(whole)


class Cutter:
    """The plan of a model for one worker. Call it for each module that has its weights."""

    def __init__(self, model: nn.Module, config: Config, context: Context, mesh: DeviceMesh) -> None:
        self.mesh, self.region = mesh, Region(mesh, context.rank % context.tensor)
        self.styles: dict[nn.Module, Cut] = {}
        # Rates of a custom model, or of an architecture with model.dropout=null. A head for classes has its own.
        rates = {name: rate for name, rate in dropout_rates(model).items() if name != "classifier_dropout"}
        for name, rate in rates.items():
            raise ConfigError(
                f"parallel.tensor={mesh.size()} does not support dropout, because workers of a group would drop the "
                f"same units of different heads, but {type(model).__name__} has {name}={rate:g}: "
                f"{zero_hint(config.model, name)}"
            )
        blocks = find_blocks(model, needed_for="parallel.tensor", alternative="parallel.tensor=1")
        plan = plan_of(model, with_experts=config.parallel.expert == 1)
        self.made = WeakTensorKeyDictionary()
        self.experts = {experts for _, experts in find_experts(model)} if config.parallel.expert > 1 else set()
        if self.experts and getattr(model.config, "output_router_logits", False):  # of a share of the tokens
            raise ConfigError(
                f"parallel.tensor={mesh.size()} with parallel.expert={config.parallel.expert} does not support the "
                "router loss: use model.options.output_router_logits=false"
            )
        for name, block in blocks:
            self._plan_block(name, block, plan)
        blocks[0][1].register_forward_pre_hook(self.region.start, with_kwargs=True)
        self.last = blocks[-1][1]
        if is_bloom(model):
            from distexp.models import bloom

            bloom.cut_heads(model, self.region.rank, mesh.size())
        self._plan_vocabulary(model, config)
        for module in model.modules():  # what is not cut
            is_planned = module in self.styles or module in self.experts
            if not is_planned and has_parameters(module, recurse=False):
                self.styles[module] = Cut(made=self.made)

    def __call__(self, module: nn.Module) -> None:
        """Cut a module and what it contains, except what is cut already or on other workers of a pipeline."""
        for part in module.modules():
            if (style := self.styles.pop(part, None)) is not None and has_parameters(part, recurse=False):
                parallelize_module(part, self.mesh, style, src_data_rank=None)

    def finish(self) -> None:
        """Gather the tokens after the last block. Call it after FSDP has added its hooks, which expect no view."""
        self.last.register_forward_hook(self.region.end)

    def _plan_block(self, name: str, block: nn.Module, plan: Plan) -> None:
        """Choose the style of each module of a block that has parameters."""
        patterns = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in plan.items()]
        named = dict(block.named_modules(prefix=name))
        styles = {key: style for key in named for pattern, style in patterns if pattern.fullmatch(key)}
        parents = {key.rpartition(".")[0] for key, style in styles.items() if style in COLUMN_STYLES}
        whole = {key.rpartition(".")[0] for key, style in styles.items() if style == GATHERED_COLUMNS}
        for key in [key for key in styles if hasattr(named[key], "lora_A")]:
            styles |= _styles_of_adapter(key, styles.pop(key))
        for parent in parents:
            named[parent].register_forward_pre_hook(self.region.gather, with_kwargs=True)
        for key, module in named.items():
            if module in self.experts or not has_parameters(module, recurse=False):
                continue
            inside = next((parent for parent in parents if key.startswith(f"{parent}.")), None)
            if key in styles:
                self.styles[module] = self._style(key, module, styles[key])
            elif inside is None or inside in whole:
                gradient = Replicate if inside else lambda: self.region.weight_gradient
                self.styles[module] = Cut(gradient=gradient, made=self.made)
            else:
                raise ConfigError(
                    f"parallel.tensor: the plan of the model does not name {key}, which computes with a part of the "
                    "heads: use parallel.tensor=1 sharding=full_shard"
                )

    def _style(self, name: str, module: nn.Module, style: str) -> Cut:
        mesh, region = self.mesh, self.region
        if style in (HEADS, OWN_TOKENS):
            gradient = Partial if style == HEADS else lambda: region.weight_gradient
            return Cut(gradient=gradient, made=self.made)
        axis = 0 if style in COLUMN_STYLES else 1
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or weight is None or weight.shape[axis] % mesh.size():
            raise ConfigError(
                f"parallel.tensor={mesh.size()} cannot cut {name} ({module}): use a degree that divides its size, or "
                "parallel.tensor=1"
            )

        def columns(call: Call, hidden: Tensor) -> Tensor:
            output = call(hidden)
            if style != GATHERED_COLUMNS:
                return output
            return move(output, mesh, Shard(output.dim() - 1), Replicate())

        def rows(call: Call, hidden: Tensor) -> Tensor:
            if style == SPLIT_ROWS:
                hidden = move(hidden, mesh, Replicate(), Shard(hidden.dim() - 1))
            bias, module._parameters["bias"] = module._parameters["bias"], None
            output = move(call(hidden), mesh, Partial(), region.layout)
            return output if bias is None else output + bias

        if axis == 0:
            parts = FUSED_PARTS if style == FUSED_COLUMNS else 1
            return Cut(0, columns, parts=parts, made=self.made)
        return Cut(1, rows, lambda: region.weight_gradient, made=self.made)

    def _plan_vocabulary(self, model: nn.Module, config: Config) -> None:
        """Cut embedding and head by the vocabulary, unless it does not divide evenly or the loss needs all logits."""
        modules: list[Any] = [module for _, module in find_embeddings(model)]
        kinds = [nn.Embedding, nn.Linear]
        fits = len(modules) == len(kinds) and all(map(isinstance, modules, kinds))
        if not fits or config.train.loss != "full" or any(len(each.weight) % self.mesh.size() for each in modules):
            return
        embedding, head = modules
        mesh, width = self.mesh, len(embedding.weight) // self.mesh.size()
        first = self.region.rank * width
        padding = embedding.padding_idx
        has_padding = padding is not None and first <= padding < first + width
        embedding.padding_idx = padding - first if has_padding else None

        def look_up(call: Call, ids: Tensor) -> Tensor:
            own = ids - first
            is_other = (own < 0) | (own >= width)
            found = call(own.masked_fill(is_other, 0)).masked_fill(is_other[..., None], 0.0)
            return move(found, mesh, Partial(), Replicate()).clone()  # FSDP expects no view

        def project(call: Call, hidden: Tensor) -> Tensor:
            logits = call(move(hidden, mesh, Replicate(), Replicate(), Partial()))
            return DTensor.from_local(logits, mesh, [Shard(logits.dim() - 1)], run_check=False)

        self.styles[embedding] = Cut(0, look_up, made=self.made)
        self.styles[head] = Cut(0, project, made=self.made)


def _styles_of_adapter(name: str, style: str) -> dict[str, str]:
    """Return the styles of a layer with a LoRA adapter, and of its two matrices. The first one gives few features.

    If the layer is cut by its outputs, the second matrix is too, and the workers sum the gradients of the first one. If
    it is cut by its inputs, the first matrix is too, and the second one computes with the sum.
    """
    first, second = (HEADS, style) if style in COLUMN_STYLES else (style, OWN_TOKENS)
    return {
        f"{name}.base_layer": style,
        f"{name}.lora_A.{ADAPTER}": first,
        f"{name}.lora_B.{ADAPTER}": second,
    }


COLUMN_STYLES = (COLUMNS, FUSED_COLUMNS, GATHERED_COLUMNS)


def shares_vocabulary(model: nn.Module) -> bool:
    """Return whether each worker of a group computes the logits of a part of the vocabulary, read from the weights."""
    for _, head in find_embeddings(model)[-1:]:  # A stage of a pipeline has only the embedding or the head.
        weight, axes = head.weight, getattr(getattr(head.weight, "device_mesh", None), "mesh_dim_names", None) or ()
        return isinstance(weight, DTensor) and TENSOR in axes and not weight.placements[-1].is_replicate()
    return False


def fused_rows(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the parts and the workers of each parameter whose rows are in the order of the workers, by its name."""
    return {
        f"{prefix}.{name}": order
        for prefix, module in model.named_modules()
        if (order := getattr(module, "fused_rows", None)) is not None
        for name, _ in module.named_parameters(recurse=False)
    }


def in_original_order(whole: Tensor, order: tuple[int, int] | None) -> Tensor:
    """Return a whole parameter, its gradient or its state with its rows in the order of the model."""
    if order is None or not whole.dim():
        return whole
    parts, workers = order
    return whole.view(workers, parts, -1, *whole.shape[1:]).transpose(0, 1).flatten(0, 2)

"""The tensors that a distributed model keeps on this rank, read from the live objects of any strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distexp.models.introspection import find_embeddings
from distexp.system.torch_internals.collectives import ddp_bucket_sizes


def read_model_tensors(module: nn.Module, optimizer: Any) -> ModelTensors:
    """Return the parameters, gradients and optimizer states of this rank."""
    parameters = list(module.parameters())
    masters = [*_masters(optimizer), *_updated_elsewhere(optimizer, parameters)]
    return ModelTensors(
        parameters=[*parameters, *_attributes(parameters, "ds_tensor")],
        gradients=[
            *_attributes([*parameters, *masters], "grad"),
            *_attributes(parameters, "grad_accum"),
            *_tensors_in(getattr(optimizer, "averaged_gradients", None)),
            *_tensors_in(getattr(optimizer, "accumulated_grads_in_cpu", None)),
            *_tensors_in(getattr(optimizer, "grad_partitions_flat_buffer", None)),
        ],
        optimizer_states=[*masters, *_tensors_in(getattr(innermost_optimizer(optimizer), "state", None))],
        buffers=list(module.buffers()),
        communication=[
            bucket.buffer
            for bucket in (getattr(optimizer, "ipg_buckets", None) or {}).values()
            if isinstance(getattr(bucket, "buffer", None), torch.Tensor)
        ],
        bucket_sizes=ddp_bucket_sizes(module) if isinstance(module, DistributedDataParallel) else (),
        names={
            id(parameter): name.removeprefix("module.").replace("_orig_mod.", "")
            for name, parameter in module.named_parameters()
        },
        vocabulary=_vocabulary(module),
    )


def _vocabulary(module: nn.Module) -> int | None:
    """Return the size of the vocabulary; None for image models. ZeRO's stage 3 keeps the shape of freed weights."""
    bare = getattr(module, "module", module)
    weights = [getattr(embedding, "weight", None) for _, embedding in find_embeddings(bare)]
    shapes = [getattr(weight, "ds_shape", weight.shape) for weight in weights if isinstance(weight, torch.Tensor)]
    return int(shapes[0][0]) if shapes else None


def _masters(optimizer: Any) -> Iterator[Tensor]:
    # Of DeepSpeed's optimizers for stages 1 and 2, for stage 3, and for fp16 at stage 0.
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat"):
        yield from _tensors_in(getattr(optimizer, name, None))


def _updated_elsewhere(optimizer: Any, parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    """Yield the weights that torch's optimizer updates if the module computes with copies of them."""
    own = {id(parameter) for parameter in parameters}
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            yield from (parameter for parameter in group["params"] if id(parameter) not in own)


def innermost_optimizer(optimizer: Any) -> Any:
    """Return torch's optimizer without the wrappers of DeepSpeed and accelerate."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None and inner is not optimizer:
        optimizer = inner
    return optimizer


def _attributes(tensors: Iterable[Tensor], name: str) -> Iterator[Tensor]:
    """Yield an attribute of tensors that have it."""
    values = (getattr(tensor, name, None) for tensor in tensors)
    return (value for value in values if isinstance(value, torch.Tensor))


def _tensors_in(content: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists and dictionaries."""
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _tensors_in(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _tensors_in(value)


# The tensors of a distributed model on one rank.


@dataclass(frozen=True)
class ModelTensors:
    """Tensors of a distributed model on this rank. Views of one storage count once."""

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    optimizer_states: Sequence[Tensor]
    buffers: Sequence[Tensor] = ()  # tensors of the module that are not trained
    communication: Sequence[Tensor] = ()
    bucket_sizes: Sequence[int] = ()  # bytes of the buckets that only the library can reach
    names: Mapping[int, str] = field(default_factory=dict)  # name of each parameter, by its id
    vocabulary: int | None = None  # size of the vocabulary; None for image models


ReadTensors = Callable[[], ModelTensors]

"""The optimizer and the gradient clipping, the same for every strategy, and the tensors that a rank keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distexp.config import TrainConfig
from distexp.models.introspection import find_embeddings
from distexp.system.torch_internals.collectives import ddp_bucket_sizes
from distexp.system.torch_internals.tensors import scale_tensors, tensor_norms


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer groups: weight decay for matrices only, as in the Trainer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if _dimensions(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if _dimensions(p) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _dimensions(parameter: nn.Parameter) -> int:
    """Return the number of axes; ZeRO-3 keeps the shape in ``ds_shape``."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def build_optimizer(model: nn.Module, train: TrainConfig, *, fused: bool) -> torch.optim.Optimizer:
    """Build AdamW, on request with its fused kernel, or SGD; the loop sets the learning rate before each step.

    If fp16's loss scaling skips the first step, fused SGD leaves the momentum uninitialized. ResNet-50 diverged by it.
    """
    groups = parameter_groups(model, train.weight_decay)
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum)
    beta1, beta2 = train.betas
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(beta1, beta2), eps=train.eps, fused=fused)


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def add_missing_states(optimizer: torch.optim.Optimizer) -> None:
    """Give states of 0 to parameters that no step has updated, because they had no gradient.

    torch can only load a checkpoint in which all parameters have states. A step from states of 0 is a first step.
    """
    known = next(((parameter, state) for parameter, state in optimizer.state.items() if state), None)
    if known is None:
        return
    shape, example = known[0].shape, known[1]
    for parameter in trained_parameters(optimizer):
        if not optimizer.state.get(parameter):
            optimizer.state[parameter] = {
                name: torch.zeros_like(parameter if value.shape == shape else value)
                for name, value in example.items()
                if isinstance(value, Tensor)
            }


@contextmanager
def keep_hyperparameters(optimizer: Any) -> Iterator[None]:
    """Restore the hyperparameters of an optimizer after the block, which loads the state of another run."""
    names = ("lr", "weight_decay", "betas", "eps", "momentum")  # set by the configuration; others choose the kernels
    saved = [{key: group[key] for key in names if key in group} for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update(values)


def restore_kernel(optimizer: torch.optim.Optimizer, *, fused: bool | None) -> None:
    """Let an optimizer with a loaded state use its own kernel, and not that of the run that saved the state.

    torch's fused kernel reads the step counts on the device of the weights, and the others on the CPU.
    """
    for group in optimizer.param_groups:
        if "fused" in group:
            group["fused"] = fused
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                state["step"] = state["step"].to(parameter.device if fused else "cpu")


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """Scale the gradients to a norm of at most ``limit``; return the norm before, fp32, shape ()."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = gradient_norm(gradients)
    if limit is not None:
        local = _local(gradients)
        scale_tensors(local, clipping_scale(norm, limit).to(local[0].dtype))
    return norm.to(torch.float32)


def clipping_scale(norm: Tensor, limit: float) -> Tensor:
    """Return the factor that scales gradients of this norm to a norm of at most ``limit``."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients, shape ().

    Each rank computes the norm of its shards. One number is reduced over the ranks that share the shards.
    """
    local = _local(gradients)
    # A CPU adds the squares one after the other, so float32 would keep two of seven digits. A GPU adds them as a tree.
    dtype = torch.float64 if local[0].device.type == "cpu" else torch.float32
    norm: Tensor = torch.stack(tensor_norms(local, dtype)).norm(2)
    first = gradients[0]
    if isinstance(first, DTensor):
        squared = norm.square()
        for axis, placement in enumerate(first.placements):
            if placement.is_shard():
                dist.all_reduce(squared, group=first.device_mesh.get_group(axis))
        norm = squared.sqrt()
    return norm


def _local(gradients: Sequence[Tensor]) -> list[Tensor]:
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


def read_model_tensors(module: nn.Module, optimizer: Any) -> ModelTensors:
    """Return the parameters, gradients and optimizer states of this rank."""
    parameters = list(module.parameters())
    own, masters = {id(parameter) for parameter in parameters}, list(_masters(optimizer))
    if isinstance(optimizer, torch.optim.Optimizer):  # The module may compute with copies of what it updates.
        masters += [parameter for parameter in trained_parameters(optimizer) if id(parameter) not in own]
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


def innermost_optimizer(optimizer: Any) -> Any:
    """Return torch's optimizer without the wrappers of DeepSpeed and accelerate."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None and inner is not optimizer:
        optimizer = inner
    return optimizer


def _attributes(tensors: Iterable[Tensor], name: str) -> Iterator[Tensor]:
    values = (getattr(tensor, name, None) for tensor in tensors)
    return (value for value in values if isinstance(value, torch.Tensor))


def _tensors_in(content: Any) -> Iterator[Tensor]:
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _tensors_in(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _tensors_in(value)


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

"""The optimizer and the gradient clipping, the same for every strategy, and the tensors that a rank keeps."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distexp.config import ConfigError, TrainConfig
from distexp.models.blueprint import find_embeddings
from distexp.models.transforms import find_units
from distexp.strategies.ddp_reduction import StepWeights
from distexp.system.torch_internals.collectives import ddp_bucket_sizes
from distexp.system.torch_internals.tensors import scale_tensors, tensor_norms, whole_matrices_in_muon


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


@dataclass(frozen=True)
class WeightUpdate:
    """The tensors of one weight, which have the same shape and strides, and the constants of AdamW in this step."""

    weight: Tensor  # fp32; is changed
    gradient: Tensor  # fp32 or bf16, before clipping
    exp_avg: Tensor  # mean of the gradients, fp32; is changed
    exp_avg_sq: Tensor  # mean of their squares, fp32; is changed
    copy: Tensor | None  # becomes the rounded weight, bf16; None: there is no copy
    learning_rate: float
    weight_decay: float  # of AdamW, before it is multiplied by the learning rate
    betas: tuple[float, float]  # factors of the old means
    eps: float  # is added to the root of the mean square
    step: Tensor  # number of this step, from 1 on, on the CPU, shape ()

    def addresses(self) -> list[int]:
        """Return the addresses of the tensors, in the order of the kernel."""
        copy = self.weight if self.copy is None else self.copy
        return [each.data_ptr() for each in (self.weight, self.gradient, self.exp_avg, self.exp_avg_sq, copy)]

    def is_aligned(self) -> bool:
        """Return whether a GPU can load several values of each tensor at once: 16 bytes for a thread."""
        return all(address % 16 == 0 for address in self.addresses())

    def constants(self) -> list[float]:
        """Return the constants of the formula, in the order of the kernel."""
        (beta1, beta2), step = self.betas, float(self.step)
        decay = 1 - self.learning_rate * self.weight_decay
        step_size = self.learning_rate / (1 - beta1**step)
        return [decay, step_size, (1 - beta2**step) ** 0.5, beta1, beta2, self.eps]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer groups: weight decay for matrices only, without biases and norms.

    The Trainer of transformers goes by names. It also decays vectors such as scales of layers, and no weight with
    ``bias`` in its whole name, such as the relative positions of T5.
    """
    is_matrix: dict[nn.Parameter, bool] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                is_matrix.setdefault(parameter, _is_matrix(module, name, parameter))
    groups = [
        {"params": [p for p, decays in is_matrix.items() if decays], "weight_decay": weight_decay},
        {"params": [p for p, decays in is_matrix.items() if not decays], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _is_matrix(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter has two or more axes and is neither a bias nor the weight of a norm."""
    dimensions = len(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 keeps the shape in ``ds_shape``.
    is_norm = re.search(r"norm(\d+d|gated)?$", type(module).__name__.lower())
    return dimensions >= 2 and not is_norm and not name.endswith("bias")


def build_optimizer(model: nn.Module, train: TrainConfig, *, fused: bool) -> torch.optim.Optimizer:
    """Build AdamW, on request with its fused kernel or 8 bits, SGD or Muon; the loop sets the learning rate.

    If fp16's loss scaling skips the first step, fused SGD leaves the momentum uninitialized. ResNet-50 diverged by it.
    Raise ConfigError if Muon finds no matrices.
    """
    groups = parameter_groups(model, train.weight_decay)
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum)
    if train.optimizer == "muon":
        return MuonAdamW(model, train, fused=fused)
    beta1, beta2 = train.betas
    if train.optimizer == "adamw8bit":
        from distexp.strategies.low_bits import EightBitAdamW

        return EightBitAdamW(groups, lr=train.learning_rate, betas=(beta1, beta2), eps=train.eps)
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(beta1, beta2), eps=train.eps, fused=fused)


class MuonAdamW(torch.optim.Optimizer):
    """Torch's Muon for the matrices in the repeated blocks of a model, and AdamW for all other weights.

    Both have the same learning rate: that of Muon is scaled to updates as large as those of AdamW. The matrices of
    FSDP are gathered one by one, because Muon needs whole ones.
    """

    def __init__(self, model: nn.Module, train: TrainConfig, *, fused: bool) -> None:
        bare = getattr(model, "module", model)
        hidden = {id(matrix): matrix for matrix in _hidden_matrices(bare)}
        if not hidden:
            raise ConfigError(
                f"train.optimizer=muon updates the matrices of repeated blocks, but "
                f"{type(bare).__name__.removeprefix('FSDP')} has none: use train.optimizer=adamw"
            )
        groups = parameter_groups(model, train.weight_decay)
        others = [group | {"params": [p for p in group["params"] if id(p) not in hidden]} for group in groups]
        others = [group for group in others if group["params"]]
        (beta1, beta2), rate = train.betas, train.learning_rate
        muon = torch.optim.Muon(
            hidden.values(),
            lr=rate,
            weight_decay=train.weight_decay,
            momentum=train.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        adamw = [torch.optim.AdamW(others, lr=rate, betas=(beta1, beta2), eps=train.eps, fused=fused)] if others else []
        self.parts: list[torch.optim.Optimizer] = [*adamw, muon]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights that have a gradient."""
        for part in self.parts:  # To load a checkpoint replaces groups and states.
            is_muon = isinstance(part, torch.optim.Muon)
            part.param_groups = [group for group in self.param_groups if is_muon_group(group) is is_muon]
            part.state = self.state
            with whole_matrices_in_muon():
                part.step()


def is_muon_group(group: Mapping[str, Any]) -> bool:
    """Return whether Muon updates the parameters of a group."""
    return "ns_steps" in group


def _hidden_matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the trained matrices in the repeated blocks of a model, except those of embeddings."""
    parts = (part for _, block in find_units(model) for part in block.modules())
    for part in parts:
        if not isinstance(part, nn.Embedding):
            named = (item for item in part.named_parameters(recurse=False) if _is_matrix(part, *item))
            yield from (p for _, p in named if p.requires_grad and p.dim() == 2)


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def add_missing_states(optimizer: torch.optim.Optimizer) -> None:
    """Give states of 0 to parameters that no step has updated, because they had no gradient.

    torch can only load a checkpoint in which all parameters have states. A step from states of 0 is a first step.
    """
    examples: dict[bool, tuple[torch.Size, Any]] = {}  # by whether it is Muon, which has other states than AdamW
    kinds = {p: is_muon_group(group) for group in optimizer.param_groups for p in group["params"]}
    for parameter, kind in kinds.items():
        if state := optimizer.state.get(parameter):
            examples[kind] = parameter.shape, state
    for parameter, kind in kinds.items():
        if kind in examples and not optimizer.state.get(parameter):
            if hasattr(optimizer, "new_state"):  # The shape of a weight decides how many bits its states have.
                optimizer.state[parameter] = optimizer.new_state(parameter)
                continue
            shape, example = examples[kind]
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


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    limit: float | None,
    norm_of: Callable[[Sequence[Tensor]], Tensor] | None = None,
) -> Tensor:
    """Scale the gradients to a norm of at most ``limit``; return the norm before, fp32, shape ()."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = (norm_of or gradient_norm)(gradients)
    if limit is not None:
        local = _local(gradients)
        scale_tensors(local, clipping_scale(norm, limit).to(local[0].dtype))
    return norm.to(torch.float32)


def clipping_scale(norm: Tensor, limit: float) -> Tensor:
    """Return the factor that scales gradients of this norm to a norm of at most ``limit``."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients, shape ().

    Each rank computes the norm of its shards. For gradients that are sharded over the same axes of the mesh, one number
    is reduced over each axis.
    """
    by_axes: dict[tuple[tuple[str, ...], tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        by_axes.setdefault((_mesh_axes(gradient), _sharded_axes(gradient)), []).append(gradient)
    norms = [_norm(members, axes) for (_, axes), members in sorted(by_axes.items())]  # the same order on all ranks
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm(2)


def _mesh_axes(gradient: Tensor) -> tuple[str, ...]:
    """Return the names of the axes of the mesh of a gradient. That of experts has other axes."""
    return (gradient.device_mesh.mesh_dim_names or ()) if isinstance(gradient, DTensor) else ()


def _sharded_axes(gradient: Tensor) -> tuple[int, ...]:
    """Return the axes of the mesh along which a gradient is sharded. One that is not reduced yet has no norm."""
    if not isinstance(gradient, DTensor):
        return ()
    assert not any(placement.is_partial() for placement in gradient.placements), gradient.placements
    # ``is_shard`` is false for the shards of FSDP in those of tensor parallelism.
    return tuple(axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())


def _norm(gradients: Sequence[Tensor], axes: tuple[int, ...]) -> Tensor:
    local = _local(gradients)
    # A CPU adds the squares one after the other, so float32 would keep two of seven digits. A GPU adds them as a tree.
    dtype = torch.float64 if local[0].device.type == "cpu" else torch.float32
    norm: Tensor = torch.stack(tensor_norms(local, dtype)).norm(2)
    first = gradients[0]
    if isinstance(first, DTensor):
        squared = norm.square()
        for axis in axes:
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
    """Yield the weights in fp32 of DeepSpeed's optimizers: for stages 1 and 2, for stage 3, and for fp16 at stage 0."""
    of_fp16 = ("fp32_groups_flat", "fp32_groups")  # DeepSpeed has two for it.
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", *of_fp16):
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


ReadTensors = Callable[[], ModelTensors]


class FusedAdamW(torch.optim.AdamW):
    """AdamW with the states and checkpoints of torch's, which updates all weights on a GPU by one kernel.

    A weight without a gradient has that of its 16-bit copy. ``distexp.plan`` replaces the function ``update``.
    """

    def __init__(self, groups: list[dict[str, Any]], copies: StepWeights | None, **options: Any) -> None:
        super().__init__(groups, **options)
        self.copies = copies
        self.update: Callable[[Sequence[WeightUpdate], Tensor], None] = _update_on_gpu

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights without clipping, as torch does to make the states for a checkpoint."""
        updates = list(self._updates())
        if updates:
            self.update(updates, torch.ones((), device=updates[0].weight.device))

    @torch.no_grad()
    def clip_and_step(self, limit: float | None) -> Tensor:
        """Scale the gradients to a norm of at most ``limit``, update the weights, and return the norm before."""
        updates = list(self._updates())
        norm = gradient_norm([update.gradient for update in updates]).to(torch.float32)
        scale = torch.ones_like(norm) if limit is None else clipping_scale(norm, limit)
        self.update(updates, scale)
        return norm

    def _updates(self) -> Iterator[WeightUpdate]:
        """Count the step of each weight that has a gradient, and yield what to do."""
        for group in self.param_groups:
            constants = {"weight_decay": group["weight_decay"], "betas": group["betas"], "eps": group["eps"]}
            for weight in group["params"]:
                copy = None if self.copies is None else self.copies.copy_of(weight)
                gradient = weight.grad if weight.grad is not None or copy is None else copy.grad
                if gradient is not None:
                    state: dict[str, Any] = self.state[weight]
                    if not state:  # named as in torch's AdamW
                        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
                    state["step"] += 1
                    yield WeightUpdate(
                        weight, _like(gradient, weight), state["exp_avg"], state["exp_avg_sq"], copy,
                        learning_rate=float(group["lr"]), step=state["step"], **constants,
                    )  # fmt: skip


def fused_adamw(model: nn.Module, train: TrainConfig, copies: StepWeights | None) -> FusedAdamW:
    """Build the optimizer of a model that has its fp32 weights; the loop sets the learning rate before each step."""
    beta1, beta2 = train.betas
    groups = parameter_groups(model, train.weight_decay)
    return FusedAdamW(groups, copies, lr=train.learning_rate, betas=(beta1, beta2), eps=train.eps)


def _like(gradient: Tensor, weight: Tensor) -> Tensor:
    if gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def _update_on_gpu(updates: Sequence[WeightUpdate], scale: Tensor) -> None:
    from distexp.strategies.adamw_kernel import update_weights

    update_weights(updates, scale)

"""Activation checkpointing and compilation of the blocks or the model, before distribution."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from distexp.config import WHOLE_MODEL, Config, ConfigError
from distexp.config.tasks import task_of
from distexp.exceptions import first_line
from distexp.models.dropout import dropout_rates, zero_hint
from distexp.models.objective import Entropy, entropy_of
from distexp.runs.texts import out_of_memory_status, refusal_number
from distexp.system.cache_dir import VARIABLE, cache_dir, explain_refusal
from distexp.system.torch_internals import compilation, pooling

BACKEND = "inductor"
"""Backend of ``torch.compile``. Tests choose a faster one."""


def transform_blocks(model: nn.Module, config: Config) -> None:
    """Apply ``train.activation_checkpointing`` and ``train.compile`` to the blocks or the model.

    Only ``forward`` of a block or of the model is replaced, so names and parameters stay. The hooks of FSDP
    and ZeRO, which gather parameters, are outside of the recomputed or compiled function.
    """
    check_dropout(model, config)
    if config.train.compiled != "none":
        compilation.limit_stored_activations(config.train.activation_budget)
        compilation.split_graphs_for_ddp(config.train.compiled in WHOLE_MODEL)
    blocks = _blocks_to_transform(model, config)
    options = _block_options(len(blocks), config)
    for block in blocks:
        forward = block.forward
        if config.train.compiled == "blocks":
            forward = compile_forward(forward, **options)
        if config.train.activation_checkpointing:
            selective = config.train.activation_checkpointing == SELECTIVE
            forward = checkpointed(block, forward, in_graph=config.train.compiled in WHOLE_MODEL, selective=selective)
        if config.train.activation_checkpointing == OFFLOAD:
            forward = partial(_run_with_inputs_on_cpu, forward)
        block.forward = forward
    if config.train.compiled in WHOLE_MODEL:
        _compile_model(model, cuda_graphs=config.train.compiled == "graphs")


def compile_forward(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a compiled function. ``distexp.plan.trace.compiled`` replaces this one."""
    pooling.repair_compiled()
    compiled: Callable[..., Any] = torch.compile(forward, backend=BACKEND, **options)
    return compiled


def training_entropy(config: Config) -> Entropy:
    """Return the cross entropy of a training, compiled if the model is and its labels are tokens.

    Compiled, it has no logits in fp32. With a vocabulary of 262k these are the largest tensors of a training.
    """
    if config.train.compiled == "none" or not task_of(config.model.task).labels_tokens:
        return entropy_of
    return compile_forward(entropy_of)


def _block_options(count: int, config: Config) -> dict[str, Any]:
    """Return the options of compiled blocks, and allow as many graphs as they need.

    The blocks of an image model share their code, but not their channels and strides. By default, torch would compile
    the second kind of block for any number of channels, which takes long, gives slow kernels, and may fail. There are
    few shapes, so each gets its graph: with full and with partial micro-batches, in training and in evaluation.
    """
    if config.train.compiled != "blocks" or not config.model.traits.is_image:
        return {}
    compilation.allow_graphs_per_function(4 * count)
    return {"dynamic": False}


def _compile_model(model: nn.Module, *, cuda_graphs: bool) -> None:
    """Compile ``forward`` of a model, which also works if DDP wraps the model later.

    Inside of DDP, dynamo splits the graph at the ends of DDP's buckets. So the reduction of a bucket overlaps with the
    backward pass of the next graph. Compiling the DDP module instead would give the same graphs, because dynamo
    skips the code of DDP.
    """
    options: dict[str, Any] = {"mode": "reduce-overhead"} if cuda_graphs and BACKEND == "inductor" else {}
    model.forward = compile_forward(model.forward, fullgraph=True, dynamic=False, **options)


def read_compiled(module: nn.Module) -> str:
    """Return what of a model is compiled, in the terms of ``train.compile``, read from the live module."""
    model = getattr(module, "module", module)  # inside of DDP or DeepSpeed
    settings = compilation.compiler_settings(model)
    if settings is not None:
        return "graphs" if settings.get("triton.cudagraphs") else "model"
    return "blocks" if any(compilation.compiler_settings(module) is not None for module in model.modules()) else "none"


class CompilationError(ConfigError):
    """A model that torch cannot compile. ``cause`` is torch's reason, without a hint."""

    def __init__(self, scope: str, cause: str) -> None:
        self.cause = cause
        is_whole = scope in WHOLE_MODEL
        needed = "needs a model that torch compiles as one graph" if is_whole else "needs blocks that torch compiles"
        smaller = "blocks" if is_whole else "false"
        super().__init__(
            f"train.compile={scope} {needed}, but {cause}. Use train.compile={smaller}, or kernels=fast without "
            "train.compile, which tries what compiles"
        )


@contextmanager
def explained_compilation(scope: str) -> Iterator[None]:
    """Raise CompilationError if torch cannot compile the code, but not if memory or a disk is full."""
    try:
        yield
    except compilation.compile_errors() as error:
        cause = getattr(error, "inner_exception", None) or error
        if out_of_memory_status(type(error).__name__, str(error)) is not None:
            raise
        if (number := refusal_number(error)) is not None:
            if (refused := _explain_full_cache(error, number)) is None:
                raise
            raise refused from error
        raise CompilationError(scope, f"{type(cause).__name__}: {first_line(cause).rstrip('.')}") from error


def _explain_full_cache(error: Exception, number: int) -> ConfigError | None:
    """Return the error of a folder of compiled code that refuses a file; None if another folder may be full."""
    folder = Path(os.environ.get(compilation.CACHE_VARIABLE) or compilation.default_compile_cache())
    inner = getattr(error, "inner_exception", None)
    cause = inner if isinstance(inner, OSError) else OSError(number, os.strerror(number))
    is_ours = folder.is_relative_to(cache_dir())
    return explain_refusal(folder, cause, VARIABLE if is_ours else compilation.CACHE_VARIABLE)


def _blocks_to_transform(model: nn.Module, config: Config) -> list[nn.Module]:
    """Return the blocks; if there are none, the whole model can be compiled, but not checkpointed.

    Checkpointing a whole model recomputes all of it and saves no memory.
    """
    train = config.train
    if train.activation_checkpointing:
        typed = str(train.activation_checkpointing).lower()
        needed_for, alternative = f"train.activation_checkpointing={typed}", "train.activation_checkpointing=false"
        blocks = find_blocks(model, config.fsdp.wrap, needed_for=needed_for, alternative=alternative)
        return [block for _, block in blocks]
    if train.compiled != "blocks":
        return []
    return [block for _, block in find_units(model, config.fsdp.wrap)] or [model]


NamedModules = list[tuple[str, nn.Module]]

NO_UNITS = "none"
"""Value of ``fsdp.wrap`` with which FSDP shards the whole model as one unit."""


def find_blocks(model: nn.Module, wrap: str = "auto", *, needed_for: str, alternative: str) -> NamedModules:
    """Find the repeated blocks of a model, in forward order. Raise ConfigError if it has none."""
    blocks = find_units(model, wrap)
    if not blocks:
        raise ConfigError(
            f"{needed_for} needs a model with repeated blocks, which {type(model).__name__} lacks: set {alternative}, "
            "or fsdp.wrap to class names of its modules"
        )
    return blocks


def find_units(model: nn.Module, wrap: str = "auto") -> NamedModules:
    """Find the repeated blocks of a model, in forward order; ``auto`` finds none in a model without them.

    ``wrap`` has class names separated by commas, or is ``auto``. That finds the classes in ``_no_split_modules`` of
    transformers, or else the members of containers whose members have the same class. Of several such classes, it
    takes the one with the most parameters. ``none`` finds none. Raise ConfigError if the model has no module of the
    named classes.
    """
    if wrap == NO_UNITS:
        return []
    if wrap != "auto":
        return _find_classes(model, [name.strip() for name in wrap.split(",") if name.strip()])
    declared = set(getattr(model, "_no_split_modules", None) or ())
    found = [(name, module) for name, module in model.named_modules() if own_class(module).__name__ in declared]
    embedding = embedding_of(model, "input")  # Encoders declare the module that contains it, but it is no block.
    found = [(name, module) for name, module in found if all(part is not embedding for part in module.modules())]
    return found or _largest_repeated(model)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without that of torch for its shards, which some workers of a pipeline lack."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed"))


def has_encoder(model: nn.Module) -> bool:
    """Return whether a model of transformers has an attention that sees later tokens."""
    return any(not getattr(module, "is_causal", True) for module in model.modules())


def embedding_of(model: nn.Module, side: str) -> nn.Module | None:
    """Return the embedding of the ``input`` of a model, or the head of its ``output``; None if it names none."""
    getter = getattr(model, f"get_{side}_embeddings", None)
    with suppress(NotImplementedError):  # transformers raises it for image models
        found: nn.Module | None = None if getter is None else getter()
        return found
    return None


def _find_classes(model: nn.Module, wanted: list[str]) -> NamedModules:
    parts = [(name, module, type(module).__name__) for name, module in model.named_modules() if name]
    available = {kind for _, _, kind in parts}
    missing = set(wanted) - available
    if missing or not wanted:
        problem = f"the model has no modules of class {', '.join(sorted(missing))}" if missing else "no class is given"
        raise ConfigError(
            f"fsdp.wrap={','.join(wanted)}: {problem}. Use auto, or some of {', '.join(sorted(available))}"
        )
    return [(name, module) for name, module, kind in parts if kind in wanted]


def _largest_repeated(model: nn.Module) -> NamedModules:
    by_class: dict[type[nn.Module], NamedModules] = defaultdict(list)
    for name, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        members = list(container.named_children())
        classes = {own_class(member) for _, member in members}
        all_have_children = all(any(True for _ in member.children()) for _, member in members)
        if len(classes) == 1 and all_have_children and not classes & {nn.ModuleList, nn.ModuleDict}:  # no forward
            prefix = f"{name}." if name else ""
            by_class[classes.pop()] += [(prefix + child, member) for child, member in members]
    return max(
        by_class.values(),
        key=lambda modules: sum(parameter.numel() for _, module in modules for parameter in module.parameters()),
        default=[],
    )


def use_fp32_batch_norms(model: nn.Module) -> None:
    """Let batch norms compute with their weights in fp32, as under autocast. Their running statistics are in fp32 too.

    torch has no batch norm on a CPU for weights in 16 bits and statistics in fp32. A class with its own ``forward``
    keeps it.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
            # Not a partial, because torch.compile would compile each block again.
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(norm: _BatchNorm, inputs: Tensor) -> Tensor:
    """Compute what ``forward`` of a batch norm computes, with weights in fp32."""
    norm._check_input_dim(inputs)  # type: ignore[no-untyped-call]
    updates = norm.training and norm.track_running_stats
    if updates and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    # The share of a batch in the new running statistics. Without a momentum they are means of all batches.
    share = 0.0 if norm.momentum is None else float(norm.momentum)
    if norm.momentum is None and updates and norm.num_batches_tracked is not None:
        share = 1 / float(norm.num_batches_tracked)
    uses_statistics = updates or not norm.training
    return functional.batch_norm(
        inputs,
        norm.running_mean if uses_statistics else None,
        norm.running_var if uses_statistics else None,
        None if norm.weight is None else norm.weight.float(),
        None if norm.bias is None else norm.bias.float(),
        norm.training or norm.running_mean is None,
        share,
        norm.eps,
    )


def check_dropout(model: nn.Module, config: Config) -> None:
    """Raise ConfigError if a part of a block is recomputed with dropout: torch would draw other numbers.

    For an activation budget see issue 190758 of torch. An attention that is not recomputed draws no numbers.
    """
    budget, selective = config.train.activation_budget, config.train.activation_checkpointing == SELECTIVE
    if not selective and (budget is None or budget >= 1):
        return
    typed = "train.activation_checkpointing=selective" if selective else f"train.activation_budget={budget:g}"
    for name, rate in dropout_rates(model).items():
        raise ConfigError(
            f"{typed} gives wrong gradients with dropout, but {type(model).__name__} has "
            f"{name}={rate:g}: {zero_hint(config.model, name)}, or use train.activation_checkpointing=true in its place"
        )


OFFLOAD = "offload"  # of ``train.activation_checkpointing``: recompute blocks, and keep their inputs on the CPU
SELECTIVE = "selective"
"""Value of ``train.activation_checkpointing`` that stores the results of SAVED_OPERATIONS."""

SAVED_OPERATIONS = (
    *("mm", "addmm", "convolution"),
    *(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"),
)
"""Operations of torch that take most of the time of a block. Batched products are not in it: the scores of an attention
without a fused kernel are larger than all other activations of a block."""


saved_on_cpu: Callable[..., saved_tensors_hooks] = save_on_cpu
"""What moves the inputs. ``distexp.plan`` replaces it, because the memory that it needs is rounded."""


def _run_with_inputs_on_cpu(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run a checkpointed block, and copy its hidden states to page-locked memory until the backward pass.

    A checkpoint saves the inputs of the block and nothing else. A mask, which all blocks share, stays where it is.
    """
    hidden = [value for value in tree_iter((arguments, options)) if isinstance(value, Tensor) and value.requires_grad]
    moved = {(tensor.shape, tensor.dtype) for tensor in hidden}
    copies = saved_on_cpu(pin_memory=any(tensor.is_cuda for tensor in hidden))

    def pack(tensor: Tensor) -> tuple[Any, Callable[[Any], Any]]:
        is_moved = (tensor.shape, tensor.dtype) in moved
        return (copies.pack_hook(tensor), copies.unpack_hook) if is_moved else (tensor, lambda kept: kept)

    with saved_tensors_hooks(pack, lambda packed: packed[1](packed[0])):
        return forward(*arguments, **options)


stored_watchers: list[Callable[[Tensor], object]] = []
"""Functions that get each stored result. The hooks of torch for saved tensors do not see them."""


def checkpointed(
    block: nn.Module, forward: Callable[..., Any], *, in_graph: bool, selective: bool = False
) -> Callable[..., Any]:
    """Return a function that computes a block and recomputes its activations, or some, in the backward pass.

    In a larger compiled graph, torch updates the running statistics of batch norms once by itself.
    """
    norms = [] if in_graph else [module for module in block.modules() if isinstance(module, _BatchNorm)]
    # The contexts are those of the forward pass and of the recomputation.
    options: dict[str, Any] = {"context_fn": partial(_contexts, norms, selective)} if norms or selective else {}
    return partial(checkpoint, forward, use_reentrant=False, **options)


def _contexts(norms: Sequence[nn.Module], selective: bool) -> tuple[AbstractContextManager[Any], ...]:
    if not selective:
        return nullcontext(), _unchanged_statistics(norms)
    storing, reading = create_selective_checkpoint_contexts(_is_stored)  # type: ignore[no-untyped-call]
    return _stored(storing), _recomputed(norms, reading)


def _is_stored(context: Any, operation: Any, *_: Any, **__: Any) -> bool:
    """Return whether the results of an operation are stored."""
    return operation.namespace == "aten" and operation.overloadpacket.__name__ in SAVED_OPERATIONS


class _WatchedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes each stored result to the watchers. The context of torch 2.11 does not have the results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if _is_stored(None, func):
            for result in results if isinstance(results, tuple) else (results,):
                if isinstance(result, Tensor):
                    for watch in stored_watchers:
                        watch(result)
        return results


@contextmanager
def _stored(storing: AbstractContextManager[Any]) -> Iterator[None]:
    with _WatchedOperations() if stored_watchers else nullcontext(), storing:  # type: ignore[no-untyped-call]
        yield


@contextmanager
def _recomputed(norms: Sequence[nn.Module], reading: AbstractContextManager[Any]) -> Iterator[None]:
    with _unchanged_statistics(norms), reading:
        yield


@contextmanager
def _unchanged_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the running statistics, which are other tensors than those of the model before it is on its device."""
    before = [(buffer, buffer.detach().clone()) for norm in norms for buffer in norm.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)  # not buffer.copy_, because autograd has saved the buffer


def set_memory_format(model: nn.Module, config: Config) -> None:
    """Convert the weights of convolutions to channels-last, if ``train.channels_last=true``.

    Images are channels-last. A convolution of images and weights in different formats may have to copy the weights.
    """
    if config.train.channels_last:
        for weight in model.parameters():  # Module.to would fail for the fake tensors of a trace.
            if weight.dim() == 4:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def read_memory_format(model: nn.Module) -> bool | None:
    """Return whether the weights of convolutions are channels-last; None if the model has none on this worker."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 4]
    # With one pixel, as with one channel, both formats are the same.
    distinct = [weight for weight in weights if weight.shape[1] > 1 and weight.shape[2:].numel() > 1]
    return all(weight.is_contiguous(memory_format=torch.channels_last) for weight in distinct) if distinct else None

"""All uses of private PyTorch APIs: a new PyTorch release breaks only this file.

``tests/system/test_torch_internals.py`` checks each of them against the installed release.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import distributed_c10d


class TorchInternalsChangedError(RuntimeError):
    """A private API that distexp uses differs in the installed PyTorch release."""


@dataclass(frozen=True)
class FSDPPolicies:
    """What FSDP does with the parameters of one unit."""

    reshards_after_forward: bool
    offloads_to_cpu: bool
    param_dtype: torch.dtype | None  # None: the dtype of the parameters


def read_fsdp_policies(units: Sequence[Any]) -> list[FSDPPolicies]:
    """Return the policies of each FSDP unit that has parameters."""
    with _explained("FSDPModule._get_fsdp_state()._fsdp_param_group"):
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
        return [
            FSDPPolicies(
                reshards_after_forward=group.post_forward_mesh_info is not None,
                offloads_to_cpu=type(group.offload_policy).__name__ == "CPUOffloadPolicy",
                param_dtype=group.mp_policy.param_dtype,
            )
            for group in groups
            if group is not None
        ]


def group_by_fsdp_unit(model: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """Return the modules of each FSDP unit, in the order of ``model.modules()``."""
    from torch.distributed.fsdp import FSDPModule  # importing it takes a second

    units: dict[int, list[torch.nn.Module]] = {}
    with _explained("FSDPModule._get_fsdp_state()"):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                units.setdefault(id(module._get_fsdp_state()), []).append(module)
    return list(units.values())


def tensor_norms(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norm of each tensor, computed in ``dtype`` by one kernel."""
    with _explained("torch._foreach_norm"):
        return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def scale_tensors(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by a factor in place, with one kernel for all."""
    with _explained("torch._foreach_mul_"):
        torch._foreach_mul_(tensors, factor)


def extension_build_dir(name: str) -> Path:
    """Return the folder in which PyTorch builds a C++ extension; PyTorch creates it."""
    with _explained("torch.utils.cpp_extension._get_build_directory"):
        from torch.utils.cpp_extension import _get_build_directory

        return Path(_get_build_directory(name, verbose=False))


def set_default_timeout(timeout: timedelta) -> None:
    """Set the timeout of the process groups that are created later.

    A device mesh creates its groups with torch's defaults, which are 10 minutes for NCCL and 30 minutes for gloo. It
    has no argument for another timeout.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        with _explained(f"torch.distributed.distributed_c10d.{name}"):
            getattr(distributed_c10d, name)  # Setting a renamed attribute would have no effect.
        setattr(distributed_c10d, name, timeout)


def ddp_communication_dtype(wrapped: Any) -> torch.dtype:
    """Return the data type in which a DistributedDataParallel sends gradients."""
    with _explained("DistributedDataParallel._get_ddp_logging_data"):
        hook = wrapped._get_ddp_logging_data().get("comm_hook", "")
        if "bf16" in hook or "fp32" in hook:  # the names of the hooks of torch and of distexp
            return torch.bfloat16 if "bf16" in hook else torch.float32
        return cast("torch.dtype", next(p.dtype for p in wrapped.parameters() if p.requires_grad))


def ddp_bucket_sizes(wrapped: Any) -> list[int]:
    """Return the bytes of the buckets of a DistributedDataParallel, as rebuilt after its first backward pass."""
    with _explained("DistributedDataParallel._get_ddp_logging_data"):
        data = wrapped._get_ddp_logging_data()
        text = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
        return [int(size) for size in text.split(",") if size.strip()]


def start_memory_history(max_entries: int) -> None:
    """Record each allocation of GPU memory with its Python stack, and each free."""
    with _explained("torch.cuda.memory._record_memory_history"):
        torch.cuda.memory._record_memory_history("all", "alloc", "python", max_entries, clear_history=True)


def on_out_of_memory(call: Callable[[int, int, int, int], None]) -> None:
    """Call a function with GPU and requested, total and free bytes before torch raises an out-of-memory error."""
    with _explained("torch._C._cuda_attach_out_of_memory_observer"):
        torch._C._cuda_attach_out_of_memory_observer(call)  # type: ignore[attr-defined]


def stop_memory_history(device: int) -> list[dict[str, Any]]:
    """End the recording; return the entries of a GPU in order: ``action``, ``addr``, ``size`` and ``frames``."""
    with _explained("torch.cuda.memory._snapshot"):
        entries: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][device]
        torch.cuda.memory._record_memory_history(None)
        return entries


@dataclass(frozen=True)
class CompileEvent:
    """The start or the end of a compilation."""

    is_recompilation: bool  # the same code was compiled before, for example for another shape


def on_compilation(start: Callable[[CompileEvent], None], end: Callable[[CompileEvent], None]) -> Callable[[], None]:
    """Call functions at the start and the end of each compilation; return a function that ends this."""
    with _explained("torch._dynamo.callback"):
        from torch._dynamo.callback import CallbackTrigger, callback_handler

        def read(event: Any) -> CompileEvent:
            number = str(event.compile_id).rpartition("/")[2].partition("_")[0]
            return CompileEvent(event.callback_trigger is CallbackTrigger.DYNAMO and int(number) > 0)

        started = callback_handler.register_start_callback(lambda event: start(read(event)))
        ended = callback_handler.register_end_callback(lambda event: end(read(event)))

    def remove() -> None:
        callback_handler.remove_start_callback(started)
        callback_handler.remove_end_callback(ended)

    return remove


def compile_counters() -> dict[str, int]:
    """Return the counts of torch.compile in this process."""
    with _explained("torch._dynamo.utils.counters"):
        from torch._dynamo.utils import counters

        inductor = counters["inductor"]
        return {
            "graphs": counters["stats"]["unique_graphs"],
            "cache_hits": inductor["fxgraph_cache_hit"],
            "cache_misses": inductor["fxgraph_cache_miss"],
            "cuda_graph_skips": inductor["cudagraph_skips"],
        }


def compiler_settings(module: torch.nn.Module) -> dict[str, Any] | None:
    """Return the settings with which ``forward`` of a module is compiled, possibly inside of a checkpoint.

    None if it is not compiled. The settings are those of inductor, and empty for another backend.
    """
    forward = vars(module).get("forward")
    inner: Any = forward.args[0] if isinstance(forward, partial) and forward.args else forward
    if not hasattr(inner, "get_compiler_config"):
        return None
    with _explained("get_compiler_config of a compiled function"):
        read: Any = inner.get_compiler_config
        return dict(read() or {})


def limit_stored_activations(share: float | None) -> None:
    """Set which share of the activations later compiled graphs store; None: what the compiler chooses."""
    with _explained("torch._functorch.config.activation_memory_budget"):
        from torch._functorch import config

        config.activation_memory_budget = 1.0 if share is None else share


def read_activation_budget() -> float:
    """Return the share of ``limit_stored_activations``."""
    with _explained("torch._functorch.config.activation_memory_budget"):
        from torch._functorch import config

        return float(config.activation_memory_budget)


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of code that does not compile as one graph, or that was compiled for too many shapes."""
    with _explained("torch._dynamo.exc"):
        from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

        return Unsupported, FailOnRecompileLimitHit


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others of the same shapes, with one kernel for many."""
    with _explained("torch._foreach_copy_"):
        torch._foreach_copy_(targets, sources)


def active_autocast_dtype(autocast: torch.autocast) -> torch.dtype | None:
    """Return the dtype that autocast uses; None if torch has disabled it."""
    with _explained("torch.autocast._enabled"):
        return autocast.fast_dtype if autocast._enabled else None


class FakeMode(Protocol):
    """Torch's mode in which tensors have shapes and no values."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> Any: ...


def make_fake_mode() -> FakeMode:
    """Return a mode in which tensors have shapes, types and devices, but no memory."""
    with _explained("torch._subclasses.fake_tensor.FakeTensorMode"):
        from torch._subclasses.fake_tensor import FakeTensorMode

        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # It logs errors that it raises.
        return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake_of(tensor: Tensor, mode: FakeMode) -> bool:
    """Return whether a tensor was made in this mode."""
    return getattr(tensor, "fake_mode", None) is mode


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values, and not only a shape as in a fake mode."""
    return getattr(tensor, "fake_mode", None) is None and not tensor.is_meta


@contextmanager
def without_fake_mode() -> Iterator[None]:
    """Run the block with real tensors, inside of a fake mode."""
    with _explained("torch._subclasses.fake_tensor.unset_fake_temporarily"):
        from torch._subclasses.fake_tensor import unset_fake_temporarily
    with unset_fake_temporarily():
        yield


def fake_mode_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of operations that need the values of tensors."""
    with _explained("torch._subclasses.fake_tensor"):
        from torch._subclasses.fake_tensor import (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedOperatorException,
        )

        return DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a group whose collectives do nothing, during the block."""
    with _explained("torch.testing._internal.distributed.fake_pg.FakeStore"):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = FakeStore()
    torch.distributed.init_process_group("fake", rank=0, world_size=world_size, store=store)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def around_backward(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run each backward pass of autograd in a context, during the block."""
    with _explained("torch.autograd._engine_run_backward"):
        module: Any = torch.autograd
        original = module._engine_run_backward

    def run(*arguments: Any, **options: Any) -> Any:
        with context():
            return original(*arguments, **options)

    module._engine_run_backward = run
    try:
        yield
    finally:
        module._engine_run_backward = original


def count_references(tensor: Any) -> tuple[int, int]:
    """Return the references of C++ to a tensor and to its storage, from inside of a dispatch mode."""
    with _explained("Tensor._use_count, torch._C._storage_Use_Count"):
        return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@contextmanager
def fsdp_device(device: torch.device) -> Iterator[None]:
    """Let ``fully_shard`` use this device for meshes of CPUs, during the block."""
    with _explained("torch.distributed.fsdp._fully_shard._fully_shard._get_device_from_mesh"):
        from torch.distributed.fsdp._fully_shard import _fully_shard

        module: Any = _fully_shard
        original = module._get_device_from_mesh
    module._get_device_from_mesh = lambda mesh: device
    try:
        yield
    finally:
        module._get_device_from_mesh = original


@contextmanager
def replaced_kernels(kernels: Mapping[str, Callable[..., Any]], dispatch_key: str) -> Iterator[None]:
    """Replace kernels of aten by Python functions, for one dispatch key, during the block."""
    with _explained("torch.library.Library._destroy"):
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        end = library._destroy
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, dispatch_key, allow_override=True)
        yield
    finally:
        end()


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        raise TorchInternalsChangedError(
            f"{name} of PyTorch {torch.__version__} is not as distexp expects ({error}): "
            "install the version of PyTorch in requirements.txt, or adapt distexp/system/torch_internals.py"
        ) from error


def has_several_groups() -> bool:
    """Return whether this process is in several process groups, not counting copies and groups of one rank."""
    with _explained("torch.distributed.distributed_c10d._world.pg_group_ranks"):
        groups = {tuple(sorted(ranks)) for ranks in distributed_c10d._world.pg_group_ranks.values()}
    return sum(len(ranks) > 1 for ranks in groups) > 1


def default_compile_cache() -> str:
    """Return the folder in which inductor keeps compiled code by default. Inductor writes it to the environment."""
    with _explained("torch._inductor.runtime.cache_dir_utils.default_cache_dir"):
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        return str(Path(default_cache_dir()).absolute())


def graph_backend(compile_graph: Callable[[torch.fx.GraphModule], Any]) -> Any:
    """Return a backend of ``torch.compile`` that partitions graphs as inductor does, and generates no code.

    Args:
        compile_graph: returns a function for a forward or backward graph. It takes a list of the graph's inputs.
    """
    with _explained("torch._functorch.partitioners, torch._inductor"):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    def partition(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)

    return aot_autograd(
        fw_compiler=lambda graph, _: compile_graph(graph),
        bw_compiler=lambda graph, _: compile_graph(graph),
        partition_fn=partition,
        decompositions=select_decomp_table,
    )


@contextmanager
def only_mode(mode: Any) -> Iterator[None]:
    """Run the block with this dispatch mode and no other one, and without function modes."""
    with _explained("torch.utils._python_dispatch._disable_current_modes, torch.overrides._pop_mode_temporarily"):
        from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
        from torch.utils._python_dispatch import _disable_current_modes
    with ExitStack() as stack:
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(mode)
        yield


@contextmanager
def flex_attention_on_cpu() -> Iterator[None]:
    """Let ``flex_attention`` be captured for training on a CPU during the block. Its kernels cannot run there."""
    with _explained("torch.nn.attention.flex_attention._validate_device"):
        from torch.nn.attention import flex_attention

        original = flex_attention._validate_device
    flex_attention._validate_device = lambda *_: None
    try:
        yield
    finally:
        flex_attention._validate_device = original


def queue_backward_callback(function: Callable[[], None]) -> None:
    """Run a function at the end of the current backward pass, in the order of these calls."""
    with _explained("torch.autograd.Variable._execution_engine.queue_callback"):
        engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)

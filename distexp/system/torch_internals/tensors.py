"""Private APIs of tensors, autograd, GPU memory, fake tensors and dispatch modes."""

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distexp.system.cgroups import cpu_count, nvml_session


def tensor_norms(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norm of each tensor, computed in ``dtype`` by one kernel."""
    with explained("torch._foreach_norm"):
        return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def scale_tensors(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by a factor in place, with one kernel for all."""
    with explained("torch._foreach_mul_"):
        torch._foreach_mul_(tensors, factor)


def plain_tensors(tensor: Any) -> Iterator[Tensor]:
    """Yield a local tensor, or those of which it is made: a state in 8 bits has codes, scales and a table."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    elif isinstance(tensor, Tensor):
        yield tensor


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others of the same shapes, with one kernel for many."""
    with explained("torch._foreach_copy_"):
        torch._foreach_copy_(targets, sources)


def active_autocast_dtype(autocast: torch.autocast) -> torch.dtype | None:
    """Return the dtype that autocast uses; None if torch has disabled it."""
    with explained("torch.autocast._enabled"):
        return autocast.fast_dtype if autocast._enabled else None


def count_references(tensor: Any) -> tuple[int, int]:
    """Return the references of C++ to a tensor and to its storage, from inside of a dispatch mode."""
    with explained("Tensor._use_count, torch._C._storage_Use_Count"):
        return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def around_backward(context: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """Run each backward pass of autograd in a context, during the block."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            with context():
                return original(*arguments, **options)

        return run

    return replaced("torch.autograd", "_engine_run_backward", wrap)


def find_leaves(loss: Tensor) -> set[int]:
    """Return the ids of the tensors that get a gradient in the backward pass of a loss."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            with explained("AccumulateGrad.variable"):
                found.add(id(node.variable))
        waiting += [source for source, _ in node.next_functions]
    return found


def queue_backward_callback(function: Callable[[], None]) -> None:
    """Run a function at the end of the current backward pass, in the order of these calls."""
    with explained("torch.autograd.Variable._execution_engine.queue_callback"):
        engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def start_memory_history(max_entries: int) -> None:
    """Record each allocation of GPU memory with its Python stack, and each free."""
    with explained("torch.cuda.memory._record_memory_history"):
        torch.cuda.memory._record_memory_history("all", "alloc", "python", max_entries, clear_history=True)


def on_out_of_memory(call: Callable[[int, int, int, int], None]) -> None:
    """Call a function with GPU and requested, total and free bytes before torch raises an out-of-memory error."""
    with explained("torch._C._cuda_attach_out_of_memory_observer"):
        torch._C._cuda_attach_out_of_memory_observer(call)  # type: ignore[attr-defined]


def stop_memory_history(device: int) -> list[dict[str, Any]]:
    """End the recording; return the entries of a GPU in order: ``action``, ``addr``, ``size`` and ``frames``."""
    with explained("torch.cuda.memory._snapshot"):
        entries: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][device]
        torch.cuda.memory._record_memory_history(None)
        return entries


META = torch.device("meta")
FakeMode = AbstractContextManager[Any]
"""Torch's mode in which tensors have shapes and no values."""


def make_fake_mode() -> FakeMode:
    """Return a mode in which tensors have shapes, types and devices, but no memory."""
    with explained("torch._subclasses.fake_tensor.FakeTensorMode"):
        from torch._subclasses.fake_tensor import FakeTensorMode

        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # It logs errors that it raises.
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        device_of_fake(mode.from_tensor(torch.empty(0)), mode)
        return mode


def is_fake_of(tensor: Tensor, mode: FakeMode) -> bool:
    """Return whether a tensor was made in this mode."""
    return getattr(tensor, "fake_mode", None) is mode


def device_of_fake(tensor: Any, mode: Any) -> torch.device:
    """Return the device of a tensor of a mode, as its dispatch does, but a hundred times faster."""
    device: torch.device = META if mode.in_kernel_invocation else tensor.fake_device  # ``make_fake_mode`` checks both
    return device


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values, and not only a shape as in a fake mode."""
    return getattr(tensor, "fake_mode", None) is None and not tensor.is_meta


@contextmanager
def without_fake_mode() -> Iterator[None]:
    """Run the block with real tensors, inside of a fake mode."""
    with private_module("torch._subclasses.fake_tensor", "unset_fake_temporarily").unset_fake_temporarily():
        yield


def fake_mode_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of operations that need the values of tensors."""
    names = ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
    module = private_module("torch._subclasses.fake_tensor", *names)
    return tuple(getattr(module, name) for name in names)


@contextmanager
def only_mode(mode: Any) -> Iterator[None]:
    """Run the block with this dispatch mode and no other one, and without function modes."""
    with explained("torch.utils._python_dispatch._disable_current_modes, torch.overrides._pop_mode_temporarily"):
        from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
        from torch.utils._python_dispatch import _disable_current_modes
    with ExitStack() as stack:
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(mode)
        yield


@contextmanager
def replaced_kernels(kernels: Mapping[str, Callable[..., Any]], dispatch_key: str) -> Iterator[None]:
    """Replace kernels of aten by Python functions, for one dispatch key, during the block."""
    with explained("torch.library.Library._destroy"):
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        end = library._destroy
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, dispatch_key, allow_override=True)
        yield
    finally:
        end()


def whole_matrices_in_muon() -> AbstractContextManager[None]:
    """Let torch's Muon orthogonalize whole matrices during the block. A worker keeps its part of the result.

    torch 2.13 takes shards too, but computes other updates from them, with many collectives.
    """

    def wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def orthogonalize(gradient: Tensor, *arguments: Any) -> Tensor:
            if not isinstance(gradient, DTensor):
                return original(gradient, *arguments)
            rounded: Any = gradient.bfloat16()  # as Muon does itself
            whole = original(rounded.full_tensor(), *arguments)
            return distribute_tensor(whole, gradient.device_mesh, gradient.placements, src_data_rank=None)

        return orthogonalize

    return replaced("torch.optim._muon", "_zeropower_via_newtonschulz", wrap)


@contextmanager
def grouped_products_of_any_precision() -> Iterator[None]:
    """Let tensors without values be multiplied in groups in all precisions, during the block.

    The kernels of CUDA and of the CPU multiply bf16, fp16 and fp32. The one for shapes refuses all but bf16.
    """
    with explained("torch._meta_registrations.meta_grouped_mm"):
        from torch._meta_registrations import meta_grouped_mm

    def run(
        first: Tensor,
        second: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        shapes = meta_grouped_mm(_in_bf16(first), _in_bf16(second), offs, bias, torch.bfloat16)
        return torch.empty_strided(shapes.shape, shapes.stride(), dtype=out_dtype or first.dtype, device=first.device)

    with replaced_kernels({"_grouped_mm": run}, "Meta"):
        yield


def _in_bf16(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.bfloat16, device=tensor.device)


@contextmanager
def replaced(module_name: str, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a private function, or method ``Class.name``, by what ``wrap`` returns for it, during the block."""
    owner, _, attribute = name.rpartition(".")
    module = private_module(module_name, owner or attribute)
    place = getattr(module, owner) if owner else module
    original = getattr(place, attribute)
    setattr(place, attribute, wrap(original))
    try:
        yield
    finally:
        setattr(place, attribute, original)


@contextmanager
def without_cuda() -> Iterator[None]:
    """Let nothing initialize CUDA in this process during the block; what tries gets a RuntimeError.

    NVML answers for the capability of a GPU. torchao asks for it when it is imported, and transformers imports torchao
    if it is installed. The GPUs of a node are assumed to be equal.
    """

    def refuse() -> None:
        raise RuntimeError("CUDA must not be initialized in a process that forks workers")

    def capability(device: Any = None) -> tuple[int, int]:
        with nvml_session() as nvml:
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(nvml.nvmlDeviceGetHandleByIndex(0))
        return int(major), int(minor)

    with (
        replaced("torch.cuda", "_lazy_init", lambda _: refuse),
        replaced("torch.cuda", "get_device_capability", lambda _: capability),
    ):
        yield


def private_module(module: str, *names: str) -> Any:
    """Import a module of torch. Raise TorchInternalsChangedError if it lacks one of some private names."""
    with explained(f"{module}.{', '.join(names)}"):
        found = importlib.import_module(module)
        for name in names:
            getattr(found, name)
        return found


class TorchInternalsChangedError(RuntimeError):
    """A private API that distexp uses differs in the installed PyTorch release."""


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Raise TorchInternalsChangedError if the block finds another API than expected; ``name`` is its name."""
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        raise TorchInternalsChangedError(
            f"{name} of PyTorch {torch.__version__} is not as distexp expects ({error}): "
            "install the version of PyTorch in requirements.txt, or adapt distexp/system/torch_internals"
        ) from error


PIECE = 1 << 20
"""Values that one thread makes at a time, with its own generator. Smaller tensors are filled as usual."""

FILLS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
WITHOUT_VALUES = (torch.ops.aten.detach.default,)
"""Operations that read no values, as ``weight.data`` does."""


@dataclass(frozen=True)
class _Fill:
    """A fill that waits. The tensor has all of its storage."""

    tensor: Tensor
    function: Callable[..., Any]
    limits: tuple[Any, ...]  # mean and deviation, or the range
    seed: int

    def pieces(self) -> Iterator[tuple[Tensor, Callable[..., Any], tuple[Any, ...], int]]:
        flat = self.tensor.detach().view(-1)
        for number, piece in enumerate(torch.split(flat, PIECE)):
            yield piece, self.function, self.limits, self.seed + number


class _RandomFills(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Let fills of large tensors wait until an operation needs their values. A later fill replaces one that waits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waiting: dict[int, _Fill] = {}  # by the address of the storage, which the fill keeps

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        if function in FILLS and not options and _is_large_and_whole(arguments[0]):
            tensor, *limits = arguments
            seed = int(torch.randint(1 << 31, (), device="cpu"))
            self._waiting[_address(tensor)] = _Fill(tensor, function, tuple(limits), seed)
            return tensor
        if self._waiting and function not in WITHOUT_VALUES:
            used = {_address(leaf) for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)}
            self.fill([self._waiting.pop(address) for address in used & self._waiting.keys()])
        return function(*arguments, **(options or {}))

    def fill(self, fills: Sequence[_Fill] | None = None) -> None:
        """Run some of the fills that wait; by default all."""
        if fills is None:
            fills, self._waiting = list(self._waiting.values()), {}
        if fills:
            with ThreadPoolExecutor(cpu_count()) as pool:
                list(pool.map(_fill_piece, (piece for fill in fills for piece in fill.pieces())))


def _is_large_and_whole(tensor: Tensor) -> bool:
    whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return tensor.device.type == "cpu" and tensor.numel() >= PIECE and whole


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.device.type == "cpu" else 0


def _fill_piece(piece: tuple[Tensor, Callable[..., Any], tuple[Any, ...], int]) -> None:
    tensor, function, limits, seed = piece
    function(tensor, *limits, generator=torch.Generator().manual_seed(seed))


@contextmanager
def parallel_random_fills() -> Iterator[None]:
    """Fill large tensors on the CPU with random numbers on all cores, and only the last time, during the block.

    A module fills its weights when it is made, and most models then fill them again. On one core, both together take
    10 to 17 s per billion. The values depend on torch's default generator, and not on the cores. Inside of the block,
    NumPy, ``tolist`` and other threads must not read such a tensor.
    """
    mode = _RandomFills()
    with mode:
        yield
    mode.fill()

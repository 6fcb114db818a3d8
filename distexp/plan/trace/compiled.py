"""What a step allocates and computes inside of kernels: compiled regions, counts of the work, and buffers of CUDA.

A compiled region is a model of what inductor allocates for the graphs that torch.compile captures. Dynamo captures the
region, AOTAutograd traces forward and backward pass, and the min-cut partitioner decides what is kept for the backward
pass, all as in a run. Only the code generation is replaced. Inductor fuses operations into kernels, so most
intermediate results never exist. A result is in memory if it leaves a kernel: an output of the graph, an input or
output of an operation that is not fused (such as a matrix product), or the result of a reduction.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, is_tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from distexp.models import attention, transforms
from distexp.plan.replay import StepWork
from distexp.system.torch_internals.compilation import flex_attention_on_cpu, graph_backend
from distexp.system.torch_internals.tensors import FakeMode, only_mode

VIEWS = (
    *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "select", "slice", "expand", "unsqueeze"),
    *("squeeze", "alias", "detach", "as_strided", "split", "split_with_sizes", "unbind", "diagonal", "unfold"),
    *("_reshape_alias", "getitem"),
)
"""Operations whose result shares the memory of their first argument."""

EXTERN = (
    *("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "convolution", "convolution_backward"),
    *("flex_attention", "flex_attention_backward", "sort", "topk", "index_put", "scatter", "scatter_add"),
    *("_embedding_bag", "embedding_dense_backward", "max_pool2d_with_indices_backward", "_fused_adamw"),
)
"""Operations that are not fused with others. So are all operations with ``attention`` in their name."""

REDUCTIONS = ("sum", "mean", "amax", "amin", "var_mean", "var", "prod", "any", "all", "argmax", "argmin", "max", "min")

Record = Callable[[], AbstractContextManager[Any]]


class GraphMemory:
    """A graph that allocates what its kernels would allocate, and computes nothing."""

    def __init__(self, graph_module: fx.GraphModule, record: Record) -> None:
        self.record = record  # returns the context in which allocations are recorded
        self._boxed_call = True  # The caller hands over its references, so that inputs can be freed early.
        self.nodes = list(graph_module.graph.nodes)
        self.bases = {node: _base(node) for node in self.nodes}
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.outputs: Sequence[Any] = self.nodes[-1].args[0]
        self.buffers = self._find_buffers()
        self.last_use = self._find_last_uses()

    def _find_buffers(self) -> set[fx.Node]:
        found = {self.bases[node] for node in self.outputs if isinstance(node, fx.Node)}
        for node in self.nodes:
            if _is_extern(node):
                found.add(node)
                found |= {self.bases[source] for source in node.all_input_nodes}
            elif _is_reduction(node):
                found.add(node)
        return {node for node in found if node.op == "call_function"}

    def _find_last_uses(self) -> dict[fx.Node, int]:
        """Return the position of the last kernel that reads each buffer and input."""
        position = {node: index for index, node in enumerate(self.nodes)}
        last = {node: position[node] for node in (*self.inputs, *self.buffers)}
        for node in self.buffers:
            for read in self._reads(node):
                last[read] = max(last[read], position[node])
        for node in self.outputs:
            if isinstance(node, fx.Node):
                last[self.bases[node]] = len(self.nodes)
        return last

    def _reads(self, node: fx.Node) -> list[fx.Node]:
        """Return the buffers and inputs that the kernel of a node reads, also through fused operations."""
        found: list[fx.Node] = []
        seen: set[fx.Node] = set()
        pending = list(node.all_input_nodes)
        while pending:
            source = self.bases[pending.pop()]
            if source in seen:
                continue
            seen.add(source)
            if source in self.buffers or source.op == "placeholder":
                found.append(source)
            else:
                pending += source.all_input_nodes
        return found

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Allocate and free what the kernels would, and return tensors with the shapes of the outputs."""
        memory: dict[fx.Node, Any] = dict(zip(self.inputs, arguments, strict=True))
        arguments.clear()
        with torch.no_grad(), self.record() as recorder:
            recorder.count(node for node in self.nodes if node in self.buffers)
            for position, node in enumerate(self.nodes):
                if node in self.buffers:
                    dying = [source for source in self._reads(node) if self.last_use[source] == position]
                    if not _is_extern(node):  # The kernel writes into a buffer that it reads for the last time.
                        size = _bytes(node)
                        reused = [source for source in dying if _is_donated(source) and _bytes(source) == size]
                        for source in reused[:1]:
                            del memory[source]
                    memory[node] = _allocate(node)  # No local name may keep the tensors alive.
                    for dead in dying:
                        memory.pop(dead, None)
            return [self._output(node, memory) for node in self.outputs]

    def _output(self, node: Any, memory: dict[fx.Node, Any]) -> Any:
        if not isinstance(node, fx.Node):
            return node
        base = memory[self.bases[node]]
        value = node.meta["val"]
        if self.bases[node] is node or not isinstance(value, Tensor):
            return base
        if isinstance(base, (tuple, list)):
            base = next(
                candidate
                for candidate in base
                if tuple(candidate.shape) == tuple(value.shape) and candidate.dtype == value.dtype
            )
        flat = base.as_strided((base.untyped_storage().nbytes() // base.element_size(),), (1,), 0)
        return flat.as_strided(value.shape, value.stride(), value.storage_offset())


@contextmanager
def traced_compilation(fake_mode: FakeMode, record: Record) -> Iterator[None]:
    """Let ``GraphMemory`` replace the code that ``torch.compile`` generates for models built in the block."""
    backend = graph_backend(lambda graph: GraphMemory(graph, record))

    def compile_forward(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        options.pop("mode", None)  # CUDA graphs do not change what a graph allocates.
        compiled = torch.compile(forward, backend=backend, **options)

        def run(*arguments: Any, **inputs: Any) -> Any:
            with only_mode(fake_mode), flex_attention_on_cpu():
                return compiled(*arguments, **inputs)

        return run

    compiled_attention = compile_forward(flex_attention)
    originals = transforms.compile_forward, attention.compiled_flex_attention
    transforms.compile_forward = compile_forward
    attention.compiled_flex_attention = lambda device: compiled_attention
    torch.compiler.reset()
    try:
        yield
    finally:
        transforms.compile_forward, attention.compiled_flex_attention = originals
        torch.compiler.reset()


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet)).rpartition(".")[2]


def _is_extern(node: fx.Node) -> bool:
    return node.op == "call_function" and (_name(node) in EXTERN or "attention" in _name(node))


def _is_donated(node: fx.Node) -> bool:
    """Return whether a kernel may write into a buffer or an input: not into one that came from outside of the region.

    The backward pass owns what the forward pass has saved for it, except inputs of the region and incoming gradients.
    """
    return node.op != "placeholder" or not node.name.startswith(("primals", "tangents"))


def _is_reduction(node: fx.Node) -> bool:
    if hasattr(torch.Tag, "reduction"):
        return node.op == "call_function" and torch.Tag.reduction in getattr(node.target, "tags", ())
    return _name(node) in REDUCTIONS


def _base(node: fx.Node) -> fx.Node:
    """Return the node whose memory a result shares; the node itself if it is no view."""
    while node.op == "call_function" and _name(node) in VIEWS:
        node = node.all_input_nodes[0]
    return node


def _values(node: fx.Node) -> Iterator[Tensor]:
    value = node.meta.get("val")
    for item in value if isinstance(value, (tuple, list)) else [value]:
        if isinstance(item, Tensor):
            yield item


def _bytes(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _values(node))


def _allocate(node: fx.Node) -> Any:
    tensors = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in _values(node)]
    return tensors if isinstance(node.meta.get("val"), (tuple, list)) else tensors[0]


NO_KERNEL = ("empty", "empty_strided", "empty_like", "new_empty", "detach", "lift_fresh", "_unsafe_view")
"""Operations without a kernel, besides views."""


def _with_all_heads(packet: Any, args: Any) -> Any:
    """Return the arguments of a fused attention with a head of keys and values for each head of the queries.

    Before torch 2.13, the number of its operations can be computed for no others.
    """
    name = str(getattr(packet, "__name__", ""))
    if not name.startswith("_scaled_dot_product"):
        return args
    first = 1 if name.endswith("_backward") else 0  # after the gradient
    heads = args[first].shape[1]
    shapes = [torch.Size((each.shape[0], heads, *each.shape[2:])) for each in args[first + 1 : first + 3]]
    return (*args[: first + 1], *shapes, *args[first + 3 :])


class WorkCounter:
    """Counts of the operations of a step, by phase."""

    def __init__(self) -> None:
        self.flops: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.exchanged: Counter[str] = Counter()

    def add(self, phase: str, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Count an operation."""
        packet = getattr(func, "overloadpacket", func)
        count = flop_registry.get(packet)
        if count is not None:
            self.flops[phase] += int(count(*_with_all_heads(packet, args), **(kwargs or {}), out_val=outputs))
        # These read a property of a tensor, such as its device, or mark a range.
        reads_property = getattr(func, "namespace", "") in ("prim", "profiler")
        is_view = getattr(func, "is_view", False) or getattr(packet, "__name__", "") in NO_KERNEL
        if not reads_property and not is_view:
            self.operations[phase] += 1
        # The collectives of FSDP and DDP, which exchange weights and gradients, are other operations of c10d.
        name = str(getattr(packet, "__name__", ""))
        if getattr(func, "namespace", "") == "_c10d_functional" or name in ("alltoall_base_", "send"):
            sizes = [each.numel() * each.element_size() for each in tree_leaves((args, outputs)) if is_tensor(each)]
            self.exchanged[phase] += (2 if "all_reduce" in name else 1) * max(sizes, default=0)

    def step(self, micro_batches: int, traced: int, written: Mapping[str, int]) -> StepWork:
        """Return the work of a whole step, of whose micro-batches some were traced. ``written`` are bytes by phase."""
        factor = micro_batches / traced

        def total(counts: Mapping[str, int]) -> float:
            return (counts.get("forward", 0) + counts.get("backward", 0)) * factor + counts.get("optimizer", 0)

        operations, exchanged = round(total(self.operations)), total(self.exchanged)
        return StepWork(total(self.flops), operations, self.operations["optimizer"], total(written), exchanged)


# Memory that kernels of CUDA use for themselves: allocated after their outputs, and freed when they return.

THREADS_PER_BLOCK, WARP, THREADS_PER_MULTIPROCESSOR = 512, 32, 2048
VALUES_PER_THREAD = 16, 256  # values that a thread adds, at least and at most, before more blocks share a sum
MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot")  # operations of cuBLAS


def is_matrix_product(func: Any) -> bool:
    """Return whether an operation of aten uses cuBLAS, which then allocates its workspace."""
    return func.namespace == "aten" and func.overloadpacket.__name__ in MATRIX_PRODUCTS


@dataclass(frozen=True)
class KernelBuffers:
    """Buffers of the kernels of a GPU."""

    multiprocessors: int  # how many the GPU has. They decide how many blocks share a sum.

    def sizes(self, func: Any, arguments: Sequence[Any]) -> list[int]:
        """Return the bytes of the buffers of an operation, in the order of their allocation."""
        if func is torch.ops.aten._softmax_backward_data.default:
            left, right = arguments[:2]  # of one shape; the kernel allocates their product
            return [left.numel() * torch.promote_types(left.dtype, right.dtype).itemsize]
        if func is torch.ops.aten.sum.dim_IntList:
            return self._of_sum(arguments[0], arguments[1])
        return []

    def _of_sum(self, tensor: Tensor, dims: Sequence[int] | None) -> list[int]:
        """Return the buffers of a sum over the first axes of a tensor."""
        summed = sorted(axis % tensor.dim() for axis in dims or ())
        if not summed or summed != list(range(len(summed))) or len(summed) == tensor.dim():
            return []
        if not tensor.is_contiguous() or not tensor.is_floating_point() or not tensor.numel():
            return []
        columns = prod(tensor.shape[len(summed) :])
        return self.of_column_sums(tensor.numel() // columns, columns)

    def of_column_sums(self, rows: int, columns: int) -> list[int]:
        """Return the buffers of the sum of each column of a matrix.

        It is ``setReduceConfig`` of torch's ``aten/src/ATen/native/cuda/Reduce.cuh``, for a reduction whose fastest
        axis is kept. If few columns give too few threads, several blocks share a column. They write their sums to a
        buffer, and count in another one which of them is the last.
        """
        vector = next(size for size in (4, 2, 1) if columns % size == 0)
        threads = THREADS_PER_BLOCK // vector
        # The largest powers of two that are at most both sizes.
        wide, high = (min(1 << max(size.bit_length() - 1, 0), threads) for size in (columns // vector, rows))
        width = min(wide, WARP)
        height = min(high, threads // width)
        width = min(wide, threads // height)
        if rows < min(height * VALUES_PER_THREAD[0], VALUES_PER_THREAD[1]):
            return []  # Each warp sums other columns.
        values = -(-rows // height)
        grid = -(-(columns // vector) // width)
        target = self.multiprocessors * (THREADS_PER_MULTIPROCESSOR // (width * height))
        if values < VALUES_PER_THREAD[1] or grid > target:
            return []
        fewest, most = (-(-values // size) for size in reversed(VALUES_PER_THREAD))
        blocks = max(min(-(-target // grid), most), fewest)
        # Sums of 16-bit numbers are in fp32 until they are complete.
        return [4 * columns * blocks * width * vector, 4 * grid] if blocks > 1 else []

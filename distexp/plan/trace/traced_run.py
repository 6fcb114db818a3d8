"""The worker that is traced, its micro-batch, its DDP, and trainings that cannot be traced."""

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import parallel
from torch.nn.parallel import DistributedDataParallel

from distexp.config import Config, custom_code
from distexp.data.base import Batch, TaskData
from distexp.data.loader import PaddedDataset
from distexp.distributed.context import Context
from distexp.plan.replay import PlanError
from distexp.plan.trace.recorder import GPU
from distexp.plan.trace.zero12 import Assign, round_to_power_of_two
from distexp.strategies.ddp_reduction import MasterReduction, add_to_masters
from distexp.strategies.zero.ds_initialization import parameter_sizes
from distexp.system.torch_internals.tensors import fake_mode_errors
from distexp.system.units import MIB
from distexp.training.build import MAX_EPOCHS, lengths_of, token_counts, training_micro_batches


def traced_context(config: Config, rank: int = 0) -> Context:
    """Return a rank of the run, by default the first one, on the device of traced tensors."""
    cluster = config.cluster
    return Context(
        rank=rank,
        world_size=cluster.world_size,
        local_rank=0,
        workers_per_node=cluster.workers_per_node or 1,
        nodes=cluster.nodes,
        device=GPU,
        run_dir=Path(),
        tensor=config.parallel.tensor,
        slices=config.parallel.context,
        stages=config.parallel.pipeline,
    )


def make_copies_on_host(*, on_gpu: bool) -> Callable[..., saved_tensors_hooks]:
    """Return a ``torch.autograd.graph.save_on_cpu`` for traced tensors. Without a GPU it copies nothing."""

    def pack(tensor: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        size = round_to_power_of_two(tensor.numel() * tensor.element_size())  # as torch locks pages
        copy = partial(torch.empty, tensor.shape, dtype=tensor.dtype, device=GPU)
        return torch.empty(size, dtype=torch.uint8), copy

    def unpack(packed: tuple[Tensor, Callable[[], Tensor]]) -> Tensor:
        return packed[1]()

    def saved_on_cpu(*, pin_memory: bool) -> saved_tensors_hooks:
        return saved_tensors_hooks(pack, unpack) if on_gpu else saved_tensors_hooks(_unchanged, _unchanged)

    return saved_on_cpu


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


READ_BATCHES = 8  # micro-batches that are read and compared if the lengths of the samples are not known


def largest_batch(config: Config, data: TaskData) -> Batch:
    """Return the micro-batch of any rank with the most positions, and of those the one with the most targets."""
    samples = PaddedDataset(data.train)
    size = config.train.micro_batch
    if not config.model.traits.is_text:
        return data.collate([data.train[0]] * size)
    lengths, targets = token_counts(data.train)
    if lengths is None or targets is None:
        first = training_micro_batches(config, data.train, epochs=1)[:READ_BATCHES]
        batches = [data.collate([samples[index] for index in row]) for row in first.tolist()]
        return max(batches, key=lambda batch: (batch.num_positions, batch.num_targets))
    rows = training_micro_batches(config, data.train, epochs=MAX_EPOCHS)
    longest = torch.from_numpy(np.concatenate([lengths, lengths]))[rows].amax(dim=1)
    summed = torch.from_numpy(np.concatenate([targets, np.zeros_like(targets)]))[rows].sum(dim=1)
    worst = int((longest * (int(summed.max()) + 1) + summed).argmax())
    if getattr(data.collate, "length", 1) is not None and config.dataset.padding == "max_length":
        worst = int(summed.argmax())
    return data.collate([samples[index] for index in rows[worst].tolist()])


def has_padding(data: TaskData, batch: Batch) -> bool:
    """Return whether a batch of the training may have a masked token. Some batch has one if the lengths differ."""
    lengths, mask = lengths_of(data.train), batch.inputs.get("attention_mask")
    return mask is None or not bool(mask.all()) or (lengths is not None and lengths.min() < lengths.max())


IGNORED_MASKS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
"""Functions of ``transformers.masking_utils`` that leave out a mask which masks no token."""


@contextmanager
def without_padding() -> Iterator[None]:
    """Let transformers know that no token is masked. It reads that from values, which the masks of a trace lack."""
    masks = sys.modules.get("transformers.masking_utils")
    originals = {name: getattr(masks, name) for name in IGNORED_MASKS if hasattr(masks, name)}
    for name, original in originals.items():
        setattr(masks, name, partial(_without_mask, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(masks, name, original)


def _without_mask(decide: Callable[..., bool], _: Tensor | None, *arguments: Any) -> bool:
    return decide(None, *arguments)


@contextmanager
def without_layer_drop() -> Iterator[None]:
    """Let a model keep all of its layers. Those with layer drop decide by the value of a random number."""
    original = torch.rand

    def rand(*size: Any, **options: Any) -> Tensor:
        is_number = not options and tuple(size) in (((),), ([],))
        return torch.tensor(1.0) if is_number else original(*size, **options)

    torch.rand = rand
    try:
        yield
    finally:
        torch.rand = original


def evaluation_batch(config: Config, data: TaskData) -> Batch:
    """Return a batch of the evaluation with its longest samples; the first ones if the lengths are not known."""
    size = min(config.train.eval_batch_size or config.train.micro_batch, len(data.evaluation))
    lengths = lengths_of(data.evaluation)
    order = range(len(data.evaluation)) if lengths is None else np.argsort(-lengths, kind="stable").tolist()
    return data.collate([data.evaluation[index] for index in order[:size]])


def describe_failure(error: Exception) -> str:
    """Return why a model cannot be traced, with the line of the model that failed."""
    if type(error).__name__ == "UnsupportedOperatorException":  # Its text is an operator without such a kernel.
        reason = (
            f"its operator {error} computes only with values: give it a kernel for fake tensors with "
            "torch.library.register_fake"
        )
    elif isinstance(error, fake_mode_errors()):
        reason = (
            f"it computes shapes or decisions from values ({_first_line(error)}), for example by .item(), by `if` on a "
            "tensor, or by a mask as index"
        )
    else:
        reason = f"{type(error).__name__}: {_first_line(error)}"
    place = custom_code.code_place(error)
    return f"the model cannot be traced{f' at {place}' if place else ''}: {reason}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def count_parameters(config: Config) -> tuple[int | None, int | None]:
    """Return the number of parameters, and of trained ones, of a model built without weights; None if that fails."""
    from distexp.training.build import build_model, load_data

    # To decode all images takes minutes, and does not change the model.
    config = replace(config, dataset=replace(config.dataset, cache="none", num_workers=0))
    context = traced_context(config)
    try:
        model = build_model(config, load_data(config, context), context).model
    except Exception:  # Why it was not traced is known already.
        return None, None
    sizes, trained = parameter_sizes(model)
    return sum(sizes), sum(trained)


DEFAULT_BUCKET_MB, FIRST_BUCKET_MB = 25.0, 1.0
"""Sizes of DDP's buckets. The first one is smaller, unless ``bucket_cap_mb`` is set."""
BROADCAST_MB = 250  # size of the flat copies of weights that DDP sends from rank 0
AnyTensor = TypeVar("AnyTensor", bound=Tensor)


@dataclass
class Bucket:
    """The flat gradients of some parameters."""

    flat: Tensor
    views: dict[nn.Parameter, Tensor]
    ready: set[nn.Parameter] = field(default_factory=set)


class TracedDDP(DistributedDataParallel):
    """A module whose gradients are copied to buckets, as by DDP, but without communication.

    One bucket has all gradients at first. The first synchronized backward pass shows their order. The next forward pass
    starts with the allocation of the final buckets.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        assign: Assign,
        **options: Any,
    ) -> None:
        nn.Module.__init__(self)
        if options.get("find_unused_parameters"):
            raise PlanError(
                "ddp.find_unused_parameters=true cannot be traced: leave it out if all parameters have gradients"
            )
        self.module = module
        group = torch.distributed.group.WORLD
        assert group is not None
        self.process_group = group
        self._assign = assign
        self._limits = [(bucket_cap_mb or FIRST_BUCKET_MB) * MIB, (bucket_cap_mb or DEFAULT_BUCKET_MB) * MIB]
        self._as_views = gradient_as_bucket_view
        self._synchronizes, self._compresses = True, False
        self._state: MasterReduction | None = None
        self._order: list[nn.Parameter] = []
        self._sent: list[Tensor] = []
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._mark_ready)  # type: ignore[no-untyped-call]
        _broadcast([*module.parameters(), *module.buffers()])
        self._buckets = self._allocate(group_by_size(self._trained, [math.inf]))
        self._is_rebuilt = False

    def forward(self, *arguments: Any, **inputs: Any) -> Any:
        """Run the module."""
        if torch.is_grad_enabled() and self._order and not self._is_rebuilt:
            self._is_rebuilt = True
            self._buckets = []  # is freed before the final buckets are allocated
            self._buckets = self._allocate(group_by_size(self._order, self._limits))
        return self.module(*arguments, **inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without buckets, during the block."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Set which of the hooks of ``distexp.strategies.ddp_reduction`` is used."""
        self._state = state if isinstance(state, MasterReduction) else None
        self._compresses = "bf16" in hook.__name__

    def _get_ddp_logging_data(self) -> dict[str, str]:
        return {"comm_hook": "bf16" if self._compresses else "fp32"}

    def _mark_ready(self, parameter: Tensor) -> None:
        if not self._synchronizes or not isinstance(parameter, nn.Parameter):
            return
        if not self._is_rebuilt:
            self._order.append(parameter)
        bucket = next(candidate for candidate in self._buckets if parameter in candidate.views)
        view, gradient = bucket.views[parameter], parameter.grad
        assert gradient is not None
        with torch.no_grad():
            view.copy_(gradient)
        if self._as_views:
            parameter.grad = view
        bucket.ready.add(parameter)
        if len(bucket.ready) == len(bucket.views):
            bucket.ready.clear()
            self._reduce(bucket)
        if parameter is self._order[-1]:
            self._sent.clear()

    @torch.no_grad()
    def _reduce(self, bucket: Bucket) -> None:
        """Allocate what the hooks allocate for a bucket. Compressed gradients are kept until the end."""
        flat = bucket.flat
        if self._state is not None:
            masters = [self._state.weights.master_of(parameter) for parameter in bucket.views]
            known = [master for master in masters if master is not None]
            if len(known) == len(masters):
                flat = add_to_masters(known, list(bucket.views.values()), flat)
        if self._compresses:
            self._sent.append(flat.to(torch.bfloat16))

    @torch.no_grad()
    def _allocate(self, groups: list[list[nn.Parameter]]) -> list[Bucket]:
        buckets = []
        for group in groups:
            elements = sum(parameter.numel() for parameter in group)
            flat = torch.zeros(elements, dtype=group[0].dtype, device=group[0].device)
            views, offset = {}, 0
            for parameter in group:
                views[parameter] = flat.as_strided(parameter.shape, parameter.stride(), offset)
                offset += parameter.numel()
            buckets.append(Bucket(flat, views))
        self._assign("gradients", [bucket.flat for bucket in buckets])
        return buckets


@torch.no_grad()
def _broadcast(tensors: list[Tensor]) -> None:
    """Allocate what the broadcast of the weights from rank 0 allocates. Two flat copies are in use at a time."""
    sent: deque[Tensor] = deque(maxlen=2)
    for group in group_by_size(tensors, [BROADCAST_MB * MIB]):
        if len(sent) == sent.maxlen:
            sent.popleft()
        sent.append(torch.cat([gradient.flatten() for gradient in group]) if len(group) > 1 else group[0])


def group_by_size(tensors: Iterable[AnyTensor], limits: Sequence[float]) -> list[list[AnyTensor]]:
    """Return groups of tensors of one dtype. A group ends with the bytes of its limit; the last limit repeats."""
    left = list(limits)
    groups: list[list[AnyTensor]] = []
    open_groups: dict[torch.dtype, list[AnyTensor]] = {}
    for tensor in tensors:
        group = open_groups.setdefault(tensor.dtype, [])
        group.append(tensor)
        if sum(gradient.numel() * gradient.element_size() for gradient in group) >= left[0]:
            groups.append(open_groups.pop(tensor.dtype))
            del left[: len(left) - 1]
    return [*groups, *open_groups.values()]


@contextmanager
def traced_ddp(assign: Assign) -> Iterator[None]:
    """Replace DistributedDataParallel by TracedDDP, during the block."""
    module: Any = parallel
    original = module.DistributedDataParallel
    module.DistributedDataParallel = partial(TracedDDP, assign=assign)
    try:
        yield
    finally:
        module.DistributedDataParallel = original

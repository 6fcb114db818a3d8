"""DistributedDataParallel for fake tensors: the buckets of torch's reducer, without communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import parallel
from torch.nn.parallel import DistributedDataParallel

from distexp.plan.step_trace import PlanError
from distexp.strategies.ddp_reduction import MasterReduction, add_to_masters

MIB = 2**20
DEFAULT_BUCKET_MB, FIRST_BUCKET_MB = 25.0, 1.0
"""Sizes of DDP's buckets. The first one is smaller, unless ``bucket_cap_mb`` is set."""


@dataclass
class Bucket:
    """The flat gradients of some parameters."""

    flat: Tensor
    views: dict[nn.Parameter, Tensor]
    ready: set[nn.Parameter] = field(default_factory=set)


class TracedDDP(DistributedDataParallel):
    """A module whose gradients are copied to buckets, as by DDP.

    The first synchronized backward pass shows the order of the gradients. Afterwards the buckets are allocated, as DDP
    rebuilds its own then.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
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
        self._limits = [(bucket_cap_mb or FIRST_BUCKET_MB) * MIB, (bucket_cap_mb or DEFAULT_BUCKET_MB) * MIB]
        self._as_views = gradient_as_bucket_view
        self._synchronizes, self._compresses = True, False
        self._state: MasterReduction | None = None
        self._order: list[nn.Parameter] = []
        self._buckets: list[Bucket] = []
        self._sent: list[Tensor] = []
        self._trained = [each for each in module.parameters() if each.requires_grad]
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._mark_ready)  # type: ignore[no-untyped-call]

    def forward(self, *arguments: Any, **inputs: Any) -> Any:
        """Run the module."""
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
        if not self._buckets:
            self._order.append(parameter)
            if len(self._order) == len(self._trained):
                self._buckets = self._build()
            return
        bucket = next(each for each in self._buckets if parameter in each.views)
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
    def _build(self) -> list[Bucket]:
        groups: list[list[nn.Parameter]] = []
        limits = list(self._limits)
        open_groups: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._order:
            group = open_groups.setdefault(parameter.dtype, [])
            group.append(parameter)
            if sum(each.numel() * each.element_size() for each in group) >= limits[0]:
                groups.append(open_groups.pop(parameter.dtype))
                del limits[: len(limits) - 1]
        return [_make_bucket(group) for group in [*groups, *open_groups.values()]]


def _make_bucket(parameters: list[nn.Parameter]) -> Bucket:
    first = parameters[0]
    flat = torch.zeros(sum(each.numel() for each in parameters), dtype=first.dtype, device=first.device)
    views, offset = {}, 0
    for parameter in parameters:
        views[parameter] = flat.as_strided(parameter.shape, parameter.stride(), offset)
        offset += parameter.numel()
    return Bucket(flat, views)


@contextmanager
def traced_ddp() -> Iterator[None]:
    """Replace DistributedDataParallel by TracedDDP, during the block."""
    module: Any = parallel
    original = module.DistributedDataParallel
    module.DistributedDataParallel = TracedDDP
    try:
        yield
    finally:
        module.DistributedDataParallel = original

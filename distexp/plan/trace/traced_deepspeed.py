"""DeepSpeed for fake tensors: the model in DeepSpeed's precision, with the buffers of its ZeRO stage.

DeepSpeed itself reads values and needs its compiled operators, so it cannot run on fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distexp.config import Config
from distexp.data.base import Batch
from distexp.distributed.context import Context
from distexp.models.blueprint import Blueprint
from distexp.models.objective import loss_sum, partial_metrics
from distexp.models.transforms import training_entropy
from distexp.plan.trace import cuda_semantics, zero12
from distexp.plan.trace.recorder import StorageRecorder, tensors_in
from distexp.plan.trace.zero3_fetcher import Fetcher, Receiver
from distexp.plan.trace.zero12 import Buffers, Partitions
from distexp.runs.memory_trace import MOMENTS
from distexp.strategies.torch_model import DTYPES
from distexp.strategies.zero import ds_config, ds_initialization


class TracedDeepSpeed:
    """The forward pass, backward pass and update of ``DeepSpeedModel``, on fake tensors."""

    def __init__(self, blueprint: Blueprint, config: Config, context: Context, recorder: StorageRecorder) -> None:
        self.module = blueprint.model
        self.task, self.world_size = config.model.task, config.cluster.world_size
        self.entropy = training_entropy(config)
        self.cast_to = DTYPES[config.precision.name] if ds_initialization.in_16_bits(config) else None
        partitions = Partitions(config) if config.deepspeed.zero_stage == 3 else None
        initialize_weights(blueprint, self.cast_to or torch.float32, partitions)
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=ds_config.uses_autocast(config))
        buffers = Buffers.of(config, context.device, recorder.assign, recorder.empty_cache)
        self.zero = build_zero(self.module, config, buffers, partitions, context.rank)
        self.other_ranks: tuple[int, ...] = getattr(self.zero, "other_ranks", ())
        if self.cast_to is not None:
            restore_masters(self.module, context.device)
        recorder.assign("parameters", [*self.module.parameters(), *self.module.buffers()])

    def forward_backward(self, batch: Batch, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        """Run one micro-batch, as ``DeepSpeedModel.forward_backward`` does."""
        self.zero.is_last = last_micro
        outputs = self.forward(batch)
        loss = loss_sum(self.task, outputs, batch, self.entropy) / normalizer
        metrics = partial_metrics(self.task, outputs, batch, loss, normalizer)
        del outputs
        (loss * self.world_size).backward()  # type: ignore[no-untyped-call]
        self.zero.after_backward()
        return metrics

    def forward(self, batch: Batch) -> Any:
        """Return the outputs of the module."""
        with self.autocast:
            return self.module(**(batch.inputs if self.cast_to is None else batch.cast_inputs(self.cast_to)))

    def step(self, learning_rate: float) -> None:
        """Update the weights."""
        self.zero.step()


def build_zero(
    module: nn.Module, config: Config, buffers: Buffers, partitions: Partitions | None, rank: int = 0
) -> ZeroStage0 | zero12.ZeroOneTwo | ZeroThree:
    """Return the gradients and states of the stage of a configuration."""
    settings: dict[str, Any] = ds_config.effective_config(config, config.cluster.world_size)
    sizes, trained = ds_initialization.parameter_sizes(module)
    ds_config.fit_buckets(settings, sum(sizes), max(sizes), sum(trained))
    stage = settings["zero_optimization"]["stage"]
    if stage == 0:
        return ZeroStage0(module, config, settings, buffers)
    if partitions is None:
        return zero12.ZeroOneTwo(module, config, settings, buffers, rank)
    return ZeroThree(module, config, settings, buffers, partitions)


@torch.no_grad()
def initialize_weights(blueprint: Blueprint, dtype: torch.dtype, partitions: Partitions | None) -> None:
    """Materialize, convert and partition each module in turn, as ``ds_initialization.initialize_weights`` does."""
    for module in reversed(list(blueprint.model.modules())):
        blueprint.materialize(module, recurse=False)
        ds_initialization.cast_weights(module, dtype)
        if partitions is not None:
            partitions.add(module.parameters(recurse=False))


@torch.no_grad()
def restore_masters(module: nn.Module, device: torch.device) -> None:
    """Allocate as ``ds_initialization.restore_masters``: a weight in fp32, while the one before is there."""
    value = None
    for parameter in filter(lambda each: each.requires_grad, module.parameters()):
        value = torch.empty(parameter.shape, dtype=torch.float32, device=device)
    del value


class ZeroStage0:
    """Gradients and optimizer states of one rank without partitions.

    With fp16 it is ``FP16_UnfusedOptimizer``: torch's AdamW is not one of DeepSpeed's fused optimizers. It keeps fp32
    copies of the parameters. With bf16, distexp uses autocast over fp32 weights.
    """

    def __init__(self, module: nn.Module, config: Config, settings: dict[str, Any], buffers: Buffers) -> None:
        self.buffers, self.is_last, self.reduces = buffers, False, config.cluster.world_size > 1
        self.params = [param for param in module.parameters() if param.requires_grad]
        self.dtype = self.params[0].dtype
        self.states = [self._like(param) for param in self.params for _ in range(MOMENTS[config.train.optimizer])]
        if self.dtype != torch.float32:
            self.states += [self._like(param) for param in self.params]

    def _like(self, param: nn.Parameter, part: str = "optimizer_states") -> Tensor:
        return self.buffers.on_gpu(param.numel(), torch.float32, part)

    @torch.no_grad()
    def after_backward(self) -> None:
        """Reduce the gradients after the last micro-batch (``buffered_allreduce_fallback``)."""
        if not (self.is_last and self.reduces):
            return
        buckets = [0]
        for param in self.params:
            buckets[-1] += param.numel()
            if buckets[-1] > 500_000_000:  # MEMORY_OPT_ALLREDUCE_SIZE
                buckets.append(0)
        for elements in filter(None, buckets):
            self.buffers.use_briefly(elements, self.dtype, "communication")

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights with gradients in fp32."""
        if self.dtype != torch.float32:
            gradients = [self._like(param, "gradients") for param in self.params]
            del gradients
        for param in self.params:
            param.grad = None


class ZeroThree(zero12.ShardedOptimizer):
    """Parameters, gradients and optimizer states of one rank at stage 3.

    Names in comments are those of DeepSpeed 0.19.8, ``deepspeed/runtime/zero/stage3.py``.
    """

    def __init__(
        self, module: nn.Module, config: Config, settings: dict[str, Any], buffers: Buffers, partitions: Partitions
    ) -> None:
        super().__init__(module, config, settings, buffers)
        threshold = int(zero12.read_zero(settings, "stage3_param_persistence_threshold", 100_000))
        persistent = {param: None for param in module.parameters() if param.numel() <= threshold}
        limit = int(zero12.read_zero(settings, "sub_group_size", 1_000_000_000))
        divided = [zero12.cut_into_sub_groups([self._share(param) for param in group], limit) for group in self.groups]
        self.sub_groups = [(number, share) for number, shares in enumerate(divided) for share in shares]
        overlaps = zero12.read_zero(settings, "overlap_comm", True)  # It is true by default at stage 3.
        gather_stream, self.reduce_stream = (
            torch.cpu.Stream() if overlaps else torch.cpu.current_stream() for _ in range(2)
        )
        self.optimizer = cuda_semantics.make_optimizer(module, config)
        self.flat = self._defragment(partitions.shares)
        self.frozen = partitions.shares
        self._allocate_states(MOMENTS[config.train.optimizer])
        receiver = Receiver(buffers, self.dtype, self.world_size, self.offloads, gather_stream)
        self.fetcher = Fetcher(receiver, persistent, partitions.order, settings)
        self.fetcher.hook(module)
        self.bucket: list[nn.Parameter] = []
        self.oversized: dict[nn.Parameter, Tensor] = {}

    def _share(self, param: nn.Parameter) -> int:
        return zero12.share_of(param, self.world_size)

    @torch.no_grad()
    def _defragment(self, shares: dict[nn.Parameter, Tensor]) -> Tensor | None:
        """Replace the shares of the trained parameters by one tensor; None if they are on the host."""
        if self.offloads:
            return None
        for param in self.params:
            del shares[param]
        self.buffers.assign("parameters", shares.values())
        self.buffers.empty_cache()
        flat = self.buffers.on_gpu(sum(size for _, size in self.sub_groups), self.dtype, "parameters")
        if self.world_size == 1:  # A parameter is its share.
            offset = 0
            for param in self.params:
                param.data = flat.narrow(0, offset, param.numel()).view(param.shape)
                offset += param.numel()
            for param, share in shares.items():
                param.data = share.view(param.shape)
        return flat

    @torch.no_grad()
    def _allocate_states(self, moments: int) -> None:
        buffers, sizes = self.buffers, [size for _, size in self.sub_groups]
        self.states = self._allocate_on_host(moments) if self.offloads else []
        self.masters = [] if self.flat is None else self._masters(self.flat)
        if not self.offloads:
            buffers.use_briefly(max(sizes), torch.float32, "gradients")  # initialize_optimizer_states
        self.bucket_memory = buffers.on_gpu(self.bucket_size, self.dtype, "communication")
        self.gradients = buffers.with_states(sum(sizes), self.dtype, "gradients")  # grad_partitions_flat_buffer
        for group in self.optimizer.param_groups:
            group["params"] = []

    def _allocate_on_host(self, moments: int) -> list[Tensor]:
        states, allocate = [], self.buffers.with_states
        for _, size in self.sub_groups:
            states += [allocate(size, torch.float32, "optimizer_states", can_pin=False) for _ in range(1 + moments)]
            states.append(allocate(size, torch.float32, "gradients"))
            states.append(self.buffers.pinned_on_host(size, self.dtype, "parameters"))
        return states

    def _masters(self, flat: Tensor) -> list[nn.Parameter]:
        """Return the shares in fp32. They are converted, and the result is cloned (``_create_fp32_partitions``)."""
        masters, offset = [], 0
        for _, size in self.sub_groups:
            share = flat.narrow(0, offset, size)
            offset += size
            if self.dtype != torch.float32:
                converted = share.float()  # The one before is freed after this.
                share = converted.clone()
                self.buffers.assign("optimizer_states", [share])
            masters.append(nn.Parameter(share))
        return masters

    @torch.no_grad()
    def _on_gradient(self, param: Tensor) -> None:
        """Take a gradient (``reduce_independent_p_g_buckets_and_remove_grads``)."""
        assert isinstance(param, nn.Parameter)
        assert param.grad is not None
        elements = sum(gradient.numel() for gradient in self.bucket)
        if self.bucket and elements + param.numel() > self.bucket_size:
            self._reduce()
            elements = 0
        if elements + param.numel() > self.bucket_size:
            self.oversized[param] = param.grad
        self.bucket.append(param)
        param.grad = None

    def _reduce(self) -> None:
        """Reduce the bucket and add it to the share of this rank (``__reduce_and_partition_ipg_grads``)."""
        buffers = self.buffers
        with torch.cpu.stream(self.reduce_stream):
            interleaved = None
            if len(self.bucket) > 1 or self.bucket[0].numel() % self.world_size:
                elements = sum(self._share(param) * self.world_size for param in self.bucket)
                interleaved = buffers.on_gpu(elements, self.dtype, "communication")
            for param in self.bucket if self.offloads else ():
                part = buffers.on_gpu(self._share(param), self.dtype, "temporaries")
                if self.is_last:
                    # A norm reads so many elements at a time (``_constant_buffered_norm2``).
                    buffers.use_briefly(min(self._share(param), 250_000_000), torch.float64)
                    buffers.use_briefly(self._share(param), torch.float32)
                del part
            del interleaved
        self.bucket, self.oversized = [], {}

    @torch.no_grad()
    def after_backward(self) -> None:
        """Finish a micro-batch (``independent_gradient_partition_epilogue``)."""
        if self.bucket:
            self._reduce()

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights, one sub-group after the other."""
        self.fetcher.release_all()
        if self.dtype == torch.float16:
            # DeepSpeed looks for infinite gradients where they are: ``isinf`` copies them, and makes a bool for each.
            with torch.cpu.stream(self.reduce_stream):
                elements = self.gradients.numel()
                copied = self.buffers.with_states(elements, self.dtype, "temporaries", can_pin=False)
                infinite = self.buffers.with_states(elements, torch.bool, "temporaries", can_pin=False)
                del copied, infinite
        if not self.offloads:
            self._update()
        self.fetcher.gather_persistent()

    def _update(self) -> None:
        for param in self.params:  # get_grad_norm_direct
            self.buffers.use_briefly(self._share(param), torch.float64)
        for (number, size), master in zip(self.sub_groups, self.masters, strict=True):
            flat = self.buffers.on_gpu(size, self.dtype, "gradients")
            master.grad = flat.float()
            del flat
            self.buffers.assign("gradients", [master.grad])
            self.optimizer.param_groups[number]["params"] = [master]
            self.optimizer.step()
            self.optimizer.param_groups[number]["params"] = []
            self.buffers.assign("optimizer_states", tensors_in(self.optimizer.state[master]))
            master.grad = None

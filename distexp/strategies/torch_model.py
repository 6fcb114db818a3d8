"""The DistributedModel of single, DDP and FSDP, which differ only in how they wrap the module."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel.distributed import DistributedDataParallel

from distexp.config import WHOLE_MODEL, Config, ConfigError
from distexp.config.custom_code import check_returned, code_place
from distexp.data.base import Batch
from distexp.distributed.context import Context
from distexp.distributed.process_group import broadcast_buffers, gather_to_all
from distexp.models.blueprint import frozen_names, persistent_buffers
from distexp.models.objective import loss_sum, partial_metrics
from distexp.models.transforms import explained_compilation, training_entropy
from distexp.runs.record_sections import Built
from distexp.strategies import optimizer as optimizers
from distexp.strategies.base import load_strategy
from distexp.strategies.ddp_reduction import StepWeights
from distexp.strategies.parallel.context import shared_rows
from distexp.strategies.parallel.tensor import fused_rows, in_original_order
from distexp.system.torch_internals.collectives import ddp_communication_dtype
from distexp.system.torch_internals.tensors import active_autocast_dtype

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Distribution:
    """How a module is distributed over the workers; the fields are those of Built."""

    wrapper: str
    mesh: list[int]
    sharded_units: int = 0
    tensor: int = 1  # workers that share each layer
    expert: int = 1  # workers that share the experts of each layer
    offload: str = "none"
    compute_dtype: torch.dtype | None = None  # if the wrapper casts, instead of autocast
    blocks_per_unit: int | None = None  # of FSDP
    communication_dtype: torch.dtype | None = None  # in which gradients are sent


class Missing(Protocol):
    """What finds parameters without a gradient, see ``distexp.strategies.fsdp_units``."""

    def record(self, loss: Tensor) -> None:
        """Look at a micro-batch before its backward pass."""

    def remove(self) -> None:
        """Remove gradients before the update."""


class TorchModel:
    """Forward pass, backward pass and optimizer step of a wrapped PyTorch module.

    ``sync_context`` gets ``last_micro``, and returns the context of a micro-batch: gradients are reduced only if it is
    true. FSDP casts by its own policy, and copies as ``weights`` are in place of ``autocast``.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        context: Context,
        *,
        sync_context: Callable[[bool], AbstractContextManager[Any]],
        autocast: bool,
        distribution: Callable[[], Distribution],
        weights: StepWeights | None = None,
        missing: Missing | None = None,
    ) -> None:
        self.module, self.missing = module, missing
        self.device = context.device
        self.strategy = config.strategy.name
        self.task, self.entropy = config.model.task, training_entropy(config)
        self.averaged, self.tensor = context.world_size // context.tensor, context.tensor
        self.clipping = config.train.gradient_clipping
        self.sync_context = sync_context
        self.copies = weights
        self.reduces_masters = isinstance(module, DistributedDataParallel)  # by MasterReduction
        self.compiled = config.train.compiled
        self.only_trained = config.adapter.freezes_model  # in checkpoints and exported weights
        dtype = DTYPES[config.precision.outside_products]
        needs_autocast = autocast and weights is None and dtype != torch.float32
        self.autocast = torch.autocast(context.device.type, dtype, enabled=needs_autocast)
        # A single micro-batch leaves its gradients to the update, in place of collecting them.
        self.collects = not (config.train.fused_update and config.train.gradient_accumulation_steps == 1)
        with self._masters():
            self.optimizer = self._build_optimizer(config)
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=config.precision.name == "fp16")
        self.distribution = distribution
        if self.compiled == "graphs":
            self._allocate_gradients()

    def _masters(self) -> AbstractContextManager[None]:
        """Return the context in which the module has the weights that the optimizer updates."""
        return nullcontext() if self.copies is None else self.copies.masters()

    def _build_optimizer(self, config: Config) -> torch.optim.Optimizer:
        if config.train.fused_update:
            return optimizers.fused_adamw(self.module, config.train, self.copies)
        # torch's fused kernel runs on the GPU, but offloaded shards are on the CPU.
        fused = self.device.type == "cuda" and not config.offload.enabled
        return optimizers.build_optimizer(self.module, config.train, fused=fused)

    def _allocate_gradients(self) -> None:
        """Allocate gradients that live as long as the model.

        Autograd then adds to them. Otherwise the gradient of the first micro-batch would be a tensor of the CUDA graph,
        which the next replay overwrites.
        """
        for parameter in self.module.parameters():
            has_copy = self.copies is not None and self.copies.master_of(parameter) is not None
            if parameter.requires_grad and not has_copy:
                parameter.grad = torch.zeros_like(parameter)

    def forward_backward(self, batch: Batch, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        """Run one micro-batch, accumulate its gradients, return its share of the metrics."""
        with self.sync_context(last_micro):
            outputs = self._call(self.module, batch)
            loss = loss_sum(self.task, outputs, batch, self.entropy) / normalizer
            metrics = partial_metrics(self.task, outputs, batch, loss, normalizer)
            del outputs  # Frees the logits, which are large and not needed in the backward pass.
            if self.missing is not None:
                self.missing.record(loss)
            # Gradients are averaged over the ranks, but the normalizer requires their sum.
            self.scaler.scale(loss * self.averaged).backward()  # type: ignore[no-untyped-call]
        if self.copies is not None and self.collects and not (last_micro and self.reduces_masters):
            self.copies.collect_gradients()
        return metrics if self.tensor == 1 else metrics / self.tensor  # The workers that share layers have the same.

    def _call(self, module: nn.Module, batch: Batch) -> Any:
        """Return the outputs of a module in the precision of the training."""
        inputs = batch.inputs if self.copies is None else batch.cast_inputs(self.copies.dtype)
        if self.compiled not in WHOLE_MODEL:
            with self.autocast:
                return module(**inputs)
        if self.compiled == "graphs":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with self.autocast, explained_compilation(self.compiled):
            return module(**inputs)

    def step(self, learning_rate: float) -> Tensor:
        """Clip, update the weights, clear the gradients; return the norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.missing is not None:
            self.missing.remove()
        norm = self._update()
        self.optimizer.zero_grad(set_to_none=self.compiled != "graphs")
        if self.copies is not None:
            self.copies.free_gradients()
        return norm

    def _update(self) -> Tensor:
        """Clip, update the weights and their copies; return the norm before clipping."""
        if isinstance(self.optimizer, optimizers.FusedAdamW):
            return self.optimizer.clip_and_step(self.clipping)
        self.scaler.unscale_(self.optimizer)
        norm = self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.copies is not None:
            self.copies.refresh()
        return norm

    def _clip(self) -> Tensor:
        """Clip the gradients; return the norm before."""
        return optimizers.clip_gradients(optimizers.trained_parameters(self.optimizer), self.clipping)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Any:
        """Return the outputs of the module in the precision of the training.

        The wrapper of DDP is left out. Without gradients it would only broadcast buffers, which all ranks have when an
        evaluation starts, and torch does not keep the graphs that it compiles inside of DDP.
        """
        return self._call(_unwrapped(self.module), batch)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter and buffer, unsharded, on this rank's device; a collective."""
        with self._masters():
            yield from unsharded_weights(self.module, self.device, only_trained=self.only_trained)

    @property
    def checkpoint_format(self) -> str:
        """Return the format, which does not depend on the number of workers. With fp16 it includes the loss scale."""
        adapters = ", adapters only" if self.only_trained else ""
        if fused_rows(self.module):  # Their rows are in the order of these workers.
            adapters += f", parallel.tensor={self.tensor}"
        if hasattr(self.optimizer, "block_size"):  # Each worker quantizes the states of its shards.
            adapters += f", states in 8 bits, shards={self.distribution().mesh[1]}"
        return "torch" + (" with a loss scale" if self.scaler.is_enabled() else "") + adapters

    def _state(self) -> dict[str, Any]:
        """Return model and optimizer state; the shards are DTensors."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        with self._masters():
            model, optimizer = get_state_dict(self.module, self.optimizer)
            for name in frozen_names(_unwrapped(self.module)) if self.only_trained else ():
                model.pop(name)
        scaler = {"scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else {}
        return {"model": model, "optimizer": optimizer, **scaler}

    def save(self, folder: Path) -> None:
        """Write weights, optimizer state and loss scale with torch.distributed.checkpoint."""
        from torch.distributed.checkpoint.state_dict_saver import save

        broadcast_buffers(self.module)  # because any rank may write them
        optimizers.add_missing_states(self.optimizer)
        save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Read this rank's part of a checkpoint that any number of ranks wrote."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        from distexp.system.restricted_loading import DataReader

        if self.compiled == "graphs":
            self.module.zero_grad(set_to_none=True)  # torch loads no state of an optimizer that has gradients
        fused = self.optimizer.param_groups[0].get("fused")
        with optimizers.keep_hyperparameters(self.optimizer):
            state = self._state()
            load(state, storage_reader=DataReader(folder))
            with self._masters():
                set_state_dict(
                    self.module,
                    self.optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                    options=StateDictOptions(strict=not self.only_trained),
                )
        optimizers.restore_kernel(self.optimizer, fused=fused)
        if self.copies is not None:
            self.copies.refresh()
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        if self.compiled == "graphs":
            self._allocate_gradients()

    def describe(self) -> Built:
        """Return what was built, read from the live objects."""
        autocast_dtype, distribution = active_autocast_dtype(self.autocast), self.distribution()
        check_returned(distribution, Distribution, "distribution() of the strategy")
        with self._masters():
            built = describe(self.module, self.optimizer, distribution, autocast_dtype, strategy=self.strategy)
        if self.copies is not None:
            built.compute_weights, built.compute_dtype = "step", dtype_name(self.copies.dtype)
        elif autocast_dtype is not None:
            built.compute_weights = "autocast"
        if any(type(part).__name__ == "Float8Linear" for part in self.module.modules()):
            built.compute_dtype += ", products in float8"
        return built


@torch.no_grad()
def unsharded_weights(
    module: nn.Module, device: torch.device, *, only_trained: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and full value of each parameter, or each trained one, and persistent buffer; a collective."""
    cut, own = pipeline_cut(module), _own_weights(_unwrapped(module), device, only_trained=only_trained)
    yield from own if cut is None else cut.whole(own, device)


def pipeline_cut(module: nn.Module) -> Any:
    """Return the ``PipelineCut`` of a model whose other stages are on other workers; None without stages."""
    return getattr(module, "pipeline_cut", None)


def _own_weights(unwrapped: nn.Module, device: torch.device, *, only_trained: bool) -> Iterator[tuple[str, Tensor]]:
    skipped, orders = frozen_names(unwrapped) if only_trained else set(), fused_rows(unwrapped)
    # After an evaluation some are still gathered, and with mixed precision these are copies in 16 bits.
    from torch.distributed.fsdp import FSDPModule

    for part in unwrapped.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    for name, tensor in [*unwrapped.named_parameters(), *persistent_buffers(unwrapped)]:
        if name in skipped:
            continue
        # Offloaded shards are on the CPU; they are gathered on the device of the process group.
        local = tensor.detach().to(device)
        whole = local.full_tensor() if isinstance(local, DTensor) else local
        yield name, in_original_order(whole, orders.get(name)).contiguous()


def check_equal_use(names: list[str], hint: str) -> None:
    """Check that all workers use the same parameters or modules; a collective. Raise ConfigError if they do not.

    Sharded gradients would be reduced with those of other parameters, and the workers would hang, crash, or train
    nonsense.
    """
    everywhere: list[set[str]] = [set(each) for each in gather_to_all(names)]
    common = everywhere[0].intersection(*everywhere)
    if differing := sorted(everywhere[0].union(*everywhere) - common):
        raise ConfigError(
            f"only some workers use {differing[0]}, for example because no token chose an expert. {hint} "
            "strategy=ddp ddp.find_unused_parameters=true"
        )


def _unwrapped(module: nn.Module) -> nn.Module:
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inner


def read_ddp_distribution(wrapped: DistributedDataParallel) -> Distribution:
    """Return how DDP distributed a model, read from its wrapper."""
    return Distribution(
        type(wrapped).__name__,
        mesh=[wrapped.process_group.size(), 1],
        communication_dtype=ddp_communication_dtype(wrapped),
    )


def describe(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    distribution: Distribution,
    autocast_dtype: torch.dtype | None,
    *,
    strategy: str,
    engine: str = "native",
) -> Built:
    """Return what was built of a PyTorch module, read from the live objects."""
    parameters = list(module.parameters())
    return Built(
        strategy=strategy,
        engine=engine,
        wrapper=distribution.wrapper,
        world_size=dist.get_world_size(),
        mesh=distribution.mesh,
        tensor=distribution.tensor,
        expert=distribution.expert,
        context=shared_rows(module),
        sharded_units=distribution.sharded_units,
        zero_stage=None,
        offload=distribution.offload,
        param_dtype=dtype_name(parameters[0].dtype),
        compute_dtype=dtype_name(distribution.compute_dtype or autocast_dtype or parameters[0].dtype),
        optimizer=type(optimizer).__name__,
        parameters=sum(p.numel() for p in parameters),
        trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        blocks_per_unit=distribution.blocks_per_unit,
        communication_dtype=dtype_name(distribution.communication_dtype) if distribution.communication_dtype else None,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, for example ``float32``."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def explained_model_errors(model: nn.Module, config: Config) -> Iterator[None]:
    """Raise ConfigError, which names the key that helps, if a model does what its strategy does not support."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        place = f" ({place})" if (place := code_place(error)) else ""
        name = type(getattr(model, "module", model)).__name__.removeprefix("FSDP")
        known = [text for pattern, text in MODEL_ERRORS.items() if pattern in str(error)]
        reason = known[0].format(model=name, place=place) if known else _mixed_types(model, config, error)
        if not reason:
            raise
        raise ConfigError(reason) from error


_OUTSIDE_OF_FORWARD = (
    "{model} uses weights of a block outside of its forward pass{place}: it calls another method of the block, uses "
    "a weight of another module, or changes an input or output in place. FSDP has freed these weights. Use "
    "fsdp.wrap=none, which shards the model as one unit, or strategy=ddp"
)
MODEL_ERRORS = {
    "Expected to have finished reduction in the prior iteration": (
        "some parameters of {model} had no gradient, because they do not contribute to the loss. DDP waits for the "
        "gradients of all: add ddp.find_unused_parameters=true"
    ),
    **dict.fromkeys(("got mixed torch.Tensor", "storage of size 0", "RegisterPostBackward"), _OUTSIDE_OF_FORWARD),
    "is shared with a parameter already managed by another FSDP group": (
        "{model} uses one weight in several of its modules, which are sharded one by one: use fsdp.wrap=none and "
        "engine=native, or strategy=ddp"
    ),
    "tracing error at step": (
        "{model} computes its modules in another order than in the step before, which DeepSpeed does not "
        "support at stage 3: use zero_stage=2, or sharding=full_shard"
    ),
}
"""What a model does that a strategy does not support, by a part of the message of torch or DeepSpeed."""


def _mixed_types(model: nn.Module, config: Config, error: Exception) -> str:
    """Return why an operand has another type than the cast weights; empty if the model has no buffers in fp32.

    FSDP, DeepSpeed and ``train.compute_weights=step`` cast weights only. A buffer in fp32 that the model adds to
    activations makes these fp32, and the next layer refuses them.
    """
    casts = load_strategy(config).casts_weights(config) or config.train.compute_weights == "step"
    names = [name for name, buffer in model.named_buffers() if buffer.dtype == torch.float32]
    other_types = re.compile(r"same dtype|mixed dtype|expected scalar type|should be the same")
    if not casts or not names or not other_types.search(str(error)):
        return ""
    shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    return (
        f"the weights are cast to {config.precision.name}, but not the buffers of the model ({shown}), and torch "
        f"refuses to combine them: {str(error).splitlines()[0]}. In forward, cast a buffer to the type of the "
        "activations, as in x + self.table.to(x.dtype). Or choose precision=fp32, or autocast: strategy=ddp "
        "train.compute_weights=autocast"
    )

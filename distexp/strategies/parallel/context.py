"""Context parallelism (Ulysses): the workers of a group share the tokens of each row, and swap them for heads.

Each worker has whole rows of tokens, masks and positions, and all weights. Before the first block it keeps a slice of
the hidden states. In each attention the workers exchange data: each one gets all tokens of some heads, and afterwards
its own tokens of all heads. So masks, packed rows, ALiBi and rotary embeddings are those of whole rows. Each worker
computes the logits and the loss of its slice. Its gradients are a part of a sum, as those of a worker with other rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distexp.config import Config, ConfigError
from distexp.data.base import TokenSlice
from distexp.distributed.context import Context
from distexp.models.dropout import dropout_rates, zero_hint
from distexp.models.head import HeadForward
from distexp.models.transforms import find_blocks
from distexp.strategies.parallel.checks import CONTEXT_TYPES
from distexp.strategies.parallel.tensor import hidden_of, with_hidden

ULYSSES = "sdpa_ulysses"
"""Name of the attention in transformers."""

WHOLE = "parallel.context=1"

OTHER_HEADS = ("classifier_dropout", "summary_first_dropout")
"""Dropout rates in the configurations of causal models that are those of heads for other tasks."""


def shared_tokens(context: Context) -> TokenSlice:
    """Return the tokens of a worker."""
    return TokenSlice(context.rank // context.tensor % context.slices, context.slices)


class _AllToAll(torch.autograd.Function):
    """Send the n-th part along the first axis to the n-th worker; return the parts of all workers for this one."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: Any) -> Tensor:
        """Return the received parts."""
        ctx.group = group
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return each gradient to the worker that sent the part."""
        return _AllToAll.apply(gradient.contiguous(), ctx.group), None  # type: ignore[no-untyped-call]


class Exchange:
    """The exchange of tokens for heads between the workers of a group, in the attentions of one model."""

    def __init__(self, own: TokenSlice, group: Any, blocks: int) -> None:
        self.own, self.group, self.blocks = own, group, blocks
        self.length = 0  # tokens of a row in this forward pass
        self.calls = 0  # attentions in this forward pass

    def attend(self, plain: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Compute an attention with all tokens of some heads; return the own tokens of all heads.

        The first inputs are query, key and value of the own tokens, shape (batch, heads, tokens, width), and a mask of
        whole rows. The output has the shape of the query.
        """
        self.calls += 1
        query, key, value, mask, *others = inputs
        heads = query.shape[1]
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == heads > 1:
            mask = mask[:, self.own.of(heads)]
        return self._to_tokens(plain(*self._to_heads(query, key, value), mask, *others))

    def attend_in_transformers(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Compute the SDPA of transformers, whose output has the shape (batch, tokens, heads, width)."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            mixed: Tensor = sdpa_attention_forward(module, query, key, value, mask, **options)[0]
            return mixed.transpose(1, 2)

        mixed = self.attend(plain, query, key, value, attention_mask)
        return mixed.transpose(1, 2).contiguous(), None

    def _to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return some heads of all tokens, of each tensor; one collective for all of them."""
        parts = [torch.stack(each.chunk(self.own.workers, dim=1)) for each in tensors]
        received = self._exchange(torch.cat(parts, dim=2))  # (workers, batch, heads, own tokens, width)
        whole = received.movedim(0, 2).flatten(2, 3)
        return torch.split(whole, [part.shape[2] for part in parts], dim=1)

    def _to_tokens(self, mixed: Tensor) -> Tensor:
        """Return the own tokens of all heads."""
        received = self._exchange(torch.stack(mixed.chunk(self.own.workers, dim=2)))
        return received.movedim(0, 1).flatten(1, 2)

    def _exchange(self, parts: Tensor) -> Tensor:
        received: Tensor = _AllToAll.apply(parts, self.group)  # type: ignore[no-untyped-call]
        return received

    def start(self, module: nn.Module, arguments: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        """Keep the own tokens before the first block."""
        hidden = hidden_of(arguments, inputs)
        self.length, self.calls = hidden.shape[1], 0
        return with_hidden(hidden[:, self.own.of(self.length)].clone(), arguments, inputs)  # FSDP expects no view

    def cut_positions(self, module: nn.Module, arguments: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        """Give a block the rotary embeddings of its tokens, which are applied before the attention."""
        own = self.own.of(self.length)
        if (rotary := inputs.get("position_embeddings")) is not None:
            inputs = {**inputs, "position_embeddings": tuple(each[..., own, :] for each in rotary)}
        return arguments, inputs

    def end(self, module: nn.Module, arguments: Any, outputs: Any) -> None:
        """Check that each block had an attention that exchanges its heads. Others would see a slice only."""
        if self.calls != self.blocks:
            raise ConfigError(
                f"parallel.context={self.own.workers}: only {self.calls} of {self.blocks} blocks use an attention that "
                f"can exchange heads: use {WHOLE}"
            )


def share_tokens(model: nn.Module, config: Config, context: Context) -> None:
    """Let a model compute a slice of the tokens of each row, and exchange heads in its attentions; a collective.

    Raise ConfigError if the model does not support that.
    """
    from torch.distributed.device_mesh import init_device_mesh

    typed = f"parallel.context={context.slices}"
    rates = {name: rate for name, rate in dropout_rates(model).items() if name not in OTHER_HEADS}
    for name, rate in rates.items():
        raise ConfigError(
            f"{typed} does not support dropout, because workers with the same rows would drop the same units of other "
            f"tokens, but {type(model).__name__} has {name}={rate:g}: {zero_hint(config.model, name)}"
        )
    blocks = [block for _, block in find_blocks(model, needed_for=typed, alternative=WHOLE)]
    shape = (context.data_parallel, context.slices, context.tensor)
    mesh = init_device_mesh(context.device.type, shape, mesh_dim_names=("data", "context", "tensor"))
    exchange = Exchange(shared_tokens(context), mesh.get_group("context"), len(blocks))
    own: list[Any] = [module for block in blocks for module in block.modules() if hasattr(module, "attend")]
    for module in own:
        module.attend = partial(exchange.attend, module.attend)
    if not own:
        _use_in_transformers(model, exchange, typed)
    model.shared_rows = context.slices  # type: ignore[assignment]
    blocks[0].register_forward_pre_hook(exchange.start, with_kwargs=True)
    for block in blocks:
        block.register_forward_pre_hook(exchange.cut_positions, with_kwargs=True)
    blocks[-1].register_forward_hook(exchange.end)
    for part in model.modules():
        if isinstance(forward := vars(part).get("forward"), HeadForward):
            forward.own = exchange.own


def _use_in_transformers(model: nn.Module, exchange: Exchange, typed: str) -> None:
    """Let the attentions of a model of transformers exchange heads, by its interface for attention functions."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    config: Any = getattr(model, "config", None)
    kind, attention = getattr(config, "model_type", None), getattr(config, "_attn_implementation", None)
    if kind not in CONTEXT_TYPES or attention != "sdpa":
        raise ConfigError(
            f"{typed} is not supported by {type(model).__name__} with the attention {attention}: use "
            f"model.attention=sdpa and one of {', '.join(CONTEXT_TYPES)}, or {WHOLE}"
        )
    AttentionInterface.register(ULYSSES, exchange.attend_in_transformers)
    AttentionMaskInterface.register(ULYSSES, sdpa_mask)
    config._attn_implementation = ULYSSES


def shared_rows(module: nn.Module) -> int:
    """Return how many workers share the tokens of each row, read from the live model."""
    return int(getattr(getattr(module, "module", module), "shared_rows", 1))

"""Masks of causal attention, ALiBi, and flex attention. Rows may contain several documents, kept apart.

Padding is on the right. No target attends to it, so it needs no mask.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from distexp.config import ConfigError
from distexp.data.base import POSITIONS
from distexp.models.blueprint import check_forward_arguments
from distexp.models.objective import get_logits

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of score, batch, head, query and key that returns the changed score."""

HOPPER_BLOCKS = {
    **{"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3},
    **{"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32},
    **{"bwd_num_warps": 4, "bwd_num_stages": 3},
}
"""Queries and keys that a program of flex attention handles at a time, for heads of width 64 on H100 and H200.

They were the fastest ones on an H200 with a length of 512.
"""

Made = TypeVar("Made", bound=Callable[..., Any])
_caches: list[Any] = []


def cached(function: Made) -> Made:
    """Return a function that makes a mask or a score once for equal arguments, until ``clear_caches`` is called."""
    found = lru_cache(maxsize=8)(function)
    _caches.append(found)
    return cast("Made", found)


def clear_caches() -> None:
    """Remove all masks and scores from the caches. After a trace they contain tensors of an ended fake mode."""
    for function in _caches:
        function.cache_clear()


def number_documents(position_ids: Tensor) -> Tensor:
    """Return the number of the document at each position, shape (batch, length)."""
    return (position_ids == 0).cumsum(dim=1)


def causal_mask(length: int, device: torch.device, documents: Tensor | None) -> Tensor:
    """Return a mask that is True if a query may attend to a key, shape (length, length).

    With several documents in a row, from ``number_documents``, it has the shape (batch, 1, length, length).
    """
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal if documents is None else causal & (documents[:, None, :, None] == documents[:, None, None, :])


def alibi_bias(slopes: Tensor, allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ALiBi with a causal mask as the additive mask of SDPA, shape (1 or batch, heads, length, length).

    The slopes have the shape (heads,), and ``allowed`` is a ``causal_mask``.
    """
    positions = torch.arange(allowed.shape[-1], device=allowed.device)
    distance = positions[None, :] - positions[:, None]
    bias = (slopes[:, None, None] * distance).masked_fill(~allowed, float("-inf"))
    return bias.to(dtype).view(-1, len(slopes), *distance.shape)


def alibi_score(slopes: Tensor) -> ScoreFunction:
    """Return ALiBi as the score function of flex attention."""

    def add_bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + slopes[head] * (key - query)

    return add_bias


def block_mask(length: int, device: torch.device, documents: Tensor | None) -> BlockMask:
    """Return the mask of ``causal_mask`` for flex attention."""
    if documents is not None:

        def is_allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (documents[batch, query] == documents[batch, key])

        return create_block_mask(is_allowed, len(documents), None, length, length, device=str(device))
    # A compiled model contains the mask, and dynamo warns about caches.
    make = _causal_block_mask if torch.compiler.is_compiling() else _cached_causal_block_mask
    return make(length, device)


def _causal_block_mask(length: int, device: torch.device) -> BlockMask:
    def is_causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(is_causal, None, None, length, length, device=str(device))


_cached_causal_block_mask = cached(_causal_block_mask)


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, score: ScoreFunction | None = None
) -> Tensor:
    """Return the output of flex attention, compiled to save memory, shape (batch, heads, length, head size)."""
    # In a compiled model it is a part of the graph.
    compiled = None if torch.compiler.is_compiling() else compiled_flex_attention(query.device)
    function: Any = compiled or flex_attention
    output: Tensor = function(
        query, key, value, score_mod=score, block_mask=mask, kernel_options=_kernel_options(query)
    )
    return output


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types here
def _gpu_generation(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU; None for another device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else None


def _kernel_options(query: Tensor) -> dict[str, Any]:
    """Return the options of flex attention's kernels: block sizes, if those of torch were measured to be slower.

    Below a length of 128, torch uses another kernel, with sizes that depend on the length.
    """
    length, width = query.shape[-2:]
    is_measured = width == 64 and length >= 128
    return HOPPER_BLOCKS if is_measured and _gpu_generation(query.device) == (9, 0) else {}


def compiled_flex_attention(device: torch.device) -> Any:
    """Return compiled flex attention; None on a CPU, because torch does not compile it for training there.

    ``distexp.plan.trace.compiled`` replaces this function.
    """
    return None if device.type == "cpu" else _compiled_flex_attention()


@lru_cache(maxsize=1)
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention)


def check_packing(model: nn.Module) -> None:
    """Check that a model takes packed rows.

    A model of transformers is tried: a small one of its class, with one layer of each kind, computes a row of two
    samples. The logits of the second must be those without the first. Raise ConfigError if its ``forward`` has no
    ``position_ids``, or it mixes the samples.
    """
    check_forward_arguments(model, ("input_ids", POSITIONS))
    if not hasattr(model, "config") or hasattr(model, "attention_implementation"):
        return  # the models of distexp support packing, and a custom model declares it by its arguments
    if not _separates_samples(model):
        raise ConfigError(
            f"dataset.packing=true is not supported by {type(model).__name__}, because it mixes the samples of a row: "
            "use dataset.bucketing=true"
        )


def _separates_samples(model: Any) -> bool:
    """Return whether a small copy of a model of transformers keeps two samples apart."""
    row, positions = torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            small = type(model)(_shrink(model.config)).float().eval()
            for parameter in small.parameters():
                nn.init.normal_(parameter, std=0.2)
            packed = get_logits(small(input_ids=row, position_ids=positions))[:, 4:]
            expected = get_logits(small(input_ids=row[:, 4:]))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False  # an architecture that has no such small copy is not supported
    return torch.allclose(packed, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def _shrink(config: Any) -> Any:
    """Return the configuration of a model with few tokens and one layer of each kind."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    if kinds:
        text.layer_types = kinds
    text.num_hidden_layers, text.vocab_size = max(len(kinds), 1), 8  # the row has the tokens 1 to 7
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(text, name, 0)
        with suppress(Exception):  # Some types of models take no null.
            setattr(text, name, None)
    text.use_cache = False  # with a cache, transformers does not look for several samples in a row
    small._attn_implementation = "eager"
    return small

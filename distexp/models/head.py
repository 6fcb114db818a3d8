"""The output head of a causal LM, extended for ``train.logits=targets`` and ``train.loss=chunked``.

Only ``forward`` of the model and of its head are replaced, so names and parameters stay. The head selects tokens and
computes the loss inside its own forward pass. There its weight is whole, also with FSDP and ZeRO-3.

Everything that the model does before its head is unchanged. What it does with the logits afterwards is applied to the
selected ones. A chunked loss has no logits. So a constant is sent through the same operations, and the run stops if
they change it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from distexp.config import ConfigError, TrainConfig
from distexp.data.base import TARGET_LABELS, TARGET_POSITIONS, TokenSlice
from distexp.models.objective import AUX_LOSS, LOSS_SUM, get_logits, linear_cross_entropy, next_labels
from distexp.system.torch_internals.tensors import has_values

CONSTANT = 4096.5
"""A value that is exact in fp32 and in no 16-bit type, and larger than any cap of logits."""


@dataclass
class HeadRequest:
    """What the forward pass of a model requests from its head."""

    shape: tuple[int, ...] = ()  # batch and length of the inputs
    positions: Tensor | None = None  # tokens to select, as indices into batch x length; None: all
    labels: Tensor | None = None  # labels of the selected tokens, shape (batch, length); None: return logits
    # Calls of the head. It is a dict, because dynamo of torch 2.13 loses changes of attributes after flex attention.
    counts: dict[str, int] = field(default_factory=lambda: {"calls": 0})

    @property
    def is_plain(self) -> bool:
        """Return whether all logits are requested, as in generation."""
        return self.positions is None and self.labels is None


class HeadForward:
    """The ``forward`` of an output head that selects tokens and can compute the loss, in chunks without logits."""

    def __init__(self, head: nn.Module, train: TrainConfig) -> None:
        self.head, self.plain_forward = head, head.forward
        self.request = HeadRequest()
        self.own: TokenSlice | None = None  # tokens of which this worker has the hidden states; None: all
        self.logits = train.logits or "all"
        self.chunk_tokens = train.loss_chunk_tokens if train.loss == "chunked" else None
        self.vocabulary = getattr(head, "out_features", None)  # the weight may be sharded
        self.settings, self.hint = _settings(train)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits of the selected tokens, or their loss in the form of ``_as_logits``."""
        request = self.request
        request.counts["calls"] += 1
        if request.is_plain:
            logits: Tensor = self.plain_forward(hidden)
            return logits
        expected = request.shape
        if self.own is not None:
            own = self.own.of(expected[1])
            expected = (expected[0], own.stop - own.start)
        if tuple(hidden.shape[:-1]) != expected:
            raise ConfigError(
                f"{self.settings}: the output head gets hidden states of shape {tuple(hidden.shape)} for inputs of "
                f"shape {expected}: {self.hint}"
            )
        rows = hidden.flatten(0, -2)
        if request.positions is not None:
            rows = rows.index_select(0, request.positions)
        if request.labels is None:
            selected: Tensor = self.plain_forward(rows[None])
            return selected
        return self._loss(rows, request.labels)

    def _loss(self, rows: Tensor, labels: Tensor) -> Tensor:
        weight: Any = self.head.weight
        bias: Any = self.head.bias
        assert self.chunk_tokens is not None, "only a chunked loss has labels"
        following = next_labels(labels, self.own).flatten()
        return _as_logits(linear_cross_entropy(rows, weight, bias, following, self.chunk_tokens), len(weight))


def adapt_head(model: nn.Module, train: TrainConfig) -> None:
    """Extend the head of a model, if the options request it. Raise ConfigError if the model does not support that."""
    if train.logits != "targets" and train.loss != "chunked":
        return
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Module):
        settings, hint = _settings(train)
        raise ConfigError(
            f"{settings} needs the method get_output_embeddings, which returns the output head. "
            f"{type(model).__name__} has none: add it, or {hint}"
        )
    if train.loss == "chunked" and type(head).forward is not nn.Linear.forward:
        raise ConfigError(
            f"train.loss=chunked needs a linear output head, but that of {type(model).__name__} is a "
            f"{type(head).__name__}: use train.loss=full"
        )
    adapted = HeadForward(head, train)
    head.forward = adapted
    model.forward = _with_request(model, adapted)


COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Attributes of models of transformers with the weight of the router loss."""


def adapt_router(model: nn.Module) -> None:
    """Let a mixture of experts of transformers weight its router loss, if its configuration requests that loss.

    transformers adds a coefficient times ``aux_loss`` to a loss that it computes itself. Its outputs have the second
    factor only. Raise ConfigError in the forward pass if they have none.
    """
    settings = getattr(getattr(model, "config", None), "get_text_config", lambda: None)()
    if not getattr(settings, "output_router_logits", False):
        return
    plain_forward: Callable[..., Any] = model.forward
    named = (getattr(place, name, None) for name in COEFFICIENTS for place in (model, settings))
    coefficient = next((value for value in named if value is not None), None)
    name = type(model).__name__  # FSDP changes it later

    @wraps(plain_forward)
    def forward(*arguments: Any, **inputs: Any) -> Any:
        outputs = plain_forward(*arguments, **inputs)
        found = getattr(outputs, AUX_LOSS, None)
        if not isinstance(found, Tensor) or coefficient is None:
            raise ConfigError(
                f"{name} returns no router loss as {AUX_LOSS}, which output_router_logits=true of its config.json or "
                "of model.options requests: use model.options.output_router_logits=false"
            )
        outputs.aux_loss = coefficient * found
        return outputs

    model.forward = forward


def describe_head(module: nn.Module) -> tuple[str, str]:
    """Return the logits that a model computes, and its loss, read from the live modules."""
    for submodule in module.modules():
        forward = vars(submodule).get("forward")
        if isinstance(forward, HeadForward):
            tokens = forward.chunk_tokens
            return forward.logits, "full" if tokens is None else f"chunked({tokens})"
    return "all", "full"


def _settings(train: TrainConfig) -> tuple[str, str]:
    """Return the options that change the head, and the hint that leaves them out."""
    known = {"train.logits=targets": "train.logits=all", "train.loss=chunked": "train.loss=full"}
    found = [text for text in known if text in (f"train.logits={train.logits}", f"train.loss={train.loss}")]
    return " and ".join(found), f"use {' '.join(map(known.__getitem__, found))}"


def _with_request(model: nn.Module, adapted: HeadForward) -> Callable[..., Any]:
    """Return a ``forward`` of the model that also takes the inputs TARGET_POSITIONS and TARGET_LABELS."""
    request, plain_forward, name = adapted.request, model.forward, type(model).__name__
    read_loss = _LossReader(model, adapted)

    @wraps(plain_forward)
    def forward(*arguments: Any, **inputs: Any) -> Any:
        positions, labels = inputs.pop(TARGET_POSITIONS, None), inputs.pop(TARGET_LABELS, None)
        request.positions, request.labels = positions, labels
        request.shape, request.counts["calls"] = _batch_shape(*arguments, *inputs.values()), 0
        outputs = plain_forward(*arguments, **inputs)
        request.positions = request.labels = None
        if positions is None and labels is None:
            return outputs
        if (calls := request.counts["calls"]) != 1:  # Then its selected tokens are not its outputs.
            raise ConfigError(
                f"{adapted.settings}: {name} calls its output head {calls} times in a forward "
                f"pass, not once: {adapted.hint}"
            )
        if labels is not None:
            return {LOSS_SUM: read_loss(get_logits(outputs)), AUX_LOSS: getattr(outputs, AUX_LOSS, None)}
        if tuple(get_logits(outputs).shape[:-1]) != (1, len(positions)):
            raise ConfigError(
                f"{adapted.settings}: {name} changes the shape of the logits of its output head: {adapted.hint}"
            )
        return outputs

    return forward


def _batch_shape(*inputs: Any) -> tuple[int, ...]:
    """Return batch and length: the shape of the first input with two axes."""
    shapes = (tuple(tensor.shape) for tensor in inputs if isinstance(tensor, Tensor))
    return next((shape for shape in shapes if len(shape) == 2), ())


def _as_logits(loss: Tensor, vocabulary: int) -> Tensor:
    """Return the loss and CONSTANT with the axes of logits, shape (1, 2, vocabulary), as a view of two numbers."""
    return torch.stack([loss, torch.full_like(loss, CONSTANT)])[None, :, None].expand(1, 2, vocabulary)


class _LossReader:
    """Reader of the loss in ``_as_logits``, which checks that the model did not change it.

    In the first forward pass a wrong constant is an error. A compiled model cannot read it, so the loss is NaN instead.
    """

    def __init__(self, model: nn.Module, adapted: HeadForward) -> None:
        self.model, self.adapted = model, adapted
        self.checked: set[bool] = set()  # modes of the model: training or evaluation

    def __call__(self, logits: Tensor) -> Tensor:
        if tuple(logits.shape) != (1, 2, self.adapted.vocabulary):
            raise self._error()
        loss, constants = logits[0, 0, 0], logits[0, 1]
        if torch.compiler.is_compiling() or not has_values(logits):
            return torch.where((constants == CONSTANT).all(), loss, torch.nan)
        if self.model.training not in self.checked:
            if not bool((constants == CONSTANT).all()):
                raise self._error()
            self.checked.add(self.model.training)
        return loss

    def _error(self) -> ConfigError:
        name = type(self.model).__name__
        return ConfigError(
            f"train.loss=chunked: {name} changes the logits after its output head, for example by a scale or a cap: "
            "use train.loss=full. train.logits=targets saves memory too"
        )

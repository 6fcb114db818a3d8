"""Losses and accuracy counts of a batch: sums, not means, so that the mean over ranks and micro-batches is exact."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from distexp.config import ConfigError
from distexp.config.custom_code import PAGE, describe_type
from distexp.config.tasks import task_of
from distexp.data.base import IGNORE, TARGET_LABELS, Batch, TokenSlice

LOSS_SUM = "loss_sum"
"""Key of the loss in the outputs of a model that computes it, summed over the targets: with ``train.loss=own``, or in
its head, see ``distexp.models.head``."""


AUX_LOSS = "aux_loss"
"""Field of the outputs with a loss to add, such as that of a router, as a mean over the tokens of a micro-batch."""


def entropy_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy in nats, summed over the targets, in fp32; of shapes (labels, classes) and (labels,)."""
    return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")


Entropy = Callable[[Tensor, Tensor], Tensor]
"""``entropy_of``, or its compiled form, which ``distexp.models.transforms.training_entropy`` makes."""


def loss_sum(task: str, outputs: Any, batch: Batch, entropy: Entropy = entropy_of) -> Tensor:
    """Return the loss of a training in fp32: the cross entropy, summed over the targets, and the router loss."""
    router = router_sum(task, outputs, batch)
    loss = cross_entropy_sum(task, outputs, batch, entropy)
    return loss if router is None else loss + router


def router_sum(task: str, outputs: Any, batch: Batch) -> Tensor | None:
    """Return AUX_LOSS of the outputs times the targets of the micro-batch, in fp32; None if the outputs have none.

    Divided by the targets of a step and summed, it is the mean over the micro-batches, weighted by their targets.
    """
    found = outputs.get(AUX_LOSS) if isinstance(outputs, dict) else getattr(outputs, AUX_LOSS, None)
    if not isinstance(found, Tensor):
        return None
    targets = batch.labels[:, 1:] if task_of(task).is_causal else batch.labels
    return found.float() * (targets != IGNORE).sum()


def cross_entropy_sum(task: str, outputs: Any, batch: Batch, entropy: Entropy = entropy_of) -> Tensor:
    """Return the cross entropy in nats, summed over the targets, in fp32; 0 without targets, as its gradient.

    The logits, also as an attribute, have the shape (batch, length, vocabulary or classes), or (batch, classes). For
    causal_lm those at a position predict the next label. A dict has the loss as LOSS_SUM. Labels with the value IGNORE
    do not count. Raise ValueError for an unknown task, and ConfigError if a model that got the labels returns no loss.
    """
    if isinstance(outputs, dict) and isinstance(loss := outputs.get(LOSS_SUM), Tensor) and not loss.dim():
        return loss
    if TARGET_LABELS in batch.inputs or (isinstance(outputs, dict) and LOSS_SUM in outputs):
        raise ConfigError(
            f"train.loss=own: forward() of the model got target_labels and returned {describe_type(outputs)}: return "
            f'{{"{LOSS_SUM}": loss}} with a scalar tensor, the sum over the targets and not their mean, as in {PAGE}'
        )
    logits, labels = _align(task, outputs, batch)
    return sharded_cross_entropy(logits, labels) if isinstance(logits, DTensor) else entropy(logits, labels)


def count_correct(task: str, outputs: Any, batch: Batch, *, choices: int = 1) -> Tensor:
    """Count the targets among the ``choices`` largest logits, or among fewer classes (top-k accuracy); a scalar."""
    logits, labels = _align(task, outputs, batch)
    with torch.no_grad():
        top = logits.topk(min(choices, logits.shape[-1]), dim=-1).indices
        # No class equals IGNORE, so ignored labels never match.
        return (top == labels[:, None]).sum()


def evaluation_sums(task: str, outputs: Any, batch: Batch) -> Tensor:
    """Return summed loss, targets, top-1 hits and top-5 hits; shape (4,), float64. Hits are counted for classes.

    A worker without the head of the model has no outputs. It adds nothing.
    """
    if outputs is None:
        return torch.zeros(4, dtype=torch.float64, device=batch.labels.device)
    loss = cross_entropy_sum(task, outputs, batch)
    sums = torch.zeros(4, dtype=torch.float64, device=loss.device)
    sums[0] = loss.detach()
    if batch.own is None:
        sums[1].fill_(batch.num_targets)  # sums[1] = ... would block until the GPU is idle
    else:
        sums[1] = (next_labels(batch.labels, batch.own) != IGNORE).sum()
    if task_of(task).has_classes:
        sums[2], sums[3] = (count_correct(task, outputs, batch, choices=choices) for choices in (1, 5))
    return sums


def partial_metrics(task: str, outputs: Any, batch: Batch, loss: Tensor, normalizer: Tensor) -> Tensor:
    """Return a micro-batch's part of the step's mean loss, accuracy and, if there is one, router loss.

    The shape is (2,) or (3,). ``loss`` is divided already.

    The sum over micro-batches and ranks is the step's mean. The accuracy of language models is 0, because
    an argmax over the vocabulary would cost about as much as the loss.
    """
    hits = count_correct(task, outputs, batch) if task_of(task).has_classes else torch.zeros_like(loss)
    router = router_sum(task, outputs, batch)
    parts = [loss, hits / normalizer] if router is None else [loss, hits / normalizer, router / normalizer]
    return torch.stack([part.detach() for part in parts])


def get_logits(outputs: Any) -> Tensor:
    """Return the outputs of a model if they are a tensor, otherwise their ``logits``, or raise ConfigError."""
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"forward() of the model returned {describe_type(outputs)}: return the logits, or an object with the "
            f"attribute logits, as in {PAGE}"
        )
    return logits


def _align(task: str, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits (labels, classes) and the labels they predict, shape (labels,)."""
    kind, logits = task_of(task), get_logits(outputs)
    labels = next_labels(batch.labels, batch.own) if kind.is_causal else batch.labels
    return (logits.flatten(0, 1), labels.flatten()) if kind.labels_tokens else (logits, labels)


def next_labels(labels: Tensor, own: TokenSlice | None) -> Tensor:
    """Return the label that each token predicts, or each own one; the last token of a row predicts none.

    The label of the last token of a slice is the first one of the next slice.
    """
    # Shift the labels, not the logits: logits[:, :-1] would copy all logits.
    following = functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
    return following if own is None else following[:, own.of(labels.shape[1])]


def whole_logits(outputs: Any) -> Tensor:
    """Return the logits of all tokens of the vocabulary, also if several workers share it; then a collective."""
    logits = get_logits(outputs)
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def sharded_cross_entropy(logits: DTensor, labels: Tensor) -> Tensor:
    """Return the cross entropy in nats, summed over the targets, in fp32, of logits that several workers share.

    Each worker has the logits of some tokens of the vocabulary, shape (labels, vocabulary / workers). No worker gets
    those of the others.
    """
    mesh = logits.device_mesh
    local = logits.to_local(grad_placements=logits.placements)
    first = mesh.get_local_rank() * local.shape[-1]
    loss: Tensor = _ShardedCrossEntropy.apply(local, labels, first, mesh.get_group())  # type: ignore[no-untyped-call]
    return loss


class _ShardedCrossEntropy(torch.autograd.Function):
    """The loss of logits that workers share, as in Megatron-LM. Each worker gets the gradients of its logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: Any) -> Tensor:
        """Return the loss, and keep the probabilities."""
        peak = logits.amax(dim=-1).float()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        shifted = logits - peak[:, None]  # in fp32, without a copy of the logits
        own = labels - first
        is_own, own = (own >= 0) & (own < logits.shape[-1]), own.clamp(0, logits.shape[-1] - 1)[:, None]
        at_target = torch.where(is_own, shifted.gather(1, own)[:, 0], 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), at_target])
        dist.all_reduce(sums, group=group)
        has_target = labels != IGNORE
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), own, is_own, has_target)
        ctx.dtype = logits.dtype
        return ((sums[0].log() - sums[1]) * has_target).sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits of this worker, in the memory of the probabilities."""
        probabilities, own, is_own, has_target = ctx.saved_tensors
        gradient = probabilities.scatter_add_(1, own, -is_own[:, None].float())
        return gradient.mul_(has_target[:, None] * grad_output).to(ctx.dtype), None, None, None


FP16_SCALE = 256.0
"""Factor of the gradients of logits in fp16. Probabilities below 6e-8 would be 0 without it."""

FP16_TOKENS = 4096
"""Most tokens times factor in a sum over the tokens of a chunk in fp16, which has no values above 65504."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk_tokens: int
) -> Tensor:
    """Return the cross entropy in nats, summed over the targets, in fp32, computed in chunks of tokens.

    The logits of a chunk are freed before those of the next one, so the matrix (tokens, vocabulary) is never in memory.
    The gradients are computed in the forward pass, as in Liger and in ``linear_cross_entropy`` of torch 2.13. So no
    matrix product is computed twice.

    It equals ``cross_entropy(linear(hidden, weight, bias).float(), labels)`` up to the order of the sums. The logits
    have the dtype of autocast, or else that of ``hidden``. The shapes are (tokens, hidden), (vocabulary, hidden),
    (vocabulary,) and (tokens,), where a label is IGNORE if a token has no target.
    """
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return _loss(hidden, weight, bias, labels, hidden.dtype, chunk_tokens)
    with torch.autocast(device, enabled=False):  # torch does not keep compiled graphs that switch autocast
        return _loss(hidden, weight, bias, labels, torch.get_autocast_dtype(device), chunk_tokens)


def _loss(  # noqa: PLR0917 (autograd passes no keyword arguments)
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, dtype: torch.dtype, chunk_tokens: int
) -> Tensor:
    if not torch.is_grad_enabled():
        total = hidden.new_zeros((), dtype=torch.float32)
        matrix, vector = _cast(weight, bias, dtype)
        for rows, targets in _chunks(hidden, labels, chunk_tokens):
            logits = functional.linear(rows.to(dtype), matrix, vector)
            total += functional.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")
        return total
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, dtype, chunk_tokens)  # type: ignore[no-untyped-call]
    return loss


def _cast(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _chunks(hidden: Tensor, labels: Tensor, chunk_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(labels), chunk_tokens):
        yield hidden[start : start + chunk_tokens], labels[start : start + chunk_tokens]


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss, with its gradients computed in the forward pass."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes no keyword arguments)
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        dtype: torch.dtype,
        chunk_tokens: int,
    ) -> Tensor:
        """Return the loss and keep the gradients, multiplied by ``ctx.scale`` and ``ctx.weight_scale``."""
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.scale, ctx.weight_scale = _scales(dtype, chunk_tokens)
        ratio = ctx.weight_scale / ctx.scale
        matrix, vector = _cast(weight, bias, dtype)
        loss = hidden.new_zeros((), dtype=torch.float32)
        hidden_gradients: list[Tensor] = []
        weight_gradient: Tensor | None = None
        bias_gradient: Tensor | None = None
        for rows, targets in _chunks(hidden, labels, chunk_tokens):
            ignored = targets == IGNORE
            # A row of zeros adds nothing to the gradient of the weight. This is cheaper than a mask of the logits.
            inputs = rows.masked_fill(ignored[:, None], 0).to(dtype)
            part, gradient = _loss_and_gradient(functional.linear(inputs, matrix, vector), targets, ctx.scale)
            loss = loss + part  # With +=, torch 2.11 compiles a backward pass whose gradients are zero.
            if ctx.needs_input_grad[0]:
                hidden_gradients.append((gradient @ matrix).masked_fill_(ignored[:, None], 0))
            if ctx.needs_input_grad[1]:
                factors = inputs if ctx.scale == ctx.weight_scale else inputs * ratio
                weight_gradient = _add_product(weight_gradient, gradient.t(), factors)
            if bias is not None and ctx.needs_input_grad[2]:
                product = (gradient.t() @ ((~ignored).to(dtype) * ratio)).float()
                bias_gradient = product if bias_gradient is None else bias_gradient + product
        ctx.save_for_backward(torch.cat(hidden_gradients) if hidden_gradients else None, weight_gradient, bias_gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, multiplied by that of the loss."""
        weight_factor = grad_output / ctx.weight_scale
        hidden, weight, bias = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        gradients = (_scale(parameter, weight_factor, weight_dtype) for parameter in (weight, bias))
        return (_scale(hidden, grad_output / ctx.scale, hidden_dtype), *gradients, None, None, None)


def _scales(dtype: torch.dtype, chunk_tokens: int) -> tuple[float, float]:
    """Return the factors of the gradients of the hidden states, and of weight and bias.

    The latter are sums over the tokens of a chunk. If most tokens had the same target, they would be infinite with the
    factor of the former, and no loss scaling could prevent that.
    """
    if dtype != torch.float16:
        return 1.0, 1.0
    return FP16_SCALE, min(FP16_SCALE, 2.0 ** math.floor(math.log2(FP16_TOKENS / chunk_tokens)))


def _loss_and_gradient(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk, and its gradient by the logits in their dtype, times ``scale``.

    The memory of ``logits`` is used for the gradient. Rows without a target have an arbitrary gradient.
    """
    logarithms = functional.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = functional.nll_loss(logarithms, targets, ignore_index=IGNORE, reduction="sum")
    classes = targets.clamp(min=0)[:, None]
    # p - 1 would be 0 in bf16 for p close to 1.
    at_target = (torch.expm1(logarithms.gather(1, classes)) * scale).to(logits.dtype)
    if scale != 1.0:
        logarithms += math.log(scale)
    gradient = torch.exp(logarithms, out=logits)
    return loss, gradient.scatter_(1, classes, at_target)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return ``total + left @ right``; the sum of several products is in fp32."""
    if total is None:
        return left @ right
    if left.dtype == torch.float32:
        return total.addmm_(left, right)
    return total.float().add_(left @ right)


def _scale(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Multiply in fp32, and in place if possible, because the gradient of the weight is large.

    Then a second backward pass is an error: autograd finds that a saved tensor has changed.
    """
    if gradient is None:
        return None
    if gradient.dtype == torch.float32 and not torch.compiler.is_compiling():
        return gradient.mul_(factor).to(dtype)
    return (gradient.float() * factor).to(dtype)

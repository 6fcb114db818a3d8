"""Floating point operations (FLOPs) of training.

*Model FLOPs* are those of the algorithm, as in appendix B of the PaLM paper (arXiv:2204.02311): of the samples without
padding, with all pairs of tokens of a sample in the attention. They do not depend on padding, packing, kernels,
activation checkpointing or strategy. The output head counts the tokens that ``train.logits`` selects.

*Executed FLOPs* are those of the matrix products that run: with padding, and with what activation checkpointing
recomputes, but without the blocks that flex attention skips. What other attention kernels skip is not known.

torch counts the operations of an eager copy of the model without memory, because it cannot look into compiled code.
"""

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from distexp.config import Config, custom_code
from distexp.data.base import POSITIONS, TARGET_LABELS, TARGET_POSITIONS, TOKEN_INPUTS, TaskData, Workload, to_device
from distexp.models import blueprint, transforms
from distexp.models.adapter import add_adapter
from distexp.models.head import adapt_head
from distexp.models.objective import get_logits
from distexp.system.torch_internals.tensors import grouped_products_of_any_precision

CountFlops = Callable[[nn.Module, Mapping[str, Tensor]], int]  # FLOPs of a model on the meta device for its inputs


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs of some training steps: of the model, and executed."""

    model: float
    executed: float


@dataclass(frozen=True)
class FlopRates:
    """FLOPs of a pass over a batch, by what they grow with."""

    row: float = 0.0  # for each row, which is an image, or a text of unknown length
    token: float = 0.0  # for each token
    pair: float = 0.0  # for each pair of tokens of a row
    head_token: float = 0.0  # for each token whose logits are computed, if the model selects them; else in ``token``

    def total(self, *, rows: int, tokens: int, pairs: int, head_tokens: int) -> float:
        """Return the FLOPs of a batch."""
        return self.row * rows + self.token * tokens + self.pair * pairs + self.head_token * head_tokens


def training_flops(config: Config, data: TaskData, done: Workload, device: torch.device) -> TrainingFlops:
    """Return the FLOPs of training steps."""
    counter = FlopCounter(config, data)
    model = counter.model_rates()
    skips_blocks = config.model.attention == "flex" and device.type == "cuda"
    pairs, executed = done.visited_pairs if skips_blocks else done.position_pairs, counter.executed_rates(model)
    return TrainingFlops(
        model.total(rows=done.samples, tokens=done.tokens, pairs=done.token_pairs, head_tokens=done.targets),
        executed.total(rows=done.rows, tokens=done.positions, pairs=pairs, head_tokens=done.head_tokens),
    )


class FlopCounter:
    """Counts of FLOPs of the configured model, on copies of it on the meta device."""

    def __init__(self, config: Config, data: TaskData) -> None:
        self.config, self.data = config, data
        batch = to_device(data.train, data.collate([data.train[0]]), torch.device("meta"))
        left_out = {POSITIONS, TARGET_LABELS}
        if transforms.has_encoder(self._model):
            left_out.add("attention_mask")  # Encoders of transformers read whether it masks a token.
        self.inputs = {name: tensor for name, tensor in batch.inputs.items() if name not in left_out}

    def model_rates(self) -> FlopRates:
        """Return the model FLOPs of a forward and a backward pass."""
        if self.config.adapter.freezes_model:  # Frozen weights have no gradient: that is one product less.
            return self._rates(count_training_flops, self._model)
        forward = self._rates(count_forward_flops, self._model)
        return FlopRates(*(3 * rate for rate in astuple(forward)))  # a backward pass has two products for each one

    def executed_rates(self, model_rates: FlopRates) -> FlopRates:
        """Return the executed FLOPs of a forward and a backward pass."""
        train = self.config.train
        trains_all = self.config.adapter.freezes_model or all(p.requires_grad for p in self._model.parameters())
        if model_rates.token and trains_all and not train.activation_checkpointing:
            return model_rates  # unlike that of a convolution, the input of an embedding has no gradient to skip
        model = self._build()
        stored = train.activation_checkpointing
        stored = True if stored == transforms.OFFLOAD else stored  # Tensors without values cannot be copied.
        changed = replace(train, compile=None, activation_checkpointing=stored)
        transforms.transform_blocks(model, replace(self.config, train=changed))
        # A compiled block is one operation, so it is recomputed to its end.
        with set_checkpoint_early_stop(train.compiled != "blocks"):
            return self._rates(count_training_flops, model)

    @cached_property
    def _model(self) -> nn.Module:
        return self._build()

    def _build(self) -> nn.Module:
        # Flex attention does not run without memory, and a chunked loss computes the same products as the full one.
        model_config = replace(self.config.model, attention="auto")
        build = partial(custom_code.locate(model_config._target_), model_config, self.data.num_classes)
        model = blueprint.build_empty(build, torch.device("meta"))[0].eval()
        add_adapter(model, replace(self.config, adapter=replace(self.config.adapter, base_dtype="fp32")))
        adapt_head(model, replace(self.config.train, loss="full"))
        return model

    @cached_property
    def _length(self) -> int:
        """Tokens of a row, also of its decoder; 0 for images."""
        return sum(self.inputs[name].shape[1] for name in TOKEN_INPUTS if name in self.inputs)

    def _rates(self, count: CountFlops, model: nn.Module) -> FlopRates:
        """Return the rates of a pass, from its FLOPs at two lengths and for two numbers of selected tokens."""
        length = self._length
        if length < 2:
            return FlopRates(row=count(model, self.inputs))
        flops = partial(self._count_at, count, model)
        whole = flops(length)
        head = flops(length, selected=2) - whole if TARGET_POSITIONS in self.inputs else 0
        long, short = (whole - head) / length, (flops(length // 2) - head) / (length // 2)
        pair = (long - short) / (length - length // 2)
        return FlopRates(token=long - pair * length, pair=pair, head_token=head)

    def _count_at(self, count: CountFlops, model: nn.Module, length: int, selected: int = 1) -> int:
        """Return the FLOPs of a row of some tokens of which some are selected.

        A row of a seq2seq model has those of its decoder too, and both parts are shortened by the same factor.
        """
        whole, share = self.inputs["input_ids"].shape, length / self._length
        inputs = {
            name: tensor[:, : max(1, round(tensor.shape[1] * share))]
            if name in TOKEN_INPUTS or tensor.shape == whole
            else tensor
            for name, tensor in self.inputs.items()
        }
        if TARGET_POSITIONS in inputs:
            inputs[TARGET_POSITIONS] = torch.zeros(selected, dtype=torch.long, device="meta")
        return count(model, inputs)


def count_forward_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Count the floating point operations of one forward pass. A multiply-add counts as two.

    The model is a copy on the meta device, which takes no memory and no time. Do not use it afterwards, because its
    attention implementation is changed. Of the inputs only the shapes matter.
    """
    with torch.no_grad():
        return _count_flops(model, inputs, backward=False)


def count_training_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Count the floating point operations of one forward and one backward pass, with what they recompute."""
    return _count_flops(model, inputs, backward=True)


def _count_flops(model: nn.Module, inputs: Mapping[str, Tensor], *, backward: bool) -> int:
    set_attention = getattr(model, "set_attn_implementation", None)
    if set_attention is not None:
        # The other implementations read the values of the mask, which a meta tensor lacks. The FLOPs are the same.
        set_attention("eager")
    with FlopCounterMode(display=False) as counter, grouped_products_of_any_precision():
        outputs = model(**{name: tensor.to("meta") for name, tensor in inputs.items()})
        if backward:
            get_logits(outputs).sum().backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())

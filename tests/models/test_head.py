"""``train.logits=targets`` and ``train.loss=chunked`` give the loss and the gradients of all logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModelForCausalLM

from distexp.config import Config, ConfigError, TrainConfig
from distexp.config.custom_code import locate
from distexp.data.base import (
    COMPILED_MULTIPLE,
    IGNORE,
    KEPT_MULTIPLE,
    TARGET_LABELS,
    TARGET_POSITIONS,
    Batch,
    LabelsForHead,
    Sample,
    TargetTokens,
    kept_tokens,
)
from distexp.data.text import PackedSamples, TextCollate
from distexp.models.head import adapt_head, describe_head
from distexp.models.objective import evaluation_sums, loss_sum
from distexp.resolve.run_id import run_id
from tests.helpers.runs import resolve_cell

VOCABULARY = 53
LLAMA: dict[str, Any] = {"intermediate_size": 32, "num_key_value_heads": 2}
GEMMA: dict[str, Any] = {**LLAMA, "head_dim": 8}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bloom": {},  # tied embeddings
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "llama": LLAMA,  # not tied
    "gpt_neox": {"intermediate_size": 32, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "phi": {"intermediate_size": 32},  # a head with bias
    "gemma2": GEMMA,  # caps its logits
    "granite": {**LLAMA, "logits_scaling": 4.0},
    "cohere": LLAMA,  # multiplies its logits
}
CHANGES_LOGITS = ("gemma2", "granite", "cohere")


def samples(rows: int = 4, seed: int = 1) -> list[Sample]:
    """Return samples of different lengths with different prompts; the last one has no targets."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Sample] = []
    for row in range(rows):
        length, prompt = (int(torch.randint(low, 15, (), generator=generator)) for low in (6, 1))
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length if row == rows - 1 else min(prompt, length - 1)] = IGNORE
        made.append({"input_ids": ids, "labels": labels})
    return made


def options(*, logits: str = "all", loss: str = "full", chunk: int = 7) -> TrainConfig:
    return TrainConfig(logits=logits, loss=loss, loss_chunk_tokens=chunk)


def collate(
    train: TrainConfig, *, length: int | None = None, compiled: bool = False
) -> Callable[[Sequence[Sample]], Batch]:
    """Return the collate function that a worker uses."""
    made: Callable[[Sequence[Sample]], Batch] = TextCollate(pad_id=0, length=length)
    made = TargetTokens(made, compiled=compiled) if train.logits == "targets" else made
    return LabelsForHead(made) if train.loss == "chunked" else made


def build(name: str, *overrides: str) -> nn.Module:
    """Build a small model; ``gpt_tiny`` is that of distexp."""
    torch.manual_seed(0)
    if name == "gpt_tiny":
        config = resolve_cell("model=gpt_tiny", f"model.vocab_size={VOCABULARY}", *overrides)
        gpt: nn.Module = locate(config.model._target_)(config.model, VOCABULARY)
        return gpt
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(name, **sizes, use_cache=False, **ARCHITECTURES[name])
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def adapt(name: str, train: TrainConfig) -> nn.Module:
    model = build(name).train()
    adapt_head(model, train)
    return model


def measure(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor], list[float]]:
    """Return the loss, the gradients and the sums of an evaluation."""
    loss = loss_sum("causal_lm", model(**batch.inputs), batch) / max(batch.num_targets, 1)
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        sums = evaluation_sums("causal_lm", model.eval()(**batch.inputs), batch).tolist()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach(), gradients, sums


@pytest.mark.parametrize("name", ["gpt_tiny", *ARCHITECTURES])
@pytest.mark.parametrize(
    "train",
    [options(logits="targets"), options(loss="chunked"), options(logits="targets", loss="chunked", chunk=3)],
    ids=["targets", "chunked", "targets chunked"],
)
def test_loss_gradients_and_evaluation_are_those_of_all_logits(name: str, train: TrainConfig) -> None:
    if train.loss == "chunked" and name in CHANGES_LOGITS:
        with pytest.raises(ConfigError, match=r"changes the logits after its output head.*: use train.loss=full"):
            adapt(name, train)(**collate(train)(samples()).inputs)
        return
    loss, gradients, sums = measure(build(name).train(), collate(options())(samples()))
    found_loss, found_gradients, found_sums = measure(adapt(name, train), collate(train)(samples()))
    torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(found_gradients, gradients, rtol=1e-5, atol=1e-6)
    assert found_sums == pytest.approx(sums, rel=1e-6)


def test_packed_rows_have_the_loss_of_separate_rows() -> None:
    train, attention = options(logits="targets", loss="chunked"), "model.attention=sdpa"
    loss, gradients, _ = measure(build("gpt_tiny", attention).train(), collate(options())(samples()))
    packed = PackedSamples(samples(), ((2, 0), (1, 3)))
    model = build("gpt_tiny", attention).train()
    adapt_head(model, train)
    found_loss, found_gradients, _ = measure(model, collate(train)([packed[0], packed[1]]))
    torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(found_gradients, gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("train", [options(logits="targets"), options(logits="targets", loss="chunked")])
def test_a_batch_without_targets_has_no_loss(train: TrainConfig) -> None:
    loss, gradients, sums = measure(adapt("bloom", train), collate(train)(samples()[-1:]))
    assert loss == 0
    assert sums == [0, 0, 0, 0]
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("train", [options(logits="targets"), options(loss="chunked")], ids=["targets", "chunked"])
def test_without_targets_as_inputs_the_model_is_unchanged(train: TrainConfig) -> None:
    """Generation and other users of the model call it so."""
    inputs = collate(options())(samples()).inputs
    model = adapt("llama", train)
    model(**collate(train)(samples()).inputs)
    assert model(**inputs).logits.equal(build("llama")(**inputs).logits)
    assert inspect.signature(model.forward) == inspect.signature(build("llama").forward)
    assert model.state_dict().keys() == build("llama").state_dict().keys()


def test_only_tokens_with_a_target_are_kept() -> None:
    batch, whole = (collate(options(logits=logits), length=128)(samples()) for logits in ("targets", "all"))
    positions, labels = batch.inputs[TARGET_POSITIONS], batch.labels
    assert len(positions) % KEPT_MULTIPLE == 0
    assert batch.num_targets < len(positions) <= batch.num_targets + KEPT_MULTIPLE
    assert labels.shape == (1, len(positions))
    targets = labels[0, 1 : 1 + batch.num_targets]
    assert targets.equal(whole.labels[:, 1:][whole.labels[:, 1:] != IGNORE])
    assert whole.labels.flatten()[positions[: batch.num_targets] + 1].equal(targets)
    assert (labels != IGNORE).sum() == batch.num_targets > 0
    assert (batch.num_samples, batch.num_tokens) == (whole.num_samples, whole.num_tokens)


@pytest.mark.parametrize(
    ("targets", "tokens", "kept", "compiled"),
    [(0, 40, 8, 40), (0, 512, 8, 128), (127, 512, 128, 128), (128, 512, 136, 256), (511, 512, 512, 512)],
)
def test_the_number_of_kept_tokens_is_rounded_up(targets: int, tokens: int, kept: int, compiled: int) -> None:
    assert kept_tokens(targets, tokens, compiled=False) == kept
    assert kept_tokens(targets, tokens, compiled=True) == compiled


def test_few_shapes_of_compiled_models_occur() -> None:
    for targets in range(0, 60_000, 7):
        kept = kept_tokens(targets, 1 << 20, compiled=True)
        assert targets < kept <= max(targets + COMPILED_MULTIPLE, 1.25 * targets + 1)
        similar = range(targets, targets + targets // 10 + 1, max(1, targets // 100))
        assert len({kept_tokens(tokens, 1 << 20, compiled=True) for tokens in similar}) <= 2


def test_one_graph_is_enough_for_batches_with_different_numbers_of_targets() -> None:
    train = options(logits="targets", loss="chunked", chunk=100)
    make = collate(train, length=64, compiled=True)
    batches = [make(samples(seed=seed)) for seed in (1, 2)]
    assert len({batch.num_targets for batch in batches}) == 2
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled, eager = (adapt("bloom", train) for _ in range(2))
    compiled.forward = torch.compile(compiled.forward, backend=counter, fullgraph=True)
    for batch in batches:
        losses = [loss_sum("causal_lm", model(**batch.inputs), batch) for model in (compiled, eager)]
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(*losses)
    assert counter.frame_count == 1
    for one, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_compiled_model_that_changes_its_logits_has_no_wrong_loss() -> None:
    train = options(loss="chunked")
    model, batch = adapt("granite", train), collate(train)(samples())
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert loss_sum("causal_lm", model(**batch.inputs), batch).isnan()


class Odd(nn.Module):
    """A causal LM with an unusual head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the head."""
        return None if self.kind == "hidden" else self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.tokens(input_ids)
        if self.kind == "functional":
            return hidden @ self.head.weight.t()
        if self.kind == "transposed":
            hidden = hidden.transpose(0, 1)
        logits: Tensor = self.head(hidden)
        if self.kind == "twice":
            logits = logits + self.head(hidden)
        return {"sliced": logits[:, 1:], "cut": logits[..., 1:]}.get(self.kind, logits)


@pytest.mark.parametrize(
    ("kind", "train", "message"),
    [
        ("hidden", options(logits="targets"), r"get_output_embeddings.*Odd has none: add it, or use train.logits=all$"),
        ("functional", options(logits="targets"), r"calls its output head 0 times.*: use train.logits=all$"),
        ("twice", options(loss="chunked"), r"calls its output head 2 times.*: use train.loss=full$"),
        ("sliced", options(logits="targets"), r"changes the shape of the logits.*: use train.logits=all$"),
        ("sliced", options(loss="chunked"), r"changes the logits after its output head.*: use train.loss=full"),
        ("cut", options(loss="chunked"), r"changes the logits after its output head.*: use train.loss=full"),
        (
            "transposed",
            options(logits="targets", loss="chunked"),
            r"train.logits=targets and train.loss=chunked: .* use train.logits=all train.loss=full$",
        ),
    ],
)
def test_a_head_that_cannot_be_extended_is_refused(kind: str, train: TrainConfig, message: str) -> None:
    def use() -> None:
        model = Odd(kind)
        adapt_head(model, train)
        model(**collate(train)(samples()).inputs)

    with pytest.raises(ConfigError, match=message):
        use()


def test_a_chunked_loss_needs_a_linear_head() -> None:
    model: Any = Odd("")
    model.head = nn.Sequential(nn.Linear(8, VOCABULARY))
    with pytest.raises(ConfigError, match=r"needs a linear output head, but that of Odd is a Sequential"):
        adapt_head(model, options(loss="chunked"))


def test_the_live_model_shows_what_is_used() -> None:
    found = [
        describe_head(nn.Sequential(adapt("bloom", train)))
        for train in (options(), options(logits="targets"), options(loss="chunked", chunk=9))
    ]
    assert found == [("all", "full"), ("targets", "full"), ("all", "chunked(9)")]


def test_image_models_are_refused() -> None:
    for setting in ("train.logits=targets", "train.loss=chunked"):
        with pytest.raises(ConfigError, match=f"{setting} is for causal_lm"):
            resolve_cell("model=resnet_tiny", "dataset=tinyimagenet_sample", setting)


def test_a_chunked_loss_is_another_run() -> None:
    settings: list[tuple[str, ...]] = [(), ("train.loss=chunked",), ("train.loss=chunked", "train.loss_chunk_tokens=9")]
    configs: list[Config] = [resolve_cell(*overrides) for overrides in settings]
    assert len({*map(run_id, configs)}) == 3


def test_labels_are_an_input_of_the_head() -> None:
    batch = collate(options(loss="chunked"))(samples())
    assert batch.inputs[TARGET_LABELS].equal(batch.labels)
    assert collate(options())(samples()).inputs.keys() == {"input_ids", "attention_mask"}

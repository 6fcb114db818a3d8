"""The router loss of mixtures of experts counts as in transformers, and has a value of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distexp.config import ConfigError, TrainConfig
from distexp.data.base import Batch, LabelsForHead, TargetTokens
from distexp.data.text import TextCollate
from distexp.models import head, hf
from distexp.models.objective import evaluation_sums, loss_sum, partial_metrics
from tests.helpers.attention import make_samples
from tests.helpers.runs import resolve_cell
from tests.helpers.zoo import CAUSAL, TRANSFORMERS, WIDE, hugging_face
from tests.helpers.zoo import EXPERTS as EXPERT_NUMBERS

EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "phimoe", "jamba")
ROUTED = ("+model.options.output_router_logits=true", "+model.options.router_aux_loss_coef=0.1")
COLLATE = TextCollate(0, None)
VARIANTS = {
    "full": (TrainConfig(), COLLATE),
    "targets": (TrainConfig(logits="targets"), TargetTokens(COLLATE)),
    "chunked": (TrainConfig(loss="chunked", loss_chunk_tokens=5), LabelsForHead(COLLATE)),
}


def build(folder: Path, kind: str, *options: str, train: TrainConfig | None = None) -> torch.nn.Module:
    torch.manual_seed(5)
    model = hf.build(resolve_cell(*hugging_face(folder, kind), *options).model, 300)
    head.adapt_router(model)
    head.adapt_head(model, train or TrainConfig())
    return model


EXAMPLES = [
    *(("mixtral", variant) for variant in VARIANTS),
    ("qwen3_moe", "targets"),
    ("gpt_oss", "chunked"),
    ("jamba", "full"),
]
CASES = [(kind, variant) for kind in EXPERTS for variant in VARIANTS]


@pytest.mark.parametrize(
    ("kind", "variant"), [pytest.param(*case, marks=() if case in EXAMPLES else pytest.mark.release) for case in CASES]
)
def test_loss_and_gradients_are_those_of_transformers(kind: str, variant: str, tmp_path: Path) -> None:
    if TRANSFORMERS < (5, 23) and kind == "granitemoe":
        pytest.skip("transformers cannot compute its router loss")
    train, collate = VARIANTS[variant]
    samples = make_samples(7, 12)
    batch: Batch = collate(samples)
    theirs, ours = build(tmp_path / "a", kind, *ROUTED), build(tmp_path / "b", kind, *ROUTED, train=train)
    plain = COLLATE(samples)
    expected = type(theirs).forward(theirs, **plain.inputs, labels=plain.labels)
    expected.loss.backward()
    outputs = ours(**batch.inputs)
    normalizer = torch.tensor(batch.num_targets)
    loss = loss_sum("causal_lm", outputs, batch) / normalizer
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected.loss)
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, weight.grad, rtol=1e-4, atol=1e-6)
    parts = partial_metrics("causal_lm", outputs, batch, loss, normalizer)
    torch.testing.assert_close(parts[2], 0.1 * expected.aux_loss.detach())
    # An evaluation measures the cross entropy alone.
    entropy = evaluation_sums("causal_lm", outputs, batch)[0] / batch.num_targets
    torch.testing.assert_close(entropy.float(), (loss - parts[2]).detach())


@pytest.mark.skipif(TRANSFORMERS < (5, 23), reason="transformers does not return the router loss of JetMoE")
def test_the_weight_of_the_router_loss_may_have_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"kv_channels": 8, "num_key_value_heads": 2, **EXPERT_NUMBERS}
    monkeypatch.setitem(CAUSAL, "jetmoe", {**WIDE, **sizes, "output_router_logits": True, "aux_loss_coef": 0.1})
    model = build(tmp_path, "jetmoe")
    batch = COLLATE(make_samples(7, 12))
    expected = type(model).forward(model, **batch.inputs, labels=batch.labels).loss
    loss = loss_sum("causal_lm", model(**batch.inputs), batch) / batch.num_targets
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("kind", ["mixtral", "llama"])
def test_there_is_no_router_loss_without_the_option(kind: str, tmp_path: Path) -> None:
    batch = COLLATE(make_samples(7, 12))
    outputs = build(tmp_path, kind)(**batch.inputs)
    assert partial_metrics("causal_lm", outputs, batch, torch.zeros(()), torch.tensor(1)).shape == (2,)


def test_an_option_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.options.output_router_logits is not a value of the config.json of"):
        build(tmp_path, "llama", ROUTED[0])
    assert "router_aux_loss_coef" not in CAUSAL["llama"]
    model = build(tmp_path / "file", "llama")
    model.config.output_router_logits = True
    head.adapt_router(model)
    model.__class__ = type("FSDPLlamaForCausalLM", (type(model),), {})
    with pytest.raises(
        ConfigError, match="LlamaForCausalLM returns no router loss as aux_loss, which output_router_logits=true"
    ) as error:
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert "FSDP" not in str(error.value)

"""Fast attention computes what the reference does: losses, logits and gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from distexp.config import ConfigError
from distexp.models.attention import (
    alibi_bias,
    alibi_score,
    attend_flex,
    block_mask,
    causal_mask,
    number_documents,
)
from distexp.models.blueprint import read_attention
from distexp.models.transforms import find_units
from tests.helpers.attention import build, compute, logits_of, make_batch
from tests.helpers.runs import resolve_cell

pytestmark = pytest.mark.usefixtures("flex_backward_on_cpu")

SHAPES = {"one_token": (1,), "padded": (33, 7, 1), "longer_than_a_block": (150,)}
"""Lengths of the samples of a batch; shorter ones are padded on the right."""


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
@pytest.mark.parametrize("name", ["bloom_tiny", "gpt_tiny"])
def test_attention_equals_the_reference(name: str, attention: str, lengths: tuple[int, ...]) -> None:
    changes = {"seq_length": 256} if name == "gpt_tiny" else {"num_heads": 4}
    batch = make_batch(*lengths)
    logits, loss, gradients = compute(build(name, "auto", **changes), batch)
    fast = build(name, attention, **changes)
    fast_logits, fast_loss, fast_gradients = compute(fast, batch)
    assert read_attention(fast) == attention
    torch.testing.assert_close(fast_logits, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast_loss, loss, rtol=1e-5, atol=1e-7)
    assert fast_gradients.keys() == gradients.keys()
    for key, expected in gradients.items():
        torch.testing.assert_close(
            fast_gradients[key], expected, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize(("attention", "heads"), [("sdpa", 16), ("flex", 3)])
def test_alibi_has_the_slopes_of_any_number_of_heads(attention: str, heads: int) -> None:
    changes = {"num_heads": heads, "hidden_size": 16 * heads, "num_layers": 1}
    batch = make_batch(20, 9)
    logits, loss, _ = compute(build("bloom_tiny", "auto", **changes), batch)
    fast_logits, fast_loss, _ = compute(build("bloom_tiny", attention, **changes), batch)
    torch.testing.assert_close(fast_logits, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast_loss, loss, rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_a_compiled_model_has_constant_slopes() -> None:
    """Slopes computed in the graph would be fused into flex attention, where torch 2.11 writes invalid code."""
    model, graphs = build("bloom_tiny", "flex"), []

    def capture(graph: fx.GraphModule, _: list[Tensor]) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    inputs = make_batch(20, 9).inputs
    expected = logits_of(model(**inputs))
    compiled = torch.compile(model.forward, backend=capture, fullgraph=True, dynamic=False)
    torch.testing.assert_close(logits_of(compiled(**inputs)), expected)
    assert len(graphs) == 1
    assert "slopes" in graphs[0].code
    assert "pow" not in graphs[0].code


def test_the_attention_of_each_model_is_declared() -> None:
    found = [read_attention(build(name, "auto")) for name in ("bloom_tiny", "gpt_tiny")]
    assert found == ["eager", "sdpa"]
    assert read_attention(build("bloom_tiny", "eager")) == "eager"
    wrapped = nn.Module()
    wrapped.module = build("bloom_tiny", "sdpa")
    assert read_attention(wrapped) == "sdpa"
    assert read_attention(nn.Linear(2, 2)) is None


def test_bloom_computes_only_the_kept_logits() -> None:
    model, ids = build("bloom_tiny", "sdpa"), make_batch(9, 9).inputs["input_ids"]
    every, kept = model(input_ids=ids).logits, torch.tensor([0, 5])
    torch.testing.assert_close(model(input_ids=ids, logits_to_keep=kept).logits, every[:, kept])


def test_a_bloom_with_another_attention_has_the_names_of_transformers() -> None:
    reference, model = build("bloom_tiny", "auto"), build("bloom_tiny", "sdpa")
    assert type(model).__name__ == type(reference).__name__
    assert model.state_dict().keys() == reference.state_dict().keys()
    assert [name for name, _ in find_units(model)] == [name for name, _ in find_units(reference)]


@pytest.mark.parametrize("name", ["bloom_tiny", "gpt_tiny"])
def test_dropout_is_applied_with_sdpa(name: str) -> None:
    model, ids = build(name, "sdpa", dropout=0.5).train(), make_batch(9).inputs["input_ids"]
    assert not logits_of(model(input_ids=ids)).equal(logits_of(model(input_ids=ids)))
    model.eval()
    assert logits_of(model(input_ids=ids)).equal(logits_of(model(input_ids=ids)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model.attention=flex",),
            "model.attention=flex needs a GPU, because it has no backward pass on a CPU: choose ",
        ),
        (("model=gpt_tiny", "model.attention=eager"), "not supported by model=gpt_tiny: use one of auto, sdpa, flex"),
        (
            ("model.attention=flash",),
            "model.attention=flash is not supported by model=bloom_tiny: use one of auto, eager",
        ),
        (
            ("model.attention=flex", "model.dropout=0.1"),
            "has no dropout, but model.dropout=0.1: use model.dropout=0, or ",
        ),
        (
            ("model=resnet_tiny", "dataset=tinyimagenet_sample", "model.attention=sdpa"),
            "is not a key of model=resnet_tiny",
        ),
    ],
)
def test_unsupported_attention_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_cell("cluster.device=cpu", *overrides)


def test_flex_attention_is_for_gpus() -> None:
    assert resolve_cell("cluster=slurm", "model.attention=flex").model.attention == "flex"


@pytest.mark.parametrize(
    ("length", "starts"),
    [
        *((100, (0,)), (200, (0, 90)), (512, (0, 250, 400))),
        *(pytest.param(*case, marks=pytest.mark.release) for case in ((64, (0,)), (512, (0,)), (512, (0, 100)))),
        pytest.param(512, (0, 400), marks=pytest.mark.release),
    ],
)
def test_flex_attention_equals_sdpa(length: int, starts: tuple[int, ...]) -> None:
    """On a GPU this runs the kernels, whose blocks are masked in parts if several documents are in a row."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = torch.randn(4, 2, 4, length, 64, generator=generator).to(device)
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise((*starts, length))])
    documents = number_documents(positions.expand(2, -1).to(device)) if len(starts) > 1 else None
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    bias = alibi_bias(slopes, causal_mask(length, device, documents), torch.float32)

    def flex(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_flex(query, key, value, block_mask(length, device, documents), alibi_score(slopes))

    def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    results = []
    for attend in (flex, sdpa):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
        output = attend(*inputs)
        results.append([output, *torch.autograd.grad(output, inputs, gradient)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)

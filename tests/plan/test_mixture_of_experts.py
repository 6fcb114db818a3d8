"""The predicted memory of mixture-of-experts models, whose experts are one grouped matrix product."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distexp.plan.replay import StepTrace
from distexp.plan.trace.tracing import trace_step
from tests.helpers.runs import resolve_cell

EXPERTS, CHOSEN, HIDDEN, INNER, LENGTH = 4, 2, 64, 128, 32
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 600, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "max_position_embeddings": 64,
}  # fmt: skip


def traced(folder: Path, *overrides: str) -> StepTrace:
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    return trace_step(
        resolve_cell(
            *("model=hf", f"model.name={folder}", "model.init=random", "model.tokenizer=byte", "dataset=squad_sample"),
            *(f"dataset.max_length={LENGTH}", "dataset.padding=max_length", "train.micro_batch_size=1"),
            *("train.gradient_accumulation_steps=1", *overrides),
        )
    )


@pytest.mark.parametrize("overrides", [("precision=fp32",), ("precision=bf16",), ("precision=bf16", "zero_stage=2")])
def test_the_products_of_the_experts_are_activations_in_their_precision(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    trace = traced(tmp_path, *overrides)
    # Experts multiply in the precision of their weights: autocast does not convert them.
    element = 2 if "zero_stage=2" in overrides else 4
    size = LENGTH * CHOSEN * 2 * INNER * element  # gate and up projection of the chosen experts
    kept = [event for event in trace.events if event.part == "activations" and event.phase == "forward"]
    assert size in {event.bytes for event in kept}
    gradients = EXPERTS * 2 * INNER * HIDDEN * element  # of the weights of both projections
    assert gradients in {event.bytes for event in trace.events if event.phase == "backward"}

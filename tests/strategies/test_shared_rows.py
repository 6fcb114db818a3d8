"""What workers with the same rows do not support is refused before a worker starts, with what to type instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distexp.config import ConfigError
from tests.helpers.runs import resolve_cell
from tests.helpers.zoo import hugging_face

BASE = ("model=gpt_tiny", "dataset=synthetic", "strategy=fsdp", "cluster.device=cpu", "cluster.workers_per_node=2")
TENSOR, CONTEXT, FOUR = "parallel.tensor=2", "parallel.context=2", "cluster.workers_per_node=4"
DEGREES = {"tensor": TENSOR, "context": CONTEXT}
BATCH = "train.global_batch_size=8"
Row = tuple[tuple[str, ...], str, tuple[str, ...]]

BOTH: list[Row] = [
    (("strategy=single",), "not supported by strategy=single", ("strategy=fsdp",)),
    (("strategy=deepspeed",), "strategy=deepspeed: choose strategy=fsdp or strategy=ddp", ("strategy=ddp",)),
    (("cluster.workers_per_node=3",), "the workers of a node", (FOUR,)),
    (("cluster.nodes=2", "cluster.workers_per_node=1"), "a node", ("cluster.workers_per_node=2",)),
]
OWN: dict[str, list[Row]] = {
    "tensor": [
        (("adapter=lora", "adapter.dropout=0.1"), "adapter.dropout=0.1: use adapter.dropout=0", ("adapter.dropout=0",)),
        (
            ("sharding=hybrid_shard", "fsdp.replicas=4", FOUR),
            "fsdp.replicas=4 must divide the 2 groups of parallel.tensor=2: use fsdp.replicas=2",
            ("fsdp.replicas=2",),
        ),
        (("strategy=ddp", "offload=true"), "offload=true: use offload=false", ("offload=false",)),
        (("strategy=ddp", "ddp.static_graph=true"), "ddp.static_graph=True has no", ("ddp.static_graph=false",)),
        (("strategy=ddp", "ddp.communication=bf16"), "=bf16 has no effect", ("ddp.communication=fp32",)),
        (("scaling=weak_model", "model.tie_embeddings=true"), "use scaling=fixed", ("scaling=fixed",)),
        (("parallel.tensor=4", FOUR, "model.num_heads=2"), "num_heads=2: use parallel.tensor=2", (TENSOR,)),
        (("parallel.tensor=3",), "must divide model.num_heads=4: use parallel.tensor=2", (TENSOR,)),
        (("model=resnet_tiny",), "model=resnet_tiny, which has no attention to share", ("parallel.tensor=1",)),
    ],
    "context": [
        (
            ("parallel.tensor=4", "cluster.workers_per_node=8"),
            "parallel.context=2 parallel.tensor=4 (together 8) must divide model.num_heads=4: use parallel.context=1",
            ("parallel.context=1",),
        ),
        (
            (TENSOR, "cluster.workers_per_node=6"),
            "parallel.tensor=2 parallel.context=2 must divide the workers of a node, cluster.workers_per_node=6,",
            ("cluster.workers_per_node=8",),
        ),
        (("model.attention=flex",), "=flex of model=gpt_tiny: use model.attention=sdpa", ("model.attention=sdpa",)),
        (
            ("model=bloom_tiny", "model.attention=eager"),
            "=eager of model=bloom_tiny: use model.attention=sdpa",
            ("model.attention=auto",),
        ),
        (("parallel.context=4", FOUR, "model.num_heads=2"), "num_heads=2: use parallel.context=2", (CONTEXT,)),
        (("parallel.context=3",), "must divide model.num_heads=4: use parallel.context=2", (CONTEXT,)),
        (
            ("parallel.context=3", "cluster.workers_per_node=3"),
            "model.num_heads=4: use parallel.context=2 cluster.workers_per_node=4",
            (CONTEXT, FOUR),
        ),
        (
            ("model=resnet_tiny", "dataset=tinyimagenet_sample"),
            "which has no attention to share",
            ("parallel.context=1",),
        ),
    ],
}
ROWS = [(DEGREES[way], *row) for way, own in OWN.items() for row in (*BOTH, *own)]


@pytest.mark.parametrize(("degree", "overrides", "message", "fixed"), ROWS)
def test_what_is_not_supported_is_refused_with_what_to_type(
    degree: str, overrides: tuple[str, ...], message: str, fixed: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_cell(*BASE, degree, *overrides)
    assert resolve_cell(*BASE, degree, *overrides, *fixed)


TOGETHER = {
    "offload=true": ("offload=true: use offload=false", "offload=false"),
    "engine=hf_trainer": ("not supported by engine=hf_trainer: use engine=native, or parallel", "engine=native"),
    "train.compile=true": ("train.compile=blocks: use train.compile=false", "train.compile=false"),
    "model.dropout=0.1": ("model.dropout=0.1: use model.dropout=0", "model.dropout=0"),
    "train.micro_batch_size=auto": ("train.micro_batch_size=auto: use a number", "train.micro_batch_size=2"),
}
SLICES = {
    "adapter=lora": ("adapter=lora: use adapter=none", "adapter=none"),
    "train.logits=targets": ("=targets: use train.logits=all", "train.logits=all"),
    "dataset.max_length=33": ("max_length=33: use dataset.max_length=32", "dataset.max_length=32"),
}
"""Settings that one command has, the message of each, and what to type."""


@pytest.mark.parametrize(("degree", "together"), [(TENSOR, TOGETHER), (CONTEXT, TOGETHER | SLICES)])
def test_all_settings_that_are_not_supported_are_refused_in_one_command(
    degree: str, together: dict[str, tuple[str, str]]
) -> None:
    overrides = (*BASE, degree, *together, BATCH)
    with pytest.raises(ConfigError) as caught:
        resolve_cell(*overrides)
    errors = [error for error in caught.value.errors if error.startswith(degree)]
    assert len(errors) == len(together)
    for message, _ in together.values():
        assert sum(message in error for error in errors) == 1, message
    assert resolve_cell(*overrides, *(fixed for _, fixed in together.values()))


@pytest.mark.parametrize("overrides", [("parallel.context=3",), ("strategy=ddp", TENSOR, "offload=true")])
def test_one_error_has_no_second_one_that_proposes_something_else(overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_cell(*BASE, *overrides)
    assert len(caught.value.errors) == 1


def test_models_of_transformers_are_checked_before_a_worker_starts(tmp_path: Path) -> None:
    models = {kind: hugging_face(tmp_path / kind, kind) for kind in ("gpt2", "mamba", "llama", "qwen2", "mistral")}

    def resolve(kind: str, *overrides: str) -> None:
        resolve_cell("cluster.device=cpu", "dataset=synthetic", "strategy=fsdp", *models[kind], FOUR, *overrides)

    for kind, degree, message in (
        ("gpt2", TENSOR, r"\(gpt2\), because no plan .* use parallel\.tensor=1"),
        ("mamba", CONTEXT, r"\(mamba\), because no training .* use parallel\.context=1"),
        ("llama", "parallel.tensor=4", r"num_key_value_heads of the model=2: use parallel\.tensor=2"),
        ("llama", "parallel.context=4", r"num_key_value_heads of the model=2: use parallel\.context=2"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(kind, degree)
    with pytest.raises(ConfigError, match=r"model\.attention=eager of model=.*: use model\.attention=sdpa"):
        resolve("qwen2", CONTEXT, "model.attention=eager")
    for degree in DEGREES.values():
        resolve("mistral", degree)


def test_the_global_batch_counts_workers_with_their_own_rows() -> None:
    for degree in DEGREES.values():
        config = resolve_cell(*BASE, degree, FOUR, "train.global_batch_size=32", "train.micro_batch_size=2")
        assert (config.data_parallel, config.train.gradient_accumulation_steps) == (2, 8)


def test_fast_kernels_keep_what_shared_rows_support() -> None:
    for degree, logits in ((TENSOR, "targets"), (CONTEXT, "all")):
        train = resolve_cell(*BASE, degree, "kernels=fast").train
        assert (train.compiled, train.loss, train.logits) == ("none", "full", logits)

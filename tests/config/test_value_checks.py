"""Values that are wrong regardless of all other values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distexp.config import ConfigError
from tests.helpers.runs import resolve_cell


@pytest.mark.parametrize("key", ["cluster.partition", "cluster.account", "cluster.name", "model.name"])
def test_a_text_with_a_line_break_is_refused(key: str) -> None:
    """A line break would start a shell line in the sbatch file."""
    with pytest.raises(ConfigError, match=rf"{key}='a\\ntouch b' contains a control character: leave it out"):
        resolve_cell("cluster=slurm", f'{key}="a\ntouch b"')


@pytest.mark.parametrize("key", ["cluster.timeout_min", "cluster.hang_timeout_min", "train.learning_rate"])
def test_infinite_numbers_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}=inf must be a finite number"):
        resolve_cell(f"{key}=inf")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.log_every=1000000000000000000", "has more than 12 digits: lower it"),
        ("ddp.bucket_cap_mb=1e99", r"ddp.bucket_cap_mb=1e\+99 must be above 0 and below 1e\+06"),
        ("cluster.hang_timeout_min=1e99", "cluster.hang_timeout_min=1e.99 must be from 0.01 to below 30000"),
        ("plan.timeout_s=1e99", r"plan.timeout_s=1e\+99 is too large: it must be below 1e\+06"),
        ("train.learning_rate=1e99", r"is too large: it must be below 3e\+38"),
        ("train.gradient_clipping=1e99", r"is too large: it must be below 3e\+38"),
        ("train.seed=4294967296", "train.seed=4294967296 must be from 0 to below"),
        ("model.keys=[path,nonsense]", "model.keys contains 'nonsense', which is not a key of model: leave it out"),
        ("dataset.keys=[[1]]", r"dataset.keys=\[\[1\]\] must be a list of texts, as in \[a,b\]"),
        ("model.keys=[{a:1}]", "must be a list of texts"),
        ("measure.watchers=[[a]]", "must be a list of texts"),
        ("trusted_packages=[a.b]", r"is not the name of a package: write trusted_packages=\[a\]"),
        (f"model.tokenizer=/{'x' * 300}", "has a name of 300 bytes, more than 255: use a shorter one"),
        ("train.optimizer=AdamW_8bit", r"is not one of adamw, adamw8bit, sgd, muon. Did you mean adamw8bit\?"),
        ("dataset.num_workers=3000", "dataset.num_workers=3000 must be from 0 to below 257"),
        ("model.vocab_size=999999999999", "model.vocab_size=999999999999 must be from 1 to below 1000000000"),
        ("train.eps=0", "train.eps=0 must be at least 1.2e-38"),
        ("train.eps=1e-60", "train.eps=1e-60 must be at least 1.2e-38"),
        ("parallel.schedule=1F1B", r"Did you mean 1f1b\?"),
    ],
)
def test_values_that_no_run_can_have_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_cell(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "adapter.targets=[]",
            r"adapter.targets=\[\] is empty: name at least one, as in \[q_proj,v_proj\], or type null",
        ),
        ("adapter.targets=[{a:1}]", "adapter.targets=.* must be a list of texts"),
        (
            "adapter.targets=['.*q(']",
            "adapter.targets contains .*, but it takes ends of names and no regular expressions",
        ),
        ("adapter.modules_to_save=[[a]]", "adapter.modules_to_save=.* must be a list of texts"),
        ("adapter.rank=999999999999", "adapter.rank=999999999999 must be from 1 to below 100000"),
        ("adapter.rank=99999", "adapter.rank=99999 is more than model.hidden_size=64: use at most 64"),
    ],
)
def test_impossible_adapters_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_cell("adapter=lora", override)


LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
    **{"vocab_size": 512, "intermediate_size": 128, "max_position_embeddings": 128},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden_size": "64"},
            'has hidden_size="64" in its config.json, but it must be an integer from 1 to 10000000',
        ),
        (
            {"num_hidden_layers": -2},
            "num_hidden_layers=-2 .* must be an integer from 1 to 10000: correct the file, or add",
        ),
        (
            {"text_config": {"hidden_size": -3}},
            "has text_config.hidden_size=-3 in its config.json, but it must be an integer from 1 to 10000000: correct",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 in its config.json"),
        ({"hidden_size": [64]}, r"hidden_size=\[64\] .* must be an integer from 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 .* must be a divisor of num_attention_heads=4"),
        ({"num_local_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok=8 .* at most num_local_experts=4"),
        ({"model_type": "nosuch"}, 'model_type="nosuch" in its config.json, which the installed transformers does not'),
        ({"hidden_size": 65}, None),
        ({"intermediate_size": [128, 256], "num_key_value_heads": None}, None),
    ],
)
def test_impossible_architectures_are_refused(change: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    typed = ("model=hf", f"model.name={tmp_path}", "dataset=synthetic", "model.tokenizer=byte", "dataset.max_length=32")
    if message is None:
        resolve_cell(*typed)
        return
    with pytest.raises(ConfigError, match=message):
        resolve_cell(*typed)


def test_an_option_of_sbatch_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"cluster.sbatch.comment='x\\n#SBATCH --uid=0' contains a control character"):
        resolve_cell("cluster=slurm", '+cluster.sbatch.comment="x\n#SBATCH --uid=0"')

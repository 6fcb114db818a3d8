"""Small models of every task, with two workers: the losses are those of ``single``, and those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from distexp.config.tasks import TASKS
from distexp.data.tokenization import train_byte_tokenizer
from distexp.runs.record import RunRecord
from tests.helpers.grid import read_lines, run_grid
from tests.helpers.runs import HELPERS

VOCABULARY = 320
ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": VOCABULARY, **ENCODER}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    **{f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")},
    **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {  # task and configuration by type
    "t5": ("seq2seq_lm", {**T5, "decoder_start_token_id": 0, "dropout_rate": 0.0}),
    "bart": ("seq2seq_lm", BART),
    "mbart": ("seq2seq_lm", BART),
    "bert": ("masked_lm", TEXT),
    "roberta": ("masked_lm", {**TEXT, "max_position_embeddings": 64}),
    "distilbert": ("masked_lm", {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}),
    "electra": ("masked_lm", {**TEXT, "embedding_size": 8}),
    "deberta-v2": ("masked_lm", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "gpt2": ("causal_lm", {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "llama": ("causal_lm", {**TEXT, "num_key_value_heads": 2}),
    "vit": ("image_classification", {**ENCODER, "image_size": 32, "patch_size": 8}),
    "convnext": ("image_classification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "resnet": ("image_classification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
}
HEADS = {  # other tasks of the same folders
    "bert_classes": ("bert", "sequence_classification"),
    "gpt2_classes": ("gpt2", "sequence_classification"),
    "llama_classes": ("llama", "sequence_classification"),
    "bert_tags": ("bert", "token_classification"),
}
LIBRARIES = {"timm": ("timm", "test_vit", 160), "torchvision": ("torchvision", "shufflenet_v2_x0_5", 64)}
BATCH_NORMS = {"resnet", "torchvision"}
"""Models whose running statistics, which an evaluation uses, are those of one worker."""

COMMON = (
    "dataset=synthetic",
    "dataset.train_size=90",
    "dataset.eval_size=10",
    "dataset.max_length=24",
    "dataset.image_size=32",
    "dataset.num_classes=5",
    "train.max_steps=4",
)
STRATEGIES = {
    "ddp": "strategy=ddp",
    "full_shard": "sharding=full_shard",
    "zero1": "zero_stage=1",
    "zero3": "zero_stage=3",
}
SCRIPT = HELPERS / "many_runs.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """Return the overrides of each model."""
    folder = tmp_path_factory.mktemp("models")
    found = {name: save(folder / name, name) for name in CONFIGS}
    found |= {name: (*found[base], f"model.task={task}") for name, (base, task) in HEADS.items()}
    for name, (library, architecture, size) in LIBRARIES.items():
        found[name] = (f"model={library}", f"model.name={architecture}", f"dataset.image_size={size}")
    return found


def save(folder: Path, name: str) -> tuple[str, ...]:
    """Save a small random model with a tokenizer; return its overrides."""
    task, values = CONFIGS[name]
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(name, **values)
    getattr(transformers, TASKS[task].auto_class).from_config(config).save_pretrained(folder)
    train_byte_tokenizer(["Ada is a baker from Oslo."], 300).save(folder)
    return "model=hf", f"model.name={folder}", "model.dropout=0", "train.micro_batch_size=4"


@pytest.fixture(scope="module")
def runs(models: dict[str, tuple[str, ...]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all models with each strategy; return the folder of the cells, ``<model>.<strategy>``."""
    folder = tmp_path_factory.mktemp("runs")
    single = {f"{name}.single": ("strategy=single", *model, *own(name)) for name, model in models.items()}
    run_grid(SCRIPT, folder / "1", 1, single)
    cells = {
        f"{name}.{strategy}": (override, *model, *own(name))
        for name, model in models.items()
        for strategy, override in STRATEGIES.items()
    }
    run_grid(SCRIPT, folder / "2", 2, cells)
    return folder


def own(name: str) -> tuple[str, ...]:
    """Return the overrides of a cell that models do not change."""
    saves = ("train.save_model=true",) if name not in LIBRARIES else ()
    size = () if name not in LIBRARIES else (f"dataset.image_size={LIBRARIES[name][2]}",)
    return (*COMMON, *size, *saves)


def read(folder: Path) -> tuple[list[float], RunRecord]:
    return [line["loss"] for line in read_lines(folder) if "loss" in line], RunRecord.read(folder)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [*CONFIGS, *HEADS, *LIBRARIES])
def test_every_task_trains_as_with_single(name: str, strategy: str, runs: Path) -> None:
    losses, record = read(runs / "2" / f"{name}.{strategy}")
    expected, reference = read(runs / "1" / f"{name}.single")
    assert len(losses) == 4
    assert losses == pytest.approx(expected, rel=0, abs=1e-5)
    assert reference.metrics is not None
    assert record.metrics is not None
    if name not in BATCH_NORMS:
        assert record.metrics.eval_loss == pytest.approx(reference.metrics.eval_loss, abs=1e-5)
        assert record.metrics.eval_accuracies == reference.metrics.eval_accuracies
    assert bool(record.metrics.eval_accuracies) == TASKS[reference.config["model"]["task"]].has_classes
    assert record.metrics.model_tflops_per_sample

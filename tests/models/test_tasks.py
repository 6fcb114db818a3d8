"""Small models of every task, with two workers: the losses are those of ``single``, and those of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from distexp.config import ConfigError
from distexp.config.tasks import TASKS
from distexp.data.base import IGNORE, Batch
from distexp.data.loader import BatchSharding, ShardedBatchSampler
from distexp.data.tokenization import train_byte_tokenizer
from distexp.distributed.context import Context
from distexp.models import hf, task_models
from distexp.models.dropout import DROPOUT_ENDINGS
from distexp.runs.record import RunRecord
from distexp.training.build import load_data
from distexp.training.inputs import StepPlan
from tests.helpers import grid
from tests.helpers.grid import read_lines, run_grid
from tests.helpers.runs import HELPERS, resolve_cell

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
HEADS = {  # other tasks of these types
    "bert_classes": ("bert", "sequence_classification"),
    "gpt2_classes": ("gpt2", "sequence_classification"),
    "llama_classes": ("llama", "sequence_classification"),
    "bert_tags": ("bert", "token_classification"),
}
LIBRARIES = {"timm": ("timm", "test_vit", 160), "torchvision": ("torchvision", "shufflenet_v2_x0_5", 64)}
BATCH_NORMS = {"resnet", "torchvision"}
"""Models whose running statistics, which an evaluation uses, are those of one worker."""

SYNTHETIC = "dataset=synthetic"
COMMON = (
    SYNTHETIC,
    "dataset.train_size=90",
    "dataset.eval_size=10",
    "dataset.max_length=24",
    "dataset.image_size=32",
    "dataset.num_classes=5",
    "train.max_steps=4",
    "train.measure_after_step=1",
    "train.weight_decay=0",
)
STRATEGIES = {
    "ddp": "strategy=ddp",
    "full_shard": "sharding=full_shard",
    "zero1": "zero_stage=1",
    "zero3": "zero_stage=3",
}
NAMES = (*CONFIGS, *HEADS, *LIBRARIES)


def strategies_of(name: str) -> tuple[str, str]:
    """Return the strategies of a model: ZeRO-3, which changes a model most, and one of the others."""
    others = [strategy for strategy in STRATEGIES if strategy != "zero3"]
    return "zero3", others[NAMES.index(name) % len(others)]


TRAINER = ("bert_tags", "vit")
"""Models that the Trainer of transformers trains with ZeRO-3 too. It then partitions each model that is built later."""

EXAMPLES = ("t5", "bert", "deberta-v2", "vit", "resnet", "llama_classes", "bert_tags", "timm", "torchvision")
"""Models of each task that differ most. The others are left to a release."""


def cases(names: Iterable[str]) -> list[Any]:
    """Return the test parameters of models, each with its strategies."""
    found = [(name, each) for name in names for each in (*strategies_of(name), *["trainer"] * (name in TRAINER))]
    return [pytest.param(*case, marks=mark(case[0])) for case in found]


def mark(name: str) -> pytest.MarkDecorator:
    """Return the mark of a model."""
    return pytest.mark.slow if name in EXAMPLES else pytest.mark.release


SCRIPT = HELPERS / "many_runs.py"
WHOLE = (*grid.COMMON, "train.micro_batch_size=24", "train.gradient_accumulation_steps=1")
"""The settings of ``run_grid``, with whole global batches."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """Return the overrides of each model."""
    folder = tmp_path_factory.mktemp("models")
    found = {name: save(folder / name, name) for name in CONFIGS}
    found |= {name: save(folder / name, base, task) for name, (base, task) in HEADS.items()}
    for name, (library, architecture, size) in LIBRARIES.items():
        found[name] = (f"model={library}", f"model.name={architecture}", f"dataset.image_size={size}")
    return found


def save(folder: Path, name: str, other_task: str | None = None) -> tuple[str, ...]:
    """Save a small random model without dropout, and a tokenizer; return its overrides."""
    task, values = CONFIGS[name]
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(name, num_labels=5, **values)
    for key, value in config.to_dict().items():
        if key.endswith(DROPOUT_ENDINGS) and isinstance(value, float):
            setattr(config, key, 0.0)
    getattr(transformers, TASKS[other_task or task].auto_class).from_config(config).save_pretrained(folder)
    train_byte_tokenizer(["Ada is a baker from Oslo."], 300).save(folder)
    return "model=hf", f"model.name={folder}"


@pytest.fixture(scope="module")
def runs(models: dict[str, tuple[str, ...]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains a model, and all with its mark; it returns the folder of ``<model>.<strategy>``."""

    @cache
    def run(are_examples: bool) -> Path:
        folder = tmp_path_factory.mktemp("runs")
        chosen = {name: model for name, model in models.items() if (name in EXAMPLES) == are_examples}
        single = {f"{name}.single": ("strategy=single", *model, *own(name)) for name, model in chosen.items()}
        run_grid(SCRIPT, folder / "1", 1, single)
        cells = {
            f"{name}.{strategy}": (STRATEGIES[strategy], *model, *own(name))
            for name, model in chosen.items()
            for strategy in strategies_of(name)
        }
        trainer = ("engine=hf_trainer", STRATEGIES["zero3"])
        cells |= {f"{name}.trainer": (*trainer, *models[name], *own(name)) for name in TRAINER if name in chosen}
        run_grid(SCRIPT, folder / "2", 2, cells)
        return folder

    return lambda name: run(name in EXAMPLES)


def own(name: str) -> tuple[str, ...]:
    """Return the overrides of a cell that models do not change."""
    saves = ("train.save_model=true",) if name not in LIBRARIES else ()
    size = () if name not in LIBRARIES else (f"dataset.image_size={LIBRARIES[name][2]}",)
    # AdamW amplifies the rounding of batch norms over few pixels.
    optimizer = ("train.optimizer=sgd",) if name == "torchvision" else ()
    return (*COMMON, *size, *saves, *optimizer)


def read(folder: Path) -> tuple[list[float], RunRecord]:
    lines = read_lines(folder / "metrics.jsonl")
    return [line["loss"] for line in lines if "loss" in line], RunRecord.read(folder / "record.json")


@pytest.mark.parametrize(("name", "strategy"), cases(NAMES))
def test_every_task_trains_as_with_single(name: str, strategy: str, runs: Callable[[str], Path]) -> None:
    losses, record = read(runs(name) / "2" / f"{name}.{strategy}")
    expected, reference = read(runs(name) / "1" / f"{name}.single")
    assert len(losses) == 4
    assert losses == pytest.approx(expected, rel=0, abs=1e-5)
    assert reference.metrics is not None
    assert record.metrics is not None
    if name not in BATCH_NORMS:
        assert record.metrics.eval_loss == pytest.approx(reference.metrics.eval_loss, abs=1e-5)
        assert record.metrics.eval_accuracies == reference.metrics.eval_accuracies
    assert bool(record.metrics.eval_accuracies) == TASKS[reference.config["model"]["task"]].has_classes
    if name != "deberta-v2":  # A note reports that its FLOPs are not known.
        assert record.metrics.model_tflops_per_sample


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=mark(name))
        for name in ("t5", "bart", "bert", "bert_classes", "bert_tags", "llama_classes")
    ],
)
def test_the_losses_are_those_of_transformers(
    name: str, models: dict[str, tuple[str, ...]], runs: Callable[[str], Path]
) -> None:
    """A loop over whole global batches, whose loss is that of transformers for ``labels``, and a saved model."""
    config = resolve_cell("strategy=single", "cluster.workers_per_node=1", *WHOLE, *models[name], *own(name))
    context = Context(0, 1, 0, 1, 1, torch.device("cpu"), run_dir=runs(name))
    data = load_data(config, context)
    kind = getattr(transformers, config.model.traits.auto_class)
    model = kind.from_pretrained(config.model.name)
    model.config.pad_token_id = 0
    beta1, beta2 = config.train.betas
    optimizer = torch.optim.AdamW(model.parameters(), betas=(beta1, beta2), eps=config.train.eps, weight_decay=0.0)
    sampler = ShardedBatchSampler(len(data.train), BatchSharding(0, 1, 24), seed=config.train.seed, shuffle=True)
    plan, losses = StepPlan(config.train, sampler.steps_per_epoch), []
    for step, indices in enumerate(sampler):
        optimizer.param_groups[0]["lr"] = plan.learning_rate(step)
        batch = data.collate([data.train[index] for index in indices if index < len(data.train)])
        loss = model(**inputs_of(batch), labels=batch.labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.train.gradient_clipping or 1e9)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    expected, record = read(runs(name) / "1" / f"{name}.single")
    assert losses == pytest.approx(expected, rel=3e-7, abs=1e-6)  # three units in the last place of fp32
    saved, info = kind.from_pretrained(runs(name) / "2" / f"{name}.zero3" / "model", output_loading_info=True)
    assert not info["missing_keys"]
    batch = data.collate([data.evaluation[index] for index in range(10)])
    assert record.metrics is not None
    with torch.no_grad():
        assert saved.eval()(**inputs_of(batch), labels=batch.labels).loss.item() == pytest.approx(
            record.metrics.eval_loss, abs=1e-5
        )


def inputs_of(batch: Batch) -> dict[str, Any]:
    return {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}


def test_a_classifier_may_start_from_another_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "bert")
    model = hf.build(
        resolve_cell("model=hf", f"model.name={tmp_path}", "model.task=token_classification", SYNTHETIC).model, 7
    )
    assert "has no weights for classifier.bias, classifier.weight: they start at random" in capsys.readouterr().out
    assert model.get_submodule("classifier").weight.shape == (7, 16)
    saved = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).bert.state_dict()
    assert all(tensor.equal(saved[name]) for name, tensor in model.get_submodule("bert").state_dict().items())


def test_the_task_is_that_of_the_architecture(tmp_path: Path) -> None:
    def task(*overrides: str, **content: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(content))
        return resolve_cell("model=hf", f"model.name={tmp_path}", "dataset=synthetic", *overrides).model.task

    assert task(model_type="gpt2", architectures=["GPT2LMHeadModel"]) == "causal_lm"
    assert task(model_type="bert", architectures=["BertForMaskedLM"]) == "masked_lm"
    assert task(model_type="t5", architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True) == "seq2seq_lm"
    assert task(model_type="marian", architectures=["MarianMTModel"], is_encoder_decoder=True) == "seq2seq_lm"
    assert task(model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"]) == "causal_lm"
    assert task(model_type="vit", architectures=["ViTForImageClassification"]) == "image_classification"
    assert task(model_type="llama") == "causal_lm"
    assert task("model.task=token_classification", model_type="bert", architectures=["BertForMaskedLM"]) == (
        "token_classification"
    )
    with pytest.raises(ConfigError, match=r"is not a causal LM.*model.task=masked_lm or sequence_classification"):
        task("model.task=causal_lm", model_type="bert", architectures=["BertForMaskedLM"])
    with pytest.raises(ConfigError, match=r"dataset=squad_sample is for causal_lm, but model=.* is for masked_lm: "):
        task("dataset=squad_sample", model_type="bert", architectures=["BertForMaskedLM"])
    with pytest.raises(ConfigError, match=r"train.logits=targets is for causal_lm"):
        task("train.logits=targets", model_type="bert", architectures=["BertForMaskedLM"])


@pytest.mark.parametrize("kind", ["mbart", "fsmt"])
def test_a_row_without_targets_has_inputs_for_the_decoder(kind: str, tmp_path: Path) -> None:
    sizes = BART if kind == "mbart" else {**BART, "langs": ["a", "b"], "src_vocab_size": 320, "tgt_vocab_size": 320}
    kinds = {"model_type": kind, "pad_token_id": 0, "decoder_start_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **kinds}))
    typed = ("model=hf", f"model.name={tmp_path}", "model.init=random", "model.tokenizer=byte", "model.task=seq2seq_lm")
    model = hf.build(resolve_cell(*typed, SYNTHETIC).model, 300)
    labels = torch.tensor([[5, 6, 2], [IGNORE] * 3])
    before = labels.clone()
    assert model(input_ids=torch.full((2, 4), 7), decoder_labels=labels).logits.shape == (2, 3, 320)
    assert labels.equal(before)


def test_models_that_do_not_fit_are_refused_with_what_fits(tmp_path: Path) -> None:
    save(tmp_path, "t5")
    with pytest.raises(ConfigError, match=r"is not for masked_lm \(t5\): type model.task=seq2seq_lm or"):
        hf.build(resolve_cell("model=hf", f"model.name={tmp_path}", "model.task=masked_lm", SYNTHETIC).model, 300)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "decoder_start_token_id": None}))
    with pytest.raises(ConfigError, match=r"cannot start its decoder .*: set decoder_start_token_id and pad_token_id"):
        hf.build(resolve_cell("model=hf", f"model.name={tmp_path}", SYNTHETIC).model, 300)
    image = ("model=timm", "model.name=test_vitt", "dataset=synthetic", "dataset.image_size=32")
    with pytest.raises(ConfigError, match=r"model.name=test_vitt is not a model of timm: use test_vit"):
        task_models.build_timm(resolve_cell(*image).model, 5)
    with pytest.raises(ConfigError, match=r"model.name=resnet19 is not a model of torchvision: use resnet1"):
        task_models.build_torchvision(resolve_cell("model=torchvision", "model.name=resnet19").model, 5)
    with pytest.raises(ConfigError, match=r"model.name=raft_small is no image classifier: use one, such as resnet18"):
        task_models.build_torchvision(resolve_cell("model=torchvision", "model.name=raft_small").model, 5)
    save(tmp_path / "vit", "vit")
    model = hf.build(resolve_cell("model=hf", f"model.name={tmp_path / 'vit'}", SYNTHETIC).model, 5)
    with pytest.raises(ConfigError, match=r"dataset.image_size=64 is not supported by .*: use dataset.image_size=32"):
        task_models.check_images(model.to("meta"), 64)


def test_a_classifier_of_the_last_position_is_refused_unless_it_reads_the_first(tmp_path: Path) -> None:
    transformers.XLNetConfig(vocab_size=300, d_model=8, n_layer=1, n_head=2, d_inner=8).save_pretrained(tmp_path)
    words = ("model=hf", f"model.name={tmp_path}", "model.init=random", "model.task=sequence_classification", SYNTHETIC)
    with pytest.raises(ConfigError, match=r"at its last position, .* add model.options.summary_type=first$"):
        hf.build(resolve_cell(*words).model, 5)
    assert hf.build(resolve_cell(*words, "++model.options.summary_type=first").model, 5).config.summary_type == "first"


def test_a_model_with_windows_is_refused_for_smaller_images_and_not_changed(tmp_path: Path) -> None:
    config = transformers.SwinConfig(embed_dim=8, depths=[1, 1], num_heads=[1, 1], image_size=112, window_size=7)
    config.architectures = ["SwinForImageClassification"]
    config.save_pretrained(tmp_path)
    cell = resolve_cell("model=hf", f"model.name={tmp_path}", "model.init=random", SYNTHETIC)
    model = hf.build(cell.model, 5).to("meta")
    with pytest.raises(ConfigError, match=r"dataset.image_size=16 is not supported by .*: use dataset.image_size=112"):
        task_models.check_images(model, 16)
    task_models.check_images(model, 112)


def test_weights_of_an_image_model_are_read_from_a_file(tmp_path: Path) -> None:
    def build(classes: int, *overrides: str) -> nn.Module:
        return task_models.build_torchvision(
            resolve_cell("model=torchvision", "model.name=shufflenet_v2_x0_5", *overrides).model, classes
        )

    path = tmp_path / "weights.pth"
    torch.save(build(7).state_dict(), path)
    pretrained = ("model.init=pretrained", f"model.path={path}")
    weights, expected = build(7, *pretrained).state_dict(), torch.load(path)
    assert all(weights[name].equal(tensor) for name, tensor in expected.items())
    other = build(5, *pretrained).state_dict()  # another classifier, which starts at random
    assert {name for name in expected if other[name].shape != expected[name].shape} == {"fc.weight", "fc.bias"}
    torch.save({name: tensor for name, tensor in expected.items() if not name.startswith("conv1")}, path)
    with pytest.raises(ConfigError, match=r"lacks weights of ShuffleNetV2, or they have another shape: conv1"):
        build(7, *pretrained)

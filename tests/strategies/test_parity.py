"""Every strategy gives the same training as ``single``: loss, gradient norm, weights and evaluation.

The reference runs use one worker, the others 2, 3, 4 or 6, with the same global batch of 24 samples. The configuration
covers answers of different lengths, accumulation, clipping, warm-up, and a last step of each epoch that no number of
workers divides. No number of workers divides the evaluation sets either.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distexp.data import squad_sample
from distexp.models.objective import loss_sum
from distexp.runs.record import RunRecord, RunSpec
from tests.helpers.evaluation_cells import (
    ANSWERS,
    EXACT_MATCH,
    F1,
    IMAGES,
    MEMORIZED,
    SWAPPED,
    evaluation_cells,
    write_questions,
)
from tests.helpers.grid import FP16, Cells, Runs, read_lines, run_grid, run_once
from tests.helpers.runs import HELPERS

SCRIPT = HELPERS / "many_runs.py"
STEPS = 4
"""An epoch and a step. The last step of an epoch has fewer samples."""

COMMON = (
    f"train.max_steps={STEPS}",
    "train.gradient_clipping=0.5",
    "train.weight_decay=0.1",
    "dataset.train_size=65",
    "dataset.eval_size=31",
    "train.save_model=true",
)
HF = "engine=hf_trainer"
TARGETS = "train.logits=targets"
CHUNKED = ("train.loss=chunked", "train.loss_chunk_tokens=37")
SDPA = "model.attention=sdpa"
PACKED = (SDPA, "dataset.packing=true", "dataset.max_length=128")
BUCKETED = ("dataset.bucketing=true",)
STEP = "train.compute_weights=step"
UNITS = "fsdp.blocks_per_unit=2"
ASYNC = ("deepspeed.check_overflow=false", "deepspeed.async_update=true")
SEARCHED = ("train.micro_batch_size=auto", "train.global_batch_size=24")
FROZEN = ("model=gpt_tiny", "model._target_=frozen_gpt.build", "trusted_packages=[frozen_gpt]")
SGD = ("train.optimizer=sgd", "train.schedule=step", "train.step_size=1")
SCALED = (FP16, "deepspeed.config_file=QUESTIONS/scaled.json")
"""fp16 with a loss scale that no gradient exceeds. With the usual first scale, the first updates would be skipped."""
CELLS: dict[
    tuple[str, int], dict[str, tuple[str, ...]]
] = {  # by the heaviest library that the workers import, and the number of workers
    ("torch", 2): {
        "ddp": ("strategy=ddp",),
        "full_shard": ("sharding=full_shard",),
        "shard_grad_op_offload": ("sharding=shard_grad_op", "offload=true"),
        "hybrid_shard": ("sharding=hybrid_shard",),
    },
    ("torch_options", 2): {
        "targets_gpt_full_shard_units": ("sharding=full_shard", UNITS, "model=gpt_tiny", TARGETS),
        "bf16_ddp_communication": ("strategy=ddp", "precision=bf16", "ddp.communication=bf16"),
        "bf16_ddp_step": ("strategy=ddp", "precision=bf16", STEP),
        "searched_full_shard": ("sharding=full_shard", *SEARCHED),
        "bucketed_no_shard": (*BUCKETED, "sharding=no_shard"),
        "ddp_sgd": ("strategy=ddp", *SGD),
        "bf16_full_shard": ("sharding=full_shard", "precision=bf16"),
        "gpt_ddp_model_compiled": ("strategy=ddp", "model=gpt_tiny", TARGETS, "train.compile=model"),
        "chunked_full_shard_checkpointed": (*CHUNKED, "sharding=full_shard", "train.activation_checkpointing=true"),
        "hf_ddp": (HF, "strategy=ddp"),
        "packed_full_shard": (*PACKED, "sharding=full_shard"),
    },
    ("torch_release", 2): {
        "gpt_full_shard_units": ("sharding=full_shard", UNITS, "model=gpt_tiny"),
        "full_shard_units_offload": ("sharding=full_shard", UNITS, "offload=true"),
        "no_shard": ("sharding=no_shard",),
        "full_shard_checkpointed": ("sharding=full_shard", "train.activation_checkpointing=true"),
        "targets_gpt_full_shard": (TARGETS, "sharding=full_shard", "model=gpt_tiny"),
        "chunked_full_shard": (*CHUNKED, "sharding=full_shard"),
        "bucketed_ddp": (*BUCKETED, "strategy=ddp"),
        "chunked_gpt_full_shard": (*CHUNKED, TARGETS, "sharding=full_shard", "model=gpt_tiny"),
        "no_shard_units": ("sharding=no_shard", UNITS),
        "shard_grad_op_units": ("sharding=shard_grad_op", UNITS),
        "hybrid_shard_units": ("sharding=hybrid_shard", "fsdp.blocks_per_unit=auto"),
        "full_shard_units_prefetch": ("sharding=full_shard", UNITS, "fsdp.forward_prefetch=1"),
        "bf16_ddp_step_communication": ("strategy=ddp", "precision=bf16", STEP, "ddp.communication=bf16"),
        "ddp_model_compiled": ("strategy=ddp", "train.compile=model"),
        "gpt_ddp_compiled": ("strategy=ddp", "model=gpt_tiny", "train.compile=true"),
        "ddp_copied_gradients": ("strategy=ddp", "ddp.gradient_as_bucket_view=false"),
        "no_shard_offload": ("sharding=no_shard", "offload=true"),
        "full_shard_offload": ("sharding=full_shard", "offload=true"),
        "shard_grad_op": ("sharding=shard_grad_op",),
        "hybrid_shard_offload": ("sharding=hybrid_shard", "offload=true"),
        "ddp_checkpointed": ("strategy=ddp", "train.activation_checkpointing=true"),
        "gpt_ddp": ("strategy=ddp", "model=gpt_tiny"),
        "gpt_full_shard": ("sharding=full_shard", "model=gpt_tiny"),
        "full_shard_prefetch": ("sharding=full_shard", "fsdp.forward_prefetch=1", "fsdp.backward_prefetch=2"),
        "bf16_ddp": ("strategy=ddp", "precision=bf16"),
        "targets_ddp": (TARGETS, "strategy=ddp"),
        "chunked_ddp": (*CHUNKED, "strategy=ddp"),
        "chunked_hybrid_shard_offload": (*CHUNKED, "sharding=hybrid_shard", "offload=true"),
        "chunked_gpt_shard_grad_op": (*CHUNKED, "sharding=shard_grad_op", "model=gpt_tiny"),
        "chunked_ddp_checkpointed": (*CHUNKED, "strategy=ddp", "train.activation_checkpointing=true"),
        "chunked_gpt_ddp_compiled": (*CHUNKED, TARGETS, "strategy=ddp", "model=gpt_tiny", "train.compile=true"),
        "bf16_chunked_ddp": (*CHUNKED, "strategy=ddp", "precision=bf16"),
        "bf16_chunked_full_shard": (*CHUNKED, TARGETS, "sharding=full_shard", "precision=bf16"),
        "sdpa_ddp": (SDPA, "strategy=ddp"),
        "sdpa_full_shard": (SDPA, "sharding=full_shard"),
        "packed_ddp": (*PACKED, "strategy=ddp"),
        "packed_targets_shard_grad_op": (*PACKED, TARGETS, "sharding=shard_grad_op"),
    },
    ("deepspeed_trainer", 2): {
        "hf_shard_grad_op_offload": (HF, "sharding=shard_grad_op", "offload=true"),
        "hf_chunked_zero3": (HF, *CHUNKED, TARGETS, "zero_stage=3"),
        "hf_bf16_zero2": (HF, "zero_stage=2", "precision=bf16"),
    },
    ("deepspeed_trainer_release", 2): {
        "hf_bf16_full_shard": (HF, "sharding=full_shard", "precision=bf16"),
        "hf_packed_full_shard": (HF, *PACKED, "sharding=full_shard"),
        "hf_zero0": (HF, "zero_stage=0"),
        "hf_targets_full_shard": (HF, TARGETS, "sharding=full_shard"),
        "hf_sgd_ddp": (HF, "strategy=ddp", "train.optimizer=sgd", "train.schedule=step", "train.step_size=1"),
        "hf_full_shard_checkpointed": (HF, "sharding=full_shard", "train.activation_checkpointing=true"),
        "hf_gpt_hybrid_shard": (HF, "sharding=hybrid_shard", "model=gpt_tiny"),
        "hf_targets_zero2": (HF, TARGETS, "zero_stage=2"),
        "hf_chunked_ddp": (HF, *CHUNKED, "strategy=ddp"),
        "hf_chunked_gpt_full_shard": (HF, *CHUNKED, "sharding=full_shard", "model=gpt_tiny"),
        "hf_bf16_chunked_full_shard": (HF, *CHUNKED, "sharding=full_shard", "precision=bf16"),
        "hf_gpt_zero1": (HF, "zero_stage=1", "model=gpt_tiny"),
        "hf_zero2_offload": (HF, "zero_stage=2", "offload=true"),
        "hf_fp16_zero0": (HF, "zero_stage=0", *SCALED),
        "hf_bf16_zero0": (HF, "zero_stage=0", "precision=bf16"),
    },
    ("torch", 4): {
        "hybrid_2x2_offload": ("sharding=hybrid_shard", "fsdp.replicas=2", "offload=true"),
        "hf_hybrid_2x2": (HF, "sharding=hybrid_shard", "fsdp.replicas=2"),
    },
    ("torch_release", 4): {
        "hybrid_2x2": ("sharding=hybrid_shard", "fsdp.replicas=2"),
        "full_shard_4": ("sharding=full_shard",),
    },
    ("deepspeed", 2): {
        "zero1": ("zero_stage=1",),
        "zero3": ("zero_stage=3",),
        "fp16_zero0": ("zero_stage=0", *SCALED),
        "frozen_zero1": (*FROZEN, "zero_stage=1"),
        "frozen_zero3": (*FROZEN, "zero_stage=3"),
    },
    ("deepspeed_options", 2): {
        "chunked_zero3": (*CHUNKED, TARGETS, "zero_stage=3"),
        "zero3_offload": ("zero_stage=3", "offload=true"),
        "zero2_checkpointed": ("zero_stage=2", "train.activation_checkpointing=true"),
        "bf16_zero0_in_file": ("zero_stage=0", "precision=bf16", "deepspeed.config_file=QUESTIONS/bf16.json"),
        "bf16_zero1_async": ("zero_stage=1", "precision=bf16", *ASYNC),
        "bf16_zero3": ("zero_stage=3", "precision=bf16"),
    },
    ("deepspeed_release", 2): {
        "fp16_zero1": ("zero_stage=1", *SCALED),
        "zero2": ("zero_stage=2",),
        "gpt_zero3": ("zero_stage=3", "model=gpt_tiny"),
        "packed_zero2": (*PACKED, "zero_stage=2"),
        "hf_zero3_offload": (HF, "zero_stage=3", "offload=true"),
        "zero0": ("zero_stage=0",),
        "fp16_zero0_sgd": ("zero_stage=0", *SCALED, *SGD),
        "zero1_offload": ("zero_stage=1", "offload=true"),
        "zero2_offload": ("zero_stage=2", "offload=true"),
        "zero1_sgd": ("zero_stage=1", "train.optimizer=sgd", "train.schedule=step", "train.step_size=1"),
        "bf16_zero2": ("zero_stage=2", "precision=bf16"),
        "bf16_zero2_async": ("zero_stage=2", "precision=bf16", *ASYNC),
        "targets_zero3": (TARGETS, "zero_stage=3"),
        "chunked_zero0": (*CHUNKED, "zero_stage=0"),
        "chunked_zero1": (*CHUNKED, TARGETS, "zero_stage=1"),
        "chunked_zero2_offload": (*CHUNKED, "zero_stage=2", "offload=true"),
        "chunked_gpt_zero3": (*CHUNKED, "zero_stage=3", "model=gpt_tiny"),
        "bf16_chunked_zero2": (*CHUNKED, "zero_stage=2", "precision=bf16"),
        "sdpa_zero3": (SDPA, "zero_stage=3"),
        "packed_zero0": (*PACKED, "zero_stage=0"),
        "packed_chunked_zero1": (*PACKED, *CHUNKED, TARGETS, "zero_stage=1"),
        "packed_zero3": (*PACKED, "zero_stage=3"),
        "bucketed_zero2": (*BUCKETED, "zero_stage=2"),
    },
    ("deepspeed", 3): {"full_shard_3": ("sharding=full_shard",), "zero2_3": ("zero_stage=2",)},
    ("deepspeed_release", 3): {"ddp_3": ("strategy=ddp",), "zero3_3": ("zero_stage=3",)},
    ("torch_release", 6): {"hybrid_3x2": ("sharding=hybrid_shard", "fsdp.replicas=3")},
}
ORDINARY = {("torch", 2), ("deepspeed", 2)}
EVALUATED = {
    ("deepspeed", 3): evaluation_cells(full_shard_3=("sharding=full_shard",), zero3_3=("zero_stage=3",)),
    ("deepspeed_release", 3): evaluation_cells(ddp_3=("strategy=ddp",), hf_full_shard_3=(HF, "sharding=full_shard")),
    ("torch_release", 6): evaluation_cells(ddp_6=("strategy=ddp", "train.micro_batch_size=4")),
}
NORMALIZED = {
    ("torch", 2): {
        f"normalized_{name}": ("model=resnet_tiny", "train.save_model=false", overrides)
        for name, overrides in {"ddp": "strategy=ddp", "full_shard": "sharding=full_shard"}.items()
    }
}
"""Cells with batch norms. Their statistics are those of a micro-batch, so there is no reference with one worker."""
ROUNDED = {
    ("torch", 2): {"rounded_full_shard": ("sharding=full_shard",)},
    ("deepspeed_options", 2): {"rounded_zero3": ("zero_stage=3",)},
    ("deepspeed_release", 2): {"rounded_zero1": ("zero_stage=1",)},
    ("deepspeed_trainer_release", 2): {"rounded_hf_zero2": (HF, "zero_stage=2")},
}
"""Strategies that cast the weights of batch norms to bf16."""
WAITING = {
    ("deepspeed_options", 2): {
        name: ("zero_stage=2", "precision=bf16", "train.save_model=false", *SGD, *overrides)
        for name, overrides in {"waiting": ASYNC[:1], "not_waiting": ASYNC}.items()
    }
}
"""Cells with SGD, whose updates depend on the clipping. Those of Adam hardly do."""
REFERENCES = {
    "bloom": (),
    "gpt": ("model=gpt_tiny",),
    "sgd": SGD,
    "bf16": ("precision=bf16",),
    "hf": (HF,),
    "frozen": FROZEN,
    "packed": PACKED,
    "bucketed": BUCKETED,
    "answers": ANSWERS,
    "answers_swapped": SWAPPED,
    "images": IMAGES,
}


KINDS = ("frozen", "gpt", "sgd", "bf16", "packed", "bucketed")
"""References of the cells whose names contain them; the reference of the others is bloom."""

FAST = ("bloom", "gpt", "hf", "frozen")
"""References of the tests that are not slow."""


def parametrize(cells: Iterable[tuple[tuple[str, int], Iterable[str]]]) -> list[Any]:
    """Return the test parameters of all cells; those outside ORDINARY find few additional errors."""
    return [pytest.param(*key, name, id=name, marks=marks_of(key)) for key, names in cells for name in names]


def marks_of(key: tuple[str, int]) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of the tests of the cells with a key."""
    if key in ORDINARY:
        return ()
    return (pytest.mark.release if key[0].endswith("_release") else pytest.mark.slow,)


NAMES = parametrize(CELLS.items())


def run_cells(folder: Path, workers: int, cells: Cells) -> Path:
    """Run cells in one process group; return their folder."""
    write_questions(folder / "questions")
    (folder / "questions" / "scaled.json").write_text(json.dumps({"fp16": {"initial_scale_power": 8}}))
    (folder / "questions" / "bf16.json").write_text(json.dumps({"bf16": {"enabled": True}}))
    located = {
        name: tuple(text.replace("QUESTIONS", str(folder / "questions")) for text in (*COMMON, *overrides))
        for name, overrides in cells.items()
    }
    return run_grid(SCRIPT, folder, workers, located)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that runs a reference, and the others that are as fast, and returns its folder."""

    @cache
    def run(fast: bool) -> Path:
        named = {name: overrides for name, overrides in REFERENCES.items() if (name in FAST) == fast}
        cells = {name: ("strategy=single", *overrides) for name, overrides in named.items()}
        return run_cells(tmp_path_factory.mktemp("references") / "torch", 1, cells)

    return lambda name: run(name in FAST) / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a function that runs the cells of a library and a number of workers."""

    def run(folder: Path, library: str, workers: int) -> None:
        key = library, workers
        image_model = ("model=resnet_tiny", "train.save_model=false", "precision=bf16")
        rounded = {name: (*image_model, *overrides) for name, overrides in ROUNDED.get(key, {}).items()}
        others = [rounded, *(cells.get(key, {}) for cells in (EVALUATED, NORMALIZED, WAITING))]
        run_cells(folder, workers, dict(ChainMap(CELLS[key], *others)))

    return run_once(tmp_path_factory, run)


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Read the metrics of each step."""
    return read_lines(folder / "metrics.jsonl")


@pytest.mark.parametrize(("library", "workers", "name"), NAMES)
def test_losses_and_norms_equal_those_of_single(
    library: str, workers: int, name: str, references: Callable[[str], Path], runs: Runs
) -> None:
    reference = next((kind for kind in KINDS if kind in name), "bloom")
    tolerance, of_norms = (1e-2, 5e-2) if reference == "bf16" else (1e-3, 1e-3) if "fp16" in name else (1e-5, 1e-5)
    expected = read_steps(references(reference))
    actual = read_steps(runs(library, workers) / name)
    assert len(expected) == len(actual) == STEPS
    for theirs, ours in zip(expected, actual, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance), ours["step"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=of_norms), ours["step"]
        assert ours["learning_rate"] == theirs["learning_rate"]
    single = RunRecord.read(references(reference) / "record.json").metrics
    metrics = RunRecord.read(runs(library, workers) / name / "record.json").metrics
    assert metrics.eval_losses == pytest.approx(single.eval_losses, rel=tolerance)
    assert metrics.train_losses == pytest.approx(single.train_losses, rel=tolerance)


@pytest.mark.slow
def test_an_update_without_waits_clips_as_deepspeed_does(runs: Runs) -> None:
    folder = runs("deepspeed_options", 2)
    expected, actual = (read_steps(folder / name) for name in ("waiting", "not_waiting"))
    assert len(expected) == len(actual) == STEPS
    assert min(step["grad_norm"] for step in expected) > 0.5, "every step is clipped"
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in actual] == pytest.approx([step[key] for step in expected], rel=1e-3)


@pytest.mark.slow
def test_bf16_of_deepspeed_trains_alike_at_stages_0_and_1(runs: Runs) -> None:
    """At stage 0, DeepSpeed runs a first step of AdamW without gradients, which must have no effect."""
    folder = runs("deepspeed_options", 2)
    first, second = (read_steps(folder / name) for name in ("bf16_zero0_in_file", "bf16_zero1_async"))
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in first] == pytest.approx([step[key] for step in second], rel=2e-3)


@pytest.mark.parametrize(("library", "workers", "name"), NAMES)
def test_saved_weights_equal_those_of_single(
    library: str, workers: int, name: str, references: Callable[[str], Path], runs: Runs
) -> None:
    reference = next((kind for kind in KINDS if kind in name), "bloom")
    theirs, ours = load_model(references(reference)), load_model(runs(library, workers) / name)
    expected = theirs.state_dict()
    assert expected.keys() == ours.state_dict().keys()
    # An update of Adam has the size of the learning rate. Rounding can change the sign of a small gradient.
    tolerance = STEPS * 0.002 if reference == "bf16" or "fp16" in name else 1e-4
    for key, weight in ours.state_dict().items():
        torch.testing.assert_close(weight, expected[key], atol=tolerance, rtol=0, msg=lambda m, key=key: f"{key}: {m}")
        assert not torch.equal(weight, weight.bfloat16().float()), f"{key} was rounded to bf16"
        assert not torch.equal(weight, weight.half().float()), f"{key} was rounded to fp16"


def test_a_saved_model_has_the_recorded_loss(references: Callable[[str], Path]) -> None:
    for name in ("bloom", "gpt"):
        spec, record = RunSpec.read(references(name)), RunRecord.read(references(name) / "record.json")
        data = squad_sample.load(spec.config.dataset, spec.config.model, spec.config.train.seed)
        model = load_model(references(name)).eval()
        batch = data.collate([data.evaluation[index] for index in range(len(data.evaluation))])
        with torch.no_grad():
            loss = loss_sum("causal_lm", model(**batch.inputs), batch) / batch.num_targets
        assert loss.item() == pytest.approx(record.metrics.eval_loss, rel=1e-5)
        tokenizer = AutoTokenizer.from_pretrained(references(name) / "model")
        assert tokenizer("Who wrote it?")["input_ids"] == data.tokenizer.encode_batch(["Who wrote it?"])[0].tolist()


def load_model(folder: Path) -> Any:
    """Load the model that a run saved."""
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


@pytest.mark.parametrize(("library", "workers", "name"), parametrize(EVALUATED.items()))
def test_each_example_is_evaluated_once(
    library: str, workers: int, name: str, references: Callable[[str], Path], runs: Runs
) -> None:
    folder = runs(library, workers) / name
    kind = name.partition("_")[0]
    single, metrics = (RunRecord.read(at / "record.json").metrics for at in (references(kind), folder))
    if kind == "answers":
        assert metrics.exact_match == pytest.approx(single.exact_match)
        assert metrics.f1 == pytest.approx(single.f1)
        assert json.loads((folder / "predictions.json").read_text()) == MEMORIZED
    else:
        assert metrics.eval_losses == pytest.approx(single.eval_losses, rel=1e-5)
        assert metrics.eval_accuracies == pytest.approx(single.eval_accuracies)
        assert metrics.eval_top5_accuracies == pytest.approx(single.eval_top5_accuracies)


def test_models_with_batch_norms_are_evaluated_with_the_statistics_of_rank_0(runs: Runs) -> None:
    ddp, sharded = (runs("torch", 2) / name for name in NORMALIZED["torch", 2])
    for theirs, ours in zip(read_steps(ddp), read_steps(sharded), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    expected, actual = (RunRecord.read(folder / "record.json").metrics for folder in (ddp, sharded))
    assert actual.eval_losses == pytest.approx(expected.eval_losses, rel=1e-5)


@pytest.mark.parametrize(("library", "workers", "name"), parametrize(ROUNDED.items()))
def test_models_with_batch_norms_train_with_weights_in_16_bits(
    library: str, workers: int, name: str, runs: Runs
) -> None:
    expected, actual = (read_steps(folder) for folder in (runs("torch", 2) / "normalized_ddp", runs(library, 2) / name))
    assert len(actual) == len(expected)
    for theirs, ours in zip(expected[:4], actual[:4], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2), ours["step"]
    folders = runs("torch", 2) / "normalized_ddp", runs(library, workers) / name
    ddp, metrics = (RunRecord.read(folder / "record.json").metrics for folder in folders)
    assert metrics.eval_losses == pytest.approx(ddp.eval_losses, rel=2e-2)


@pytest.mark.slow
def test_the_reference_has_the_scores_computed_by_hand(references: Callable[[str], Path]) -> None:
    answers, swapped, images = (
        RunRecord.read(references(name) / "record.json").metrics for name in ("answers", "answers_swapped", "images")
    )
    assert json.loads((references("answers") / "predictions.json").read_text()) == MEMORIZED
    assert (answers.exact_match, answers.f1) == (pytest.approx(EXACT_MATCH), pytest.approx(F1))
    assert (swapped.exact_match, swapped.f1) == (0, 0)
    assert len(images.eval_accuracies) == len(images.eval_top5_accuracies) > 1
    for first, among_five in zip(images.eval_accuracies, images.eval_top5_accuracies, strict=True):
        assert 0 < first < among_five
        assert (31 * first, 31 * among_five) == (
            pytest.approx(round(31 * first)),
            pytest.approx(round(31 * among_five)),
        )
    assert answers.eval_accuracies == answers.eval_top5_accuracies == []


def test_the_reference_clips_and_changes_the_learning_rate(references: Callable[[str], Path]) -> None:
    trained = read_steps(references("bloom"))
    assert all(step["grad_norm"] > 0.5 for step in trained), "a step was not clipped"
    assert len({step["learning_rate"] for step in trained}) == STEPS, "the learning rate does not change"
    assert trained[-1]["loss"] < trained[0]["loss"]


def test_hf_trainer_and_native_loop_are_bitwise_equal(references: Callable[[str], Path]) -> None:
    ours, theirs = references("bloom"), references("hf")
    for key in ("step", "epoch", "loss", "grad_norm", "learning_rate"):
        assert [line[key] for line in read_steps(ours)] == [line[key] for line in read_steps(theirs)]
    native, trainer = (RunRecord.read(folder / "record.json") for folder in (ours, theirs))
    assert native.built is not None
    assert trainer.built is not None
    assert (native.built.engine, trainer.built.engine) == ("native", "hf_trainer")
    assert native.metrics.eval_losses == trainer.metrics.eval_losses
    assert native.run.id != trainer.run.id
    assert read_phases(ours) == read_phases(theirs)


def read_phases(folder: Path) -> list[str]:
    """Read the phases of a run, in order."""
    return [event["phase"] for event in read_lines(folder / "events.jsonl") if "phase" in event]


@pytest.mark.parametrize(("library", "workers", "name"), NAMES)
def test_built_matches_the_calls_of_the_library(library: str, workers: int, name: str, runs: Runs) -> None:
    folder = runs(library, workers) / name
    record = RunRecord.read(folder / "record.json")
    calls = json.loads((folder / "calls.json").read_text())
    built, config = record.built, record.config
    assert built is not None
    assert built.world_size == workers
    assert built.engine == ("hf_trainer" if name.startswith("hf") else "native")
    assert built.compute_dtype == {"bf16": "bfloat16", "fp16": "float16"}.get(name.removeprefix("hf_")[:4], "float32")
    assert built.compiled == ("model" if "model" in name else "blocks" if "compiled" in name else "none")
    assert (built.compute_weights == "step") == ("step" in name)
    if built.strategy == "ddp":
        assert calls == {"DDP": 1}
        assert built.mesh == [workers, 1]
        assert built.communication_dtype == ("bfloat16" if "communication" in name else "float32")
    elif built.strategy == "fsdp":
        if built.engine == "native":
            # Units: two blocks, the root, and embedding and head unless they are tied.
            together = config["fsdp"]["blocks_per_unit"] != 1
            assert calls == {"fully_shard": (3 if config["model"]["name"] == "bloom_tiny" else 5) - together}
            assert built.blocks_per_unit == (2 if together else 1)
            assert built.sharded_units == calls["fully_shard"]
        else:  # which other units accelerate shards depends on its version
            assert set(calls) == {"fully_shard"}
            assert calls["fully_shard"] >= 3
        sharding = config["fsdp"]["sharding"]
        replicas = {"no_shard": workers, "hybrid_shard": config["fsdp"]["replicas"] or 1}.get(sharding, 1)
        assert built.mesh == [replicas, workers // replicas]
        assert built.wrapper == f"fully_shard(reshard_after_forward={sharding != 'shard_grad_op'})"
        assert (built.offload != "none") == config["offload"]["enabled"]
    else:
        assert calls == {"deepspeed.initialize": 1}
        stage = config["deepspeed"]["zero_stage"]
        assert built.zero_stage == stage
        expected = "none" if not config["offload"]["enabled"] else "optimizer"
        assert built.offload == (expected + "+parameters" if stage == 3 and expected != "none" else expected)
        settings = json.loads((folder / "ds_config.json").read_text())
        assert settings["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize(("library", "workers", "name"), NAMES)
def test_each_part_of_the_memory_is_that_of_the_shards(library: str, workers: int, name: str, runs: Runs) -> None:
    """With fp32 and AdamW a parameter has 4 bytes, its gradient 4 and its moments 8."""
    record = RunRecord.read(runs(library, workers) / name / "record.json")
    parts, built = record.memory["parts"], record.built
    assert built is not None
    assert [entry["rank"] for entry in parts] == list(range(workers))
    compiled = record.config["train"]["compile"]
    assert all((entry["activations_mib"] is None) if compiled else entry["activations_mib"] > 0 for entry in parts)
    if record.config["train"]["optimizer"] != "adamw" or built.param_dtype != "float32":
        return
    shards = built.mesh[1]
    whole = 4 * built.parameters / 2**20
    stage = 3 if built.zero_stage is None else built.zero_stage  # FSDP shards all parts
    masters = whole / shards if built.zero_stage else 0.0  # DeepSpeed updates a copy of its shard
    if "step" in name:  # the module computes with bf16 copies
        masters = whole
    expected = {
        "parameters_mib": whole / (shards if stage == 3 else 1) / (2 if "step" in name else 1),
        "optimizer_states_mib": 2 * whole / (shards if stage else 1) + masters,
    }
    for entry in parts:
        assert {key: entry[key] for key in expected} == pytest.approx(expected, rel=0.1), entry
        assert whole / shards * 0.9 < entry["gradients_mib"] < whole * 1.6, entry

"""Tests of estimates and of their cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from distexp.config import Config, DatasetConfig
from distexp.data.base import TaskData
from distexp.distributed.context import Context
from distexp.plan import planner
from distexp.plan.estimate import Estimate, arithmetic_estimate, estimate_of, model_size, unknown_error
from distexp.plan.planner import cache_path, read_estimate, store_estimate
from distexp.plan.replay import Event, StepTrace
from distexp.plan.trace.traced_run import count_parameters
from distexp.plan.trace.tracing import trace_step
from distexp.plan.verdict import describe_verdict, predict
from distexp.runs.record_sections import Predicted
from distexp.system.units import MIB
from distexp.training import build
from distexp.training.build import load_data
from tests.helpers.planning import linear_estimate
from tests.helpers.runs import resolve_cell

TRACE = StepTrace(
    (
        Event(40 * MIB, 0, "parameters", "setup", "gpu"),
        Event(500 * MIB, 9, "optimizer_states", "setup", "host"),
        Event(2 * MIB, 1, "batch", "forward", "gpu"),
        Event(100 * MIB, 2, "logits", "forward", "gpu"),
        Event(-100 * MIB, 2, "logits", "backward", "gpu"),
        Event(-2 * MIB, 1, "batch", "backward", "gpu"),
    ),
    3.21,
    ("an assumption",),
)


def test_estimate_of_a_trace_has_peaks_parts_and_overheads() -> None:
    found = estimate_of(TRACE, {"context": 400.0, "nccl": 100.0, "host_workers": 1_300.0}, 1_500.0)
    assert (found.peak_allocated_mib, found.peak_reserved_mib, found.step_mib) == (142, 160, 160)
    assert (found.overhead_mib, found.host_mib, found.required_mib) == (500, 1_500, 660)
    assert found.phase == "forward"
    assert {part: mib for part, mib in found.parts.items() if mib} == {
        "parameters": 40, "logits": 100, "temporaries": 2,
    }  # fmt: skip
    assert found.curve["phase"] == ["forward", "forward", "backward", "backward"]
    assert found.curve["logits"] == [0, 100, 0, 0]
    assert (found.seconds, found.notes) == (3.2, ["an assumption"])


def test_size_of_the_model_is_that_of_all_shards_in_any_precision() -> None:
    """Rank 0 makes the whole model in fp32, also if each worker then has a half of it in bf16."""
    config = resolve_cell(
        "command=plan", "model=resnet_tiny", "zero_stage=1", "precision=bf16", "cluster.workers_per_node=2"
    )
    whole, _ = count_parameters(config)
    assert whole is not None
    assert model_size(config, trace_step(config)) == (whole, 0)


def test_the_head_that_transformers_makes_before_it_ties_it_is_counted(tmp_path: Path) -> None:
    """Gemma 3 1B needed 1,152 MiB of a node for it, and Qwen 3 0.6B 593 MiB."""
    sizes = {"vocab_size": 300, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    for is_tied, kind in ((True, "opt"), (False, "gpt_neox")):
        more = {"word_embed_proj_dim": 8, "ffn_dim": 8} if is_tied else {"intermediate_size": 8}
        AutoConfig.for_model(kind, **sizes, **more).save_pretrained(tmp_path / kind)
        config = resolve_cell(
            *("command=plan", "model=hf", f"model.name={tmp_path / kind}", "model.init=random", "model.tokenizer=byte"),
            *("dataset=synthetic", "dataset.max_length=16", "dataset.train_size=64", "strategy=single"),
        )
        assert model_size(config, trace_step(config))[1] == is_tied * 300 * 8


def test_nvidia_smi_never_shows_more_than_the_gpu_has_if_the_training_fits() -> None:
    found = replace(estimate_of(TRACE, {"context": 400.0}, None), step_mib=145.0)
    assert predict(found, None).nvidia_smi_mib == 560
    assert predict(found, 550.0).nvidia_smi_mib == 550
    too_small = predict(found, 150.0)
    assert (too_small.verdict, too_small.nvidia_smi_mib, too_small.peak_reserved_mib) == ("does_not_fit", 560, 160)


@pytest.mark.parametrize(
    ("most_mib", "text"),
    [(1_536.0, "1.5 GiB of 1.0 GiB"), (1_034.0, "1.01 GiB of 1.00 GiB"), (1_026.0, "1.002 GiB of 1.000 GiB")],
)
def test_memories_that_look_equal_have_more_digits(most_mib: float, text: str) -> None:
    predicted = Predicted(verdict="too_close", required_mib=1_000.0, most_mib=most_mib, gpu_memory_mib=1_024.0)
    assert describe_verdict(replace(predicted, error_bound=0.05)) == f"not certain: may need {text}"


@pytest.mark.parametrize("option", ["train.optimizer=adamw8bit", "train.activation_checkpointing=offload"])
@pytest.mark.parametrize(
    ("workers", "on_gpu", "where"),
    [
        (1, True, ""),
        (2, True, "with several workers were not compared with runs on GPUs"),
        (1, False, "were not compared with runs on CPUs"),
    ],
)
def test_an_option_has_a_verdict_where_it_was_compared(option: str, workers: int, on_gpu: bool, where: str) -> None:
    config = resolve_cell("model=gpt_tiny", "strategy=ddp", option, f"cluster.workers_per_node={workers}")
    reason = unknown_error(config, on_gpu=on_gpu)
    assert reason == (where and f"predictions of {option} {where}")


def test_model_states_of_a_model_that_is_not_traced() -> None:
    # 16 bytes per parameter with AdamW in fp32, a quarter of them on each of 4 workers.
    config = resolve_cell(
        "command=plan", "model=gpt", "model.tokenizer=byte", "sharding=full_shard", "cluster.workers_per_node=4"
    )
    found = arithmetic_estimate(config, "a reason")
    assert not found.traced
    assert found.error_bound is None
    assert set(found.parts) == {"parameters", "gradients", "optimizer_states"}
    assert found.parts["optimizer_states"] == pytest.approx(2 * found.parts["parameters"], rel=1e-3)
    assert found.notes == [
        "not traced: a reason", "estimate by arithmetic: only the model states, without activations and buffers",
    ]  # fmt: skip
    assert arithmetic_estimate(config, "a reason", 2**20).parts["parameters"] == 1.0


@pytest.mark.parametrize("cache", ["cpu", "gpu"])
def test_parameters_are_counted_without_decoding_images(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve_cell("command=plan", "model=resnet_tiny", "strategy=single")
    config.dataset.cache, config.dataset.num_workers = cache, 2
    seen: list[DatasetConfig] = []

    def keep(config: Config, context: Context) -> TaskData:
        seen.append(config.dataset)
        return load_data(config, context)

    monkeypatch.setattr(build, "load_data", keep)
    assert (count_parameters(config)[0] or 0) > 1000
    assert [(dataset.cache, dataset.num_workers) for dataset in seen] == [("none", 0)]
    assert (config.dataset.cache, config.dataset.num_workers) == (cache, 2)


def test_cache_keeps_estimates_by_what_changes_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path))
    config = resolve_cell("command=plan", "strategy=single")
    estimate = linear_estimate(config)
    assert read_estimate(config) is None
    store_estimate(config, estimate)
    assert read_estimate(config) == estimate
    same = resolve_cell("command=plan", "strategy=single", "train.seed=7", "train.max_steps=3", "plan.gpu=h100-80gb")
    assert read_estimate(same) == estimate
    for changed in (
        "train.micro_batch_size=2", "precision=bf16", "train.activation_checkpointing=true", "train.save_model=true",
        "plan.gpu=a100-80gb",  # its cuBLAS takes less
    ):  # fmt: skip
        assert read_estimate(resolve_cell("command=plan", "strategy=single", changed)) is None
    monkeypatch.setattr(planner, "library_versions", lambda: {"torch": "99"})
    assert read_estimate(config) is None


@pytest.mark.parametrize("varies", ["dataset.padding=longest", "train.logits=targets"])
@pytest.mark.parametrize("chosen", ["train.max_steps=3", "train.num_epochs=2", "train.seed=7"])
def test_cache_distinguishes_what_chooses_the_texts_if_their_lengths_count(varies: str, chosen: str) -> None:
    shared = ("command=plan", "strategy=single", "dataset=squad", varies)
    assert cache_path(resolve_cell(*shared)) != cache_path(resolve_cell(*shared, chosen))


@pytest.mark.parametrize("module", ["own_model.py", "own_model/__init__.py", "own_model/parts/layers.py"])
def test_cache_distinguishes_the_code_of_custom_packages(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / module).write_text("LAYERS = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = resolve_cell("command=plan", "strategy=single")
    assert planner.custom_packages(config) == []
    config.model._target_ = "own_model.build"
    assert planner.custom_packages(config) == ["own_model"]
    before = cache_path(config)
    (tmp_path / module).write_text("LAYERS = 100\n")
    assert cache_path(config) == before, "read once"
    planner.package_hash.cache_clear()
    assert cache_path(config) != before
    planner.package_hash.cache_clear()


def test_damaged_cache_is_no_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path))
    config = resolve_cell("command=plan", "strategy=single")
    cache_path(config).parent.mkdir(parents=True)
    for text in ("{", '{"phase": 3}', "[]"):
        cache_path(config).write_text(text)
        assert read_estimate(config) is None
    store_estimate(config, Estimate(seconds=2.0))
    assert read_estimate(config) == Estimate(seconds=2.0)

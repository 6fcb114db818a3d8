"""The effective ds_config.json, and conflicts of the user's file with the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distexp.config import ConfigError
from distexp.config.model_checks import with_micro_batch
from distexp.resolve.run_id import run_id
from distexp.strategies.zero.ds_config import effective_config, known_keys
from tests.helpers.deepspeed_keys import installed_keys
from tests.helpers.runs import resolve_cell

SEARCHED = (
    *("zero_stage=2", "cluster.workers_per_node=2", "cluster.device=cpu"),
    *("train.micro_batch_size=auto", "train.global_batch_size=48"),
)


def test_a_custom_ds_config_is_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    content = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 12345, "sub_group_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "wall_clock_breakdown": True,
    }
    path.write_text(json.dumps(content))
    config = resolve_cell("strategy=deepspeed", f"deepspeed.config_file={path}", "cluster.device=cpu")
    assert config.deepspeed.zero_stage == 3
    settings = effective_config(config, world_size=2)
    assert settings["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 12345}
    assert settings["wall_clock_breakdown"] is True
    assert settings["train_batch_size"] == 16
    assert "auto" not in json.dumps(settings)


def test_conflicts_with_a_custom_ds_config_are_refused_together(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    words = ("strategy=deepspeed", f"deepspeed.config_file={path}", "cluster.device=cpu")
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage=3, but this run has 1"):
        resolve_cell(*words, "zero_stage=1")
    path.write_text(json.dumps({"optimizer": {"type": "Lamb"}, "scheduler": {}, "gradient_clipping": 9}))
    with pytest.raises(ConfigError) as caught:
        resolve_cell(*words)
    assert len(caught.value.errors) == 3


OVERLAP = {"zero_optimization": {"overlap_comm": True}}
UNCHECKED = {"bf16": {"check_grad_overflow": False}}
BF16 = ("strategy=deepspeed", "cluster.device=cpu", "precision=bf16")


@pytest.mark.parametrize(("content", "key"), [(OVERLAP, "overlap_comm"), (UNCHECKED, "check_overflow")])
def test_a_typed_value_that_the_file_contradicts_is_refused_even_if_it_is_the_default(
    content: dict[str, dict[str, bool]], key: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    ((section, values),) = content.items()
    (in_file,) = values.values()
    words = (*BF16, f"deepspeed.config_file={path}")
    typed = f"deepspeed.{key}={json.dumps(not in_file)}"
    with pytest.raises(ConfigError, match=f"={json.dumps(in_file)}, but this run has {json.dumps(not in_file)}: make"):
        resolve_cell(*words, typed)
    used = resolve_cell(*words)  # The record has what the file sets.
    assert getattr(used.deepspeed, key) is in_file
    assert effective_config(used, world_size=2)[section].items() >= values.items()
    path.write_text("{}")
    assert getattr(resolve_cell(*words, typed).deepspeed, key) is not in_file


def test_a_typed_overlap_reaches_deepspeed_and_the_default_leaves_it_open() -> None:
    for stage in (2, 3):
        ids = set()
        for typed in (None, False, True):
            text = json.dumps(typed)
            config = resolve_cell(f"zero_stage={stage}", "cluster.device=cpu", f"deepspeed.overlap_comm={text}")
            assert effective_config(config, 2)["zero_optimization"].get("overlap_comm") is typed
            ids.add(run_id(config))
        assert len(ids) == 3


def test_the_listed_keys_are_those_of_the_installed_deepspeed() -> None:
    assert {name: set(keys) for name, keys in known_keys().items()} == installed_keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train_batch_sise": 8}', r"has train_batch_sise, .* does not read: did you mean train_batch_size\?"),
        (
            '{"zero_optimization": {"overlap_com": 1}}',
            r"overlap_com, .*: did you mean zero_optimization\.overlap_comm\?",
        ),
        ('{"overlap_comm": true}', r"has overlap_comm, .*: did you mean zero_optimization\.overlap_comm\?"),
        ('{"bf16": {"qqqq": 1}}', r"has bf16\.qqqq, which DeepSpeed does not read: remove it"),
        ('{"compile": {"enabled": true}}', r"has compile\.enabled, which DeepSpeed does not read: remove it"),
        ('{"timers": {"throughput": {"synchroniced": 1}}}', r"did you mean timers\.throughput\.synchronized\?"),
        ('{"zero_optimization": true}', r"sets zero_optimization=true, which is a section of keys: remove it"),
        (
            '{\n  // eight\n  "steps_per_print": 8}',
            r"is not a valid JSON object \(JSON has no comments, but line 2 has",
        ),
        ('{"steps_per_print": 8, "steps_per_print": 9}', r"\(it has steps_per_print twice\): correct the file"),
        ('{"csv_monitor": {"enabled": true, "output_path": "/a"}}', r"has csv_monitor, .* read metrics\.jsonl"),
        ('{"tensorboard": {"enabled": "yes"}}', r"has tensorboard, .*: remove it, and set tracker=tensorboard"),
        ('{"wandb": {"enabled": true}}', r"has wandb, .*: remove it, and set tracker=wandb"),
        ('{"comet": {"enabled": 1, "api_key": "a"}}', r"has comet, .*: remove it, and set tracker=wandb"),
        ('{"autotuning": {"enabled": true}}', r"has autotuning, .*: remove it, and run distexp choose"),
        (
            '{"flops_profiler": {"enabled": true, "output_file": "/a/b"}}',
            r'sets flops_profiler\.output_file="/a/b", which .* of the run: remove it, and set profile=true',
        ),
        (
            '{"data_efficiency": {"data_sampling": {"curriculum_metrics": [{"index_to_sample_path": "/a"}]}}}',
            r"curriculum_metrics\.index_to_sample_path=.*: remove it",
        ),
        (
            '{"torch_autocast": {"lower_precision_safe_modules": ["a.B"]}}',
            r"lower_precision_safe_modules=.*, which imports a package: remove it",
        ),
        ('{"compile": {"debug_log": true}}', r"sets compile\.debug_log=true, which writes files .*: remove it"),
        ('{"steps_per_print": 8,}', r"\(Expecting .*: line 1 .*\): correct the file"),
    ],
)
def test_a_wrong_file_is_refused_by_one_line_that_names_the_key(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_cell("strategy=deepspeed", f"deepspeed.config_file={path}", "cluster.device=cpu")
    assert len(caught.value.errors) == 1
    assert "\n" not in caught.value.errors[0]


def test_a_file_may_have_disabled_sections(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({name: {"enabled": False} for name in ("tensorboard", "wandb", "autotuning")}))
    words = ("strategy=deepspeed", f"deepspeed.config_file={path}", "cluster.device=cpu")
    resolve_cell(*words)
    harmless = {
        "flops_profiler": {"enabled": False, "output_file": "flops.txt"},
        "torch_autocast": {"lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.modules.conv.Conv2d"]},
    }
    path.write_text(json.dumps(harmless))
    resolve_cell(*words)
    swap = {"offload_optimizer": {"device": "none", "nvme_path": "/local"}}
    path.write_text(json.dumps({"flops_profiler": {"enabled": True, "output_file": None}, "zero_optimization": swap}))
    config = resolve_cell(*words)
    path.write_text(json.dumps({"csv_monitor": {"enabled": True}}))
    with pytest.raises(ConfigError, match="has csv_monitor"):  # A worker reads the file again, maybe hours later.
        effective_config(config, world_size=2)


def test_sections_without_values_are_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": "auto", "bf16": null}')
    config = resolve_cell("strategy=deepspeed", f"deepspeed.config_file={path}", "cluster.device=cpu")
    settings = effective_config(config, world_size=2)
    assert (settings["zero_optimization"]["stage"], settings["bf16"]["enabled"]) == (2, False)


@pytest.mark.parametrize(
    ("optimizer", "params", "message"),
    [
        ("sgd", {"momentum": 0.5}, r"sets optimizer\.params\.momentum=0\.5, but this run has 0\.9"),
        ("sgd", {"eps": 1e-8}, r"sets optimizer\.params\.eps=1e-08, which this run does not use: remove it"),
        ("adamw", {"adam_w_mode": False}, r"sets optimizer\.params\.adam_w_mode=false, which this run does not use"),
    ],
)
def test_a_ds_config_changes_no_optimizer(
    optimizer: str, params: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": {"type": "auto", "params": params}}))
    words = ("strategy=deepspeed", f"deepspeed.config_file={path}", f"train.optimizer={optimizer}")
    with pytest.raises(ConfigError, match=message):
        resolve_cell(*words, "cluster.device=cpu")


FAST = ("kernels=fast", "precision=bf16", "zero_stage=2", "cluster=slurm", "cluster.workers_per_node=2")


@pytest.mark.parametrize(
    ("content", "synchronized", "is_async", "is_checked"),
    [
        ({}, False, True, False),
        ({"timers": {"throughput": {"synchronized": "auto"}}}, False, True, False),
        ({"timers": {"throughput": {"synchronized": True}}}, True, True, False),
        ({"bf16": {"check_grad_overflow": True}}, None, False, True),
    ],
)
def test_fast_kernels_keep_what_the_file_sets(
    content: dict[str, object], synchronized: bool | None, is_async: bool, is_checked: bool, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    config = resolve_cell(*FAST, f"deepspeed.config_file={path}")
    assert (config.deepspeed.async_update, config.deepspeed.check_overflow) == (is_async, is_checked)
    timers = effective_config(config, world_size=2).get("timers", {"throughput": {"synchronized": None}})
    assert timers == {"throughput": {"synchronized": synchronized}}


def test_fast_kernels_leave_the_other_optimizer_of_stage_1_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"data_types": {"grad_accum_dtype": "fp32"}}))
    file = f"deepspeed.config_file={path}"
    for stage, expected in ((1, False), (2, True)):
        assert resolve_cell(*FAST, file, f"zero_stage={stage}").deepspeed.async_update == expected
    with pytest.raises(ConfigError, match=r"async_update=true is not supported with data_types.grad_accum_dtype=fp32"):
        resolve_cell(*FAST, file, "zero_stage=1", "deepspeed.async_update=true")


def test_deepspeed_gets_the_sizes_of_the_trial() -> None:
    config = resolve_cell(*SEARCHED)
    found = effective_config(with_micro_batch(config, 6, accumulation=2), world_size=2)
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert [found[name] for name in names] == [6, 2, 24]


def test_a_file_of_deepspeed_may_not_fix_the_searched_size(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}')
    with pytest.raises(ConfigError, match=r"sets train_micro_batch_size_per_gpu=4, but this run has \"auto\""):
        resolve_cell(*SEARCHED, f"deepspeed.config_file={file}")

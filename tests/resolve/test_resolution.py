"""Tests of the config groups and of their resolution."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from distexp.cli.overrides import quote_choice
from distexp.config import Config, ConfigError
from distexp.config.paths import config_groups, options_of
from distexp.resolve.resolution import CROSS_CHECKS, DECISIONS, SECTION_CHECKS, run_steps
from distexp.resolve.run_id import run_id
from distexp.runs.spec import RunSpec
from distexp.strategies.ds_config import effective_config
from tests.helpers.runs import IMAGE_FOLDER, REPOSITORY, compose_cell, make_spec, resolve_cell

NEEDED = {  # other overrides that an option needs
    ("dataset", "tinyimagenet"): ("model=resnet_tiny", f"dataset.root={IMAGE_FOLDER}"),
    ("dataset", "tinyimagenet_sample"): ("model=resnet_tiny",),
    ("model", "hf"): ("model.name=someone/a-model",),
    ("offload", "true"): ("strategy=fsdp",),
    ("scaling", "weak_model"): ("strategy=fsdp",),
}
NEEDS_GPU = {("offload", "pinned"), ("precision", "fp16")}
GROUPS = [group for group in config_groups() if "/" not in group and group != "experiment"]  # see tests/experiments
OPTIONS = [(group, option) for group in GROUPS for option in options_of(group)]


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=[f"{g}={o}" for g, o in OPTIONS])
def test_every_option_composes_types_and_resolves(group: str, option: str) -> None:
    words = (f"{group}={option}", "cluster.device=cpu", *NEEDED.get((group, option), ()))
    content, choices = compose_cell(*words)
    assert choices[group] == option
    if (group, option) in NEEDS_GPU:
        with pytest.raises(ConfigError, match="needs a GPU"):
            resolve_cell(*words)
    else:
        assert resolve_cell(*words).name == content.name


@pytest.mark.parametrize(
    ("typed", "quoted"),
    [
        ("zero_stage=1,2,3", "zero_stage='1','2','3'"),
        ("zero_stage=3", "zero_stage='3'"),
        ("zero_stage=range(1,4)", "zero_stage='1','2','3'"),
        ("zero_stage=choice(0,3)", "zero_stage='0','3'"),
        ("offload=true,false", "offload='true','false'"),
        ("offload=True", "offload='true'"),
        ("offload=pinned", "offload=pinned"),
        ("offload='false'", "offload='false'"),
        ("strategy=glob(*)", "strategy=glob(*)"),
        ("experiment=deepspeed/zero_stages", "experiment=deepspeed/zero_stages"),
        ("train.max_steps=1,2", "train.max_steps=1,2"),
    ],
)
def test_choices_are_quoted_for_hydra(typed: str, quoted: str) -> None:
    assert quote_choice(typed, config_groups()) == quoted


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stage_implies_deepspeed(stage: int) -> None:
    config = resolve_cell(f"zero_stage={stage}")
    assert (config.strategy.name, config.deepspeed.zero_stage) == ("deepspeed", stage)


@pytest.mark.parametrize("sharding", options_of("sharding"))
def test_sharding_implies_fsdp(sharding: str) -> None:
    config = resolve_cell(f"sharding={sharding}")
    assert (config.strategy.name, config.fsdp.sharding) == ("fsdp", sharding)


def test_each_strategy_sets_its_defaults() -> None:
    assert resolve_cell("strategy=deepspeed").deepspeed.zero_stage == 2
    assert resolve_cell("strategy=fsdp").fsdp.sharding == "full_shard"
    assert resolve_cell("strategy=single").cluster.workers_per_node == 1
    assert resolve_cell("strategy=ddp", "cluster.device=cpu").cluster.workers_per_node == 2


@pytest.mark.parametrize("strategy", options_of("strategy"))
def test_sections_of_other_strategies_are_legal(strategy: str) -> None:
    words = ("fsdp.forward_prefetch=2", "deepspeed.reduce_bucket_size=1000", "ddp.bucket_cap_mb=5")
    assert resolve_cell(f"strategy={strategy}", *words).fsdp.forward_prefetch == 2


def test_image_model_sets_the_dataset_by_default() -> None:
    assert resolve_cell("model=resnet_tiny").dataset.name == "tinyimagenet_sample"
    assert resolve_cell("model=resnet_tiny", "dataset=synthetic").dataset.name == "synthetic"


def test_spec_survives_a_round_trip(tmp_path: Path) -> None:
    folder = tmp_path
    spec = make_spec("zero_stage=3", "offload=true", "train.betas=[0.8,0.99]")
    spec.write(folder)
    assert RunSpec.read(folder) == spec


def test_run_id_depends_on_the_training_and_not_on_the_machine() -> None:
    base = run_id(resolve_cell("strategy=ddp"))
    assert run_id(resolve_cell("strategy=ddp", "name=other", "cluster.cpus_per_worker=3")) == base
    for change in ("strategy=fsdp", "train.seed=1", "cluster.workers_per_node=3", "model.num_layers=3"):
        assert run_id(resolve_cell(change)) != base


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("strategy=single", "cluster.workers_per_node=1"), "e2b2b1b6e10b"),
        (("strategy=ddp", "train.compile=true", "cluster.workers_per_node=1"), "3d3646b5f9c0"),
        (("sharding=full_shard", "model=gpt_tiny", "cluster.workers_per_node=1"), "54d114150bfc"),
        (("zero_stage=2", "offload=true", "precision=bf16", "cluster.workers_per_node=1"), "d05f6f05bb74"),
        (("model=resnet_tiny", "dataset=synthetic", "strategy=ddp", "cluster.workers_per_node=1"), "2b3ce66b3b2f"),
        (
            ("model=gpt", "dataset=squad", "train.logits=targets", "strategy=ddp", "cluster.workers_per_node=1"),
            "94733394940a",
        ),
        (("engine=hf_trainer", "strategy=ddp", "cluster.workers_per_node=1"), "cbd35771f2dd"),
    ],
)
def test_run_ids_stay_those_of_finished_runs(overrides: tuple[str, ...], expected: str) -> None:
    """A new key changes no id unless it is set. Mark it with ``id_if_changed``."""
    assert run_id(resolve_cell(*overrides, "cluster.device=cpu")) == expected


def test_run_id_depends_on_the_content_of_the_data(tmp_path_factory: pytest.TempPathFactory) -> None:
    def identity(text: str) -> str:
        path = tmp_path_factory.mktemp("data") / "squad.json"
        path.write_text(text)
        return run_id(resolve_cell("dataset=squad", f"dataset.train_path={path}", f"dataset.eval_path={path}"))

    assert identity("{}") == identity("{}") != identity("{ }")


def test_custom_ds_config_is_filled_in_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    content = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 12345, "sub_group_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "wall_clock_breakdown": True,
    }
    path.write_text(json.dumps(content))
    words = ("strategy=deepspeed", f"deepspeed.config_file={path}", "cluster.device=cpu")
    config = resolve_cell(*words)
    assert config.deepspeed.zero_stage == 3
    settings = effective_config(config, world_size=2)
    assert settings["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 12345}
    assert settings["wall_clock_breakdown"] is True
    assert settings["train_batch_size"] == 16
    assert "auto" not in json.dumps(settings)
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage=3, but this run has 1"):
        resolve_cell(*words, "zero_stage=1")
    path.write_text(json.dumps({"optimizer": {"type": "Lamb"}, "scheduler": {}, "gradient_clipping": 9}))
    with pytest.raises(ConfigError) as caught:
        resolve_cell(*words)
    assert len(caught.value.errors) == 3


def test_steps_are_in_the_order_that_they_need() -> None:
    order = [step.__name__ for step in DECISIONS]
    assert order.index("decide_resources") < order.index("set_strategy_defaults"), "defaults depend on the device"
    assert order.index("decide_resources") < order.index("apply_scaling"), "scaling depends on the workers"
    assert order.index("set_strategy_defaults") < order.index("apply_scaling"), "scaling depends on the sharding"
    assert len({*SECTION_CHECKS, *DECISIONS, *CROSS_CHECKS}) == len([*SECTION_CHECKS, *DECISIONS, *CROSS_CHECKS])


def test_errors_of_a_stage_are_raised_together() -> None:
    with pytest.raises(ConfigError) as caught:
        run_steps(Config(), (lambda _: ["a", "b"], lambda _: ["b", "c"]))
    assert caught.value.errors == ["a", "b", "c"]


def test_resolve_names_no_strategy() -> None:
    strategies = set(options_of("strategy"))
    for path in (REPOSITORY / "distexp" / "resolve").glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert names & strategies == set(), path.name


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
        ("train.log_every=1000000000000000000", "has more than 18 digits: lower it"),
        ("train.seed=4294967296", "train.seed=4294967296 must be from 0 to below"),
        ("model.keys=[path,nonsense]", "model.keys contains 'nonsense', which is not a key of model: leave it out"),
        ("dataset.keys=[[1]]", r"dataset.keys contains \[1\], which is not a key of dataset: leave it out"),
    ],
)
def test_values_that_no_run_can_have_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_cell(override)

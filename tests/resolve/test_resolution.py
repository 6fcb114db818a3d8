"""Every option of every config group resolves, and the steps of the resolution are in order."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from PIL import Image

from distexp.config import Config, ConfigError
from distexp.config.keys import config_groups, options_of
from distexp.resolve.resolution import CROSS_CHECKS, DECISIONS, SECTION_CHECKS, run_steps
from distexp.runs.record import RunSpec
from tests.helpers.runs import IMAGE_FOLDER, REPOSITORY, compose_cell, make_spec, resolve_cell

NEEDED = {  # other overrides that an option needs
    ("dataset", "tinyimagenet"): ("model=resnet_tiny", f"dataset.root={IMAGE_FOLDER}"),
    ("dataset", "tinyimagenet_sample"): ("model=resnet_tiny",),
    ("dataset", "image_folder"): ("model=resnet_tiny", "dataset.path=FOLDER"),
    ("dataset", "text"): ("dataset.path=someone/texts",),
    ("dataset", "chat"): ("dataset.path=someone/conversations",),
    ("model", "resnet50"): ("dataset.train_size=1024",),  # its micro-batch is larger than a generated data set
    ("model", "hf"): ("model.name=someone/a-model",),
    ("model", "timm"): ("model.name=resnet18",),
    ("model", "torchvision"): ("model.name=resnet18",),
    ("offload", "true"): ("strategy=fsdp",),
    ("scaling", "weak_model"): ("strategy=fsdp",),
}
NEEDS_GPU = {("offload", "pinned"), ("precision", "fp16"), ("precision", "float8")}
# Presets are tested in tests/experiments.
TESTED_BELOW = {"zero_stage", "sharding", "strategy"}
GROUPS = {group for group in config_groups() if "/" not in group} - {"experiment", *TESTED_BELOW}
COMBINED = ("cluster", "engine", "kernels", "plan", "scale", "tracker")
"""Groups of which each option goes with each option of the others. A composition takes most of the time of a test."""
OPTIONS = [{group: option} for group in sorted(GROUPS.difference(COMBINED)) for option in options_of(group)]
OPTIONS += [
    {group: options_of(group)[number % len(options_of(group))] for group in COMBINED}
    for number in range(max(len(options_of(group)) for group in COMBINED))
]


@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda chosen: " ".join(f"{g}={o}" for g, o in chosen.items()))
def test_every_option_composes_types_and_resolves(chosen: dict[str, str], tmp_path: Path) -> None:
    for label in "ab":
        (tmp_path / label).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / label / "1.png")
    needed = (word.replace("FOLDER", str(tmp_path)) for option in chosen.items() for word in NEEDED.get(option, ()))
    words = (*(f"{group}={option}" for group, option in chosen.items()), "cluster.device=cpu", *needed)
    content, choices = compose_cell(*words)
    assert chosen.items() <= choices.items()
    if NEEDS_GPU & chosen.items():
        with pytest.raises(ConfigError, match="needs a GPU"):
            resolve_cell(*words)
    else:
        assert resolve_cell(*words).name == content.name


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

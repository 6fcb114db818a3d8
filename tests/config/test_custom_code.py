"""Custom classes that lack a method or raise an error: one sentence that names the method, and no traceback."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distexp.config import Config, ConfigError
from distexp.config.custom_code import PAGE, locate
from distexp.data.base import TargetTokens, TaskData
from distexp.data.loader import BatchSharding, ShardedLoader
from distexp.distributed.context import Context
from distexp.engines.base import check_built
from distexp.engines.native import Native
from distexp.models.objective import get_logits
from distexp.runs.record_sections import Built
from distexp.strategies.torch_model import TorchModel
from distexp.training.build import load_data, model_factory
from tests.helpers.runs import resolve_cell

PACKAGE = "tests.helpers.incomplete"
BASE = "distexp.strategies.base"
IN_LAUNCHER = {  # targets, with a part of the message
    "strategy._target_=NoSetup": f"NoSetup lacks setup of {BASE}.Strategy: add it, as in {PAGE}",
    "strategy._target_=NotDerived": f"NotDerived is not a strategy: derive the class from {BASE}.Strategy",
    "strategy._target_=RaisingValidate": "RaisingValidate: validate() raised KeyError: 'bucket\\nsecond line' (",
    "strategy._target_=RaisingDefaults": "RaisingDefaults: set_defaults() raised ZeroDivisionError (",
    "strategy._target_=RaisingOption": "RaisingOption: main_option() raised RuntimeError: no option (",
    "strategy._target_=RaisingConstructor": "RaisingConstructor: the constructor raised OSError: no license (",
    "strategy._target_=ReturnsText": "ReturnsText: validate() returned 'not supported': return a list of messages",
    "strategy._target_=ReturnsNoOption": "ReturnsNoOption: main_option() returned None instead of a str: return one",
    "strategy._target_=NUMBER": "_target_=tests.helpers.incomplete.NUMBER is an int, which cannot be called: name a",
    "engine._target_=return_none": "return_none returned None instead of a distexp.engines.base.Trainer: return one",
    "engine._target_=return_class": "return_class returned the class NoTrain instead of a distexp.engines.base.Trainer",
    "engine._target_=NoTrain": f"a NoTrain, which lacks train of distexp.engines.base.Trainer: add it, as in {PAGE}",
}


@pytest.mark.parametrize("override", IN_LAUNCHER)
def test_the_launcher_names_what_a_custom_class_lacks(override: str) -> None:
    key, _, name = override.partition("=")
    with pytest.raises(ConfigError) as caught:
        resolve_cell("cluster.device=cpu", "trusted_packages=[tests]", f"{key}={PACKAGE}.{name}")
    (message,) = caught.value.errors
    assert IN_LAUNCHER[override] in message
    assert PACKAGE in message
    assert "\n" not in message
    if "raised" in message:
        assert "incomplete.py:" in message, "the line in the custom code"
        assert "HYDRA_FULL_ERROR=1 prints the traceback" in message


@pytest.mark.parametrize("key", ["engine", "strategy"])
@pytest.mark.parametrize("target", ["distexp.system.processes.start_module", "distexp.engines.base.Trainer"])
def test_another_function_or_class_of_distexp_is_refused(key: str, target: str) -> None:
    with pytest.raises(ConfigError, match=f"{target} cannot be used here .TypeError: .*: name another class, as in"):
        resolve_cell("cluster.device=cpu", f"{key}._target_={target}")


def test_a_module_that_raises_at_import_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"its import raised RuntimeError: the license server is down .*broken_import"
    ):
        locate("tests.helpers.broken_import.build")
    with pytest.raises(ConfigError, match=r"_target_=tests.helpers.none.build cannot be imported .*correct the name"):
        locate("tests.helpers.none.build")


def make_config(key: str, name: str) -> Config:
    return resolve_cell("cluster.device=cpu", "trusted_packages=[tests]", f"{key}={PACKAGE}.{name}")


def test_a_worker_names_what_the_object_of_a_strategy_lacks() -> None:
    config = make_config("strategy._target_", "ReturnsModule")
    unused: Any = None
    with pytest.raises(ConfigError) as caught:
        Native().train(lambda: unused, config, unused, unused)
    (message,) = caught.value.errors
    assert "setup() returned a Linear, which lacks " in message
    assert "checkpoint_format, describe, forward_backward, load, module, save, step, weights" in message
    assert f"of {BASE}.DistributedModel: add them, as in {PAGE}" in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("build_text", f"build_text returned a str instead of a torch.nn.Module: return one, as in {PAGE}"),
        ("return_none", "return_none returned None instead of a torch.nn.Module: return one"),
        ("return_class", "return_class returned the class NoTrain instead of a torch.nn.Module: return one"),
        ("NUMBER", "NUMBER is an int, which cannot be called: name a function or class"),
        ("build_no_forward", "build_no_forward returned a module without forward()"),
    ],
)
def test_a_worker_names_what_is_wrong_with_a_model(name: str, expected: str) -> None:
    config = make_config("model._target_", name)
    data: Any = SimpleNamespace(num_classes=3)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        model_factory(config, data)()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("load_list", ["load_list returned a list instead of a distexp.data.base.TaskData: return one"]),
        ("return_none", ["return_none returned None instead of a distexp.data.base.TaskData: return one"]),
        (
            "load_other_targets",
            ["whose collate counts the targets of masked_lm and not those of causal_lm, as TextCollate(..., task='ca"],
        ),
        (
            "load_wrong_fields",
            [
                "load_wrong_fields returned a TaskData whose train is None without __len__ or __getitem__: correct it",
                "load_wrong_fields returned a TaskData whose evaluation is a generator without __len__ or __getitem__",
                "load_wrong_fields returned a TaskData whose collate is a str, which cannot be called: correct it",
                "load_wrong_fields returned a TaskData whose num_classes is None and not an int: correct it",
                "whose task is 'image_classification', but the task of the model is 'causal_lm': correct it",
            ],
        ),
    ],
)
def test_a_worker_names_what_is_wrong_with_a_dataset(name: str, expected: list[str]) -> None:
    config = make_config("dataset._target_", name)
    unused: Any = None
    with pytest.raises(ConfigError) as caught:
        load_data(config, unused)
    assert len(caught.value.errors) == len(expected)
    for message, part in zip(caught.value.errors, expected, strict=True):
        assert part in message
        assert message.endswith(f"as in {PAGE}")


def test_the_number_of_classes_may_be_an_integer_of_numpy(tmp_path: Path) -> None:
    config = make_config("dataset._target_", "load_numpy_classes")
    data = load_data(config, Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path))
    assert json.dumps(data.num_classes) == "7"


@pytest.mark.parametrize("targets", [False, True], ids=["all logits", "logits of targets"])
def test_a_collate_that_returns_no_batch_is_named(targets: bool) -> None:
    data = TaskData("causal_lm", [{}], [{}], lambda samples: {"input_ids": samples}, num_classes=3)  # type: ignore[arg-type, return-value]
    data = replace(data, collate=TargetTokens(data.collate)) if targets else data
    sharding, cpu = BatchSharding(0, 1, micro_batch_size=1), torch.device("cpu")
    loader = ShardedLoader(data.train, data, sharding, cpu, seed=0, shuffle=False, num_workers=0)
    with pytest.raises(
        ConfigError, match=r"collate of the dataset returned a dict instead of a distexp.data.base.Batch"
    ):
        next(loader.iter_steps(0))


@pytest.mark.parametrize(("outputs", "described"), [(None, "None"), ({"logits": torch.ones(1)}, "a dict")])
def test_a_forward_that_returns_no_logits_is_named(outputs: Any, described: str) -> None:
    with pytest.raises(ConfigError, match=rf"forward\(\) of the model returned {described}: return the logits, or an "):
        get_logits(outputs)


def test_a_strategy_that_describes_nothing_is_named() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"describe\(\) of the distributed model returned None instead of a .*Built"):
        check_built(nothing, {})
    with pytest.raises(ConfigError, match=r"expected_build\(\) of the strategy returned None instead of a Mapping"):
        check_built(object.__new__(Built), nothing)
    model: Any = SimpleNamespace(autocast=torch.autocast("cpu", enabled=False), distribution=lambda: None)
    with pytest.raises(
        ConfigError, match=r"distribution\(\) of the strategy returned None instead of a .*Distribution"
    ):
        TorchModel.describe(model)
    with pytest.raises(ConfigError, match=r"expected_build\(\) of the strategy has wrappr, which record.json lacks in"):
        check_built(object.__new__(Built), {"wrappr": "none"})

"""Custom classes that lack a method or raise an error: one sentence that names the method, and no traceback."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distexp.config import Config, ConfigError
from distexp.config.custom_code import PAGE
from distexp.config.targets import locate
from distexp.engines.native import Native
from distexp.worker.rank import load_data, model_factory
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
    "engine._target_=NoTrain": f"NoTrain lacks train of distexp.engines.base.Trainer: add it, as in {PAGE}",
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
    assert "the object that setup() returned lacks " in message
    assert "checkpoint_format, describe, forward_backward, load, module, save, step, weights" in message
    assert f"of {BASE}.DistributedModel: add them, as in {PAGE}" in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("build_text", "build_text returned str and not torch.nn.modules.module.Module"),
        ("build_no_forward", "build_no_forward returned a module without forward()"),
    ],
)
def test_a_worker_names_what_is_wrong_with_a_model(name: str, expected: str) -> None:
    config = make_config("model._target_", name)
    data: Any = SimpleNamespace(num_classes=3)
    with pytest.raises(ConfigError, match=expected.replace("(", r"\(").replace(")", r"\)")):
        model_factory(config, data)()


def test_a_worker_names_what_is_wrong_with_a_dataset() -> None:
    config = make_config("dataset._target_", "load_list")
    unused: Any = None
    with pytest.raises(ConfigError, match=r"load_list returned list and not distexp.data.base.TaskData: return one"):
        load_data(config, unused)

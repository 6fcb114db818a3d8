"""Conflicts between the user's ds_config.json and the configuration of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distexp.config import Config
from distexp.strategies.ds_config import values_set_by_distexp
from distexp.strategies.ds_config_file import get_nested, read_file


def conflicts(config: Config) -> Iterator[str]:
    """Yield an error for each value in the user's file that is set differently here."""
    path = config.deepspeed.config_file
    if path is None or not Path(path).is_file():
        return
    try:
        settings = read_file(path)
    except ValueError as error:
        yield f"deepspeed.config_file={path} is not a JSON object ({error}): correct the file"
        return
    expected = dict(values_set_by_distexp(config, config.cluster.world_size))
    for keys, value in {**expected, **_expected_optimizer(config)}.items():
        in_file = get_nested(settings, keys)
        if in_file not in (None, "auto") and in_file != value:
            yield (
                f"deepspeed.config_file sets {'.'.join(keys)}={json.dumps(in_file)}, but this run has "
                f'{json.dumps(value)}: make them equal, or write "auto" in the file'
            )
    yield from _unknown_optimizer_params(settings, config)
    if "scheduler" in settings:
        yield "deepspeed.config_file has a scheduler: remove it, and set train.schedule instead"
    for name in ("offload_optimizer", "offload_param"):
        device = get_nested(settings, ("zero_optimization", name, "device"))
        if not config.offload.enabled and device not in (None, "auto", "none"):
            yield f"deepspeed.config_file sets zero_optimization.{name}.device={device}: also choose offload=true"


def _expected_optimizer(config: Config) -> dict[tuple[str, ...], Any]:
    train = config.train
    own = {"momentum": train.momentum} if train.optimizer == "sgd" else {"betas": list(train.betas), "eps": train.eps}
    params = {"lr": train.learning_rate, "weight_decay": train.weight_decay, **own}
    return {
        ("optimizer", "type"): {"adamw": "AdamW", "sgd": "SGD"}[train.optimizer],
        **{("optimizer", "params", name): value for name, value in params.items()},
    }


def _unknown_optimizer_params(settings: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield an error for each parameter of the optimizer that distexp would not pass on."""
    params = get_nested(settings, ("optimizer", "params"))
    known = {keys[-1] for keys in _expected_optimizer(config)}
    for name in sorted(set(params) - known) if isinstance(params, Mapping) else ():
        value = json.dumps(params[name])
        yield f"deepspeed.config_file sets optimizer.params.{name}={value}, which this run does not use: remove it"

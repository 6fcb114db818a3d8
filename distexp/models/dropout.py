"""Rates at which a model changes its training at random: dropout, skipped paths and layers, noise of routers."""

import re
from dataclasses import fields
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from distexp.config import ConfigError, ModelConfig

DROPOUT_ENDINGS = ("dropout", "pdrop", "dropout_prob", "dropout_p", "dropout_rate")
RANDOM_ENDINGS = (*DROPOUT_ENDINGS, "layerdrop", "drop_path_rate", "drop_rate", "drop_connect_rate", "jitter_noise")
"""Ends of the names of dropout rates in configurations of transformers, and of all that make a training random."""

HEADS = ("classifier_", "summary_")
"""Starts of the names of rates of a classification head. It has modules with them, and a causal LM has no such head."""

FIXED = {"phimoe": "router_jitter_noise"}
"""Rates that also decide what a type of model computes in an evaluation. They stay as they are."""

PATHS = {"DropPath": "drop_prob", "DropBlock2d": "drop_prob", "StochasticDepth": "p"}
"""Ends of the names of modules that skip paths in timm, transformers and torchvision, with the names of their rates."""


def largest_dropout(model: nn.Module) -> float:
    """Return the largest rate of a model, which may be wrapped, with the model as ``module``."""
    configured = dropout_rates(getattr(model, "module", model))
    return max([*configured.values(), *dropout_rates(model, configured=False).values()], default=0.0)


def dropout_rates(model: nn.Module, *, configured: bool = True) -> dict[str, float]:
    """Return the rates above zero by name: of the modules, and of the configurations of the model and its parts."""
    rates = {}
    for name, module in model.named_modules():
        if attribute := _rate_name(module):
            rates[f"{name}.{attribute}"] = getattr(module, attribute)
    own = getattr(model, "config", None)
    found = [getattr(module, "config", None) for module in model.modules()] if configured else []
    for settings in {id(one): one for one in found if one is own or hasattr(one, "sub_configs")}.values():
        values = vars(settings) if hasattr(settings, "__dict__") else {}
        named = {name: rate for name, rate in values.items() if name.endswith(RANDOM_ENDINGS)}
        rates |= {name: rate for name, rate in named.items() if rate and not name.startswith(HEADS)}
    return {name: rate for name, rate in rates.items() if type(rate) in (int, float) and rate > 0}


def _rate_name(module: nn.Module) -> str | None:
    """Return the attribute of a module with the rate at which it changes activations; None if it has none."""
    if isinstance(module, _DropoutNd):
        return "p"
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return "dropout"
    kind = type(module).__name__
    path = next((attribute for ending, attribute in PATHS.items() if kind.endswith(ending)), None)
    # Models of timm and torchvision give it to a function.
    return path or ("drop_rate" if type(getattr(module, "drop_rate", None)) in (int, float) else None)


def zero_hint(model: ModelConfig, rate: str) -> str:
    """Return what to type so that a rate, by name, is 0. A custom model may not have the key."""
    if "lora_dropout" in rate.split("."):  # of an adapter, as peft names it
        return "set adapter.dropout=0"
    return "set model.dropout=0" if "dropout" in model.keys else "set it to 0"


def set_configured_dropout(config: Any, rate: float) -> bool:
    """Set the dropout rates of a configuration of transformers and its parts, and return whether it has any.

    0 is also the rate of all other random changes. A list has the rates of the stages of a model.
    """
    parts = [value for value in vars(config).values() if hasattr(value, "sub_configs")]
    found = sum(set_configured_dropout(part, rate) for part in parts) > 0  # all of them, which any() would not set
    for name, value in config.to_dict().items():
        values = value if isinstance(value, list) and value else [value]
        has_rates = all(type(one) in (int, float) for one in values) and name != FIXED.get(config.model_type)
        if has_rates and name.endswith(DROPOUT_ENDINGS if rate else RANDOM_ENDINGS):
            fitted = fit_number(config, name, [rate] * len(values) if isinstance(value, list) else rate)
            try:
                setattr(config, name, fitted)
            except Exception as error:  # any: the checks of transformers have their own classes
                raise ConfigError(
                    f"model.dropout={rate:g} is not possible: transformers takes no such {name} for this model. Use "
                    "model.dropout=0, or set its other rates by model.options"
                ) from error
            found = True
    return found


def fit_number(config: Any, name: str, value: Any) -> Any:
    """Return a value for a field of a configuration of transformers, as the type of number that the field takes.

    transformers takes no integer for a float. A list has numbers. A value that would change stays as it is.
    """
    if isinstance(value, list):
        return [fit_number(config, name, one) for one in value]
    kinds = {kind for field in fields(config) if field.name == name for kind in re.findall(r"\w+", str(field.type))}
    if type(value) is int and "float" in kinds and "int" not in kinds:
        return float(value)
    is_for_integer = type(value) is float and "int" in kinds and "float" not in kinds
    return int(value) if is_for_integer and value.is_integer() else value


def set_dropout(model: nn.Module, rate: float, *, of_all: bool = True) -> None:
    """Set the dropout rate of modules; 0 is also that of skipped paths.

    With ``of_all``, raise ConfigError if no module has one. Without it, modules with a rate of 0 keep it.
    """
    found = not of_all
    for module in model.modules():
        attribute = _rate_name(module)
        if attribute and (not rate or not type(module).__name__.endswith(tuple(PATHS))):
            if of_all or getattr(module, attribute):
                setattr(module, attribute, rate)
            found = True
    if rate and not found:
        raise ConfigError(
            f"model.dropout={rate:g} is not supported: {type(model).__name__} has no module with a dropout rate: leave "
            "model.dropout out"
        )


def check_layerdrop(model: nn.Module) -> None:
    """Raise ConfigError if a sharded model skips layers at random: some workers would wait for weights of others."""
    rates = {name: rate for name, rate in dropout_rates(model).items() if name.endswith("layerdrop")}
    if rates:
        found = ", ".join(f"{name}={rate:g}" for name, rate in rates.items())
        is_of_part = any(name not in vars(model.config) for name in rates)
        typed = "model.dropout=0" if is_of_part else " ".join(f"model.options.{name}=0" for name in rates)
        raise ConfigError(
            f"{type(model).__name__} has {found}: each worker would skip other layers. Add {typed}, or use "
            "strategy=ddp ddp.find_unused_parameters=true"
        )

"""Dropout rates of a model, and where they are not supported."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from distexp.config import Config, ConfigError

DROPOUT_ENDINGS = ("dropout", "pdrop", "dropout_prob", "dropout_p")
"""Ends of the names of dropout rates in configurations of transformers."""


def check_dropout(model: nn.Module, config: Config) -> None:
    """Check that no activation budget recomputes dropout: torch would draw other numbers (pytorch issue 190758).

    Raises:
        ConfigError: the model has dropout, and ``train.activation_budget`` is below 1.
    """
    budget = config.train.activation_budget
    if budget is None or budget >= 1:
        return
    for name, rate in dropout_rates(model).items():
        raise ConfigError(
            f"train.activation_budget={budget:g} gives wrong gradients with dropout, but {type(model).__name__} has "
            f"{name}={rate:g}: set model.dropout=0, or use train.activation_checkpointing=true in place of the budget"
        )


def largest_dropout(model: nn.Module) -> float:
    """Return the largest dropout rate of a model, which may be wrapped, with the model as ``module``."""
    configured = dropout_rates(getattr(model, "module", model)).values()
    return max([*configured, *(module.p for module in model.modules() if isinstance(module, _DropoutNd))], default=0.0)


def dropout_rates(model: nn.Module) -> dict[str, float]:
    """Return the rates above zero by name: those of the modules, and those of the model's configuration."""
    modules = {f"{name}.p": module.p for name, module in model.named_modules() if isinstance(module, _DropoutNd)}
    settings = getattr(model, "config", None)
    configured = {
        name: value
        for name, value in (vars(settings) if hasattr(settings, "__dict__") else {}).items()
        if name.endswith(DROPOUT_ENDINGS) and isinstance(value, float)
    }
    return {name: rate for name, rate in (configured | modules).items() if rate > 0}

"""Error messages for unknown options of config groups, with hints."""

from __future__ import annotations

import re

from distexp.cli.suggestions import suggest
from distexp.config.key_info import strategy_groups
from distexp.config.paths import options_of

BOOLEAN_NAMES = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
"""Other names of true and false."""

OPTION_NAMES = {
    "precision": {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "full": "fp32"},
    "offload": {**BOOLEAN_NAMES, "cpu": "true", "none": "false"},
}
"""Names of options in other programs, with the options of distexp."""

ZERO_STAGE = re.compile(r"zero[-_ ]?([0-3])")
"""Name of a ZeRO stage in other programs."""

EXTENDED_GROUPS = ("model", "dataset", "strategy", "cluster")
"""Groups to which users add custom options."""


def explain_option(group: str, option: str, options: list[str]) -> str:
    """Return the error for an option that a group does not have.

    Args:
        group: The config group.
        option: The unknown option.
        options: All options of the group.
    """
    near = _suggest_option(group, option, options)
    texts = ["distexp experiments lists them." if group == "experiment" else f"Options: {', '.join(options)}"]
    if not near and group in EXTENDED_GROUPS and option.isidentifier():
        texts.append(f"A custom option, in FOLDER/{group}/{option}.yaml, needs --config-dir FOLDER")
    if group == "model" and option:
        texts.append(_transformers_hint("FOLDER_OR_HUB_ID" if near else option))
    return f"{group}={option} is not an option{near or '.'} {'. '.join(texts)}"


def _suggest_option(group: str, option: str, options: list[str]) -> str:
    """Return ``. Did you mean a or b?``, or an empty text."""
    name = option.lower()
    name = OPTION_NAMES.get(group, {}).get(name, name)
    if name in options:
        return f". Did you mean {name}?"
    if group == "strategy" and (stage := ZERO_STAGE.fullmatch(name)):
        return f". Did you mean zero_stage={stage[1]}?"
    confused = ("strategy", *strategy_groups())  # Groups that choose a strategy.
    elsewhere = [other for other in confused if group in confused and name in options_of(other)]
    return f". Did you mean {elsewhere[0]}={name}?" if elsewhere else suggest(name, options)


def _transformers_hint(name: str) -> str:
    """Return how to choose a model that is not an option."""
    return f"For another model of transformers, from the hub or a folder: model=hf model.name={name}"

"""What is known of ``train.compile``: results of trials of ``kernels=fast``, in the cache of distexp.

A result is in ``compile-trials/KEY.json``. The key is a hash of what decides whether a model compiles: its architecture
and code, the choice, the strategy, the kind of device, and the versions. The launcher reads the results, so that all
workers of a run have the same choice. ``distexp.worker.compile_trial`` writes them.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from distexp import __version__
from distexp.config import WHOLE_MODEL, Config
from distexp.config.custom_code import custom_packages, library_versions, package_hash
from distexp.resolve.run_id import model_fingerprint
from distexp.system import files, typed_values
from distexp.system.cache_dir import cache_dir

CHOICES = (*WHOLE_MODEL, "blocks", "none")
"""Values of ``train.compiled``. If one does not compile, the next one of ``model``, ``blocks`` and ``none`` follows."""

NO_ARCHITECTURE = ("init", "tokenizer", "keys")
"""Keys of a model that do not change its code."""


@dataclass(frozen=True)
class CompileResult:
    """Result of a trial."""

    compiles: bool
    reason: str = ""  # why it does not compile, in one line
    seconds: float = 0.0  # time of the first steps


def choices_of(config: Config) -> Iterator[str]:
    """Yield what ``kernels=fast`` may compile: ``train.compile``, then what is used if that does not compile."""
    first = config.train.compiled
    yield first
    for choice in CHOICES[CHOICES.index(first) + 1 :]:
        # A budget is of use in compiled code only.
        if choice not in WHOLE_MODEL and (choice != "none" or config.train.activation_budget is None):
            yield choice


def use_results(config: Config) -> None:
    """Set ``train.compile`` to the first choice of ``kernels=fast`` that is not known to fail."""
    if config.kernels.compile is None:
        return
    for choice in list(choices_of(config)):
        result = None if choice == "none" else read_result(config, choice)
        set_choice(config, choice)
        if result is None or result.compiles:
            return
        config.kernels.compile_note = describe_failure(choice, result)


def set_choice(config: Config, choice: str) -> None:
    """Set ``train.compile``."""
    config.train.compile = False if choice == "none" else choice


def with_choice(config: Config, choice: str, note: str | None = None) -> Config:
    """Return a copy of a configuration with another value of ``train.compile``."""
    kernels = config.kernels if note is None else replace(config.kernels, compile_note=note)
    found = replace(config, train=replace(config.train), kernels=kernels)
    set_choice(found, choice)
    return found


def describe_failure(choice: str, result: CompileResult) -> str:
    """Return why a choice was replaced by the next one."""
    return f"train.compile={choice} failed: {result.reason}"


def read_result(config: Config, choice: str) -> CompileResult | None:
    """Return what is known of a choice; None if nothing is."""
    return typed_values.read_dataclass(CompileResult, result_path(config, choice))  # A damaged file is replaced.


def store_result(config: Config, choice: str, result: CompileResult) -> None:
    """Store the result of a choice. A cache that cannot be written costs the next run a trial, and this one a note."""
    path = result_path(config, choice)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, asdict(result))
    except OSError as error:
        print(f"note: what compiles cannot be stored in {path} ({error.strerror})", flush=True)


def result_path(config: Config, choice: str) -> Path:
    """Return the file of the result of a choice."""
    model: dict[str, Any] = asdict(config.model)
    for key, value in model.items():
        if isinstance(value, str) and Path(value).is_absolute() and Path(value).is_dir():
            model[key] = model_fingerprint(value, weights=False)
    train = config.train
    content: dict[str, Any] = {
        "model": {name: value for name, value in model.items() if name not in NO_ARCHITECTURE},
        "adapter": asdict(config.adapter) if config.adapter.freezes_model else None,
        "custom": [package_hash(name) for name in custom_packages(config)],
        "choice": choice,
        # The blocks of all strategies are the same code.
        "strategy": config.strategy.name if choice in WHOLE_MODEL else None,
        "train": [train.activation_checkpointing, train.activation_budget, train.logits, train.loss],
        "precision": [config.precision.name, train.compute_weights],
        "device": config.cluster.device,
        "versions": {"distexp": __version__, **library_versions()},
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]
    return cache_dir() / "compile-trials" / f"{digest}.json"

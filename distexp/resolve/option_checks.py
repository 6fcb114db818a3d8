"""Checks of the chosen options: targets that may be imported, and keys that the options have."""

from __future__ import annotations

import re
from collections.abc import Iterator

from distexp.config import Config
from distexp.config.model_checks import model_errors, unused_key_errors
from distexp.config.targets import check_target
from distexp.resolve.resources import launcher_traits

KEYS_OF_VARIABLES = {"OMP_NUM_THREADS": "cluster.cpus_per_worker", "DS_ACCELERATOR": "cluster.device"}
"""Environment variables of the workers that distexp sets, with the keys that change them."""


def check_targets(config: Config) -> Iterator[str]:
    """Yield an error for each ``_target_`` in a package that the user does not trust."""
    sections = (config.model, config.dataset, config.strategy, config.engine, config.tracker, config.cluster)
    for target in filter(None, (*(section._target_ for section in sections), *config.measure.watchers)):
        error = check_target(target, config.trusted_packages)
        if error:
            yield error


def check_model_keys(config: Config) -> list[str]:
    """Return the errors of the model section."""
    return model_errors(config.model)


def check_dataset_keys(config: Config) -> list[str]:
    """Return an error for each key that the dataset does not have."""
    return unused_key_errors("dataset", config.dataset)


def check_cluster_keys(config: Config) -> Iterator[str]:
    """Yield an error for each cluster key that the launcher ignores, or that contradicts another one."""
    cluster = config.cluster
    if check_target(cluster._target_, config.trusted_packages) is None:  # Else ``check_targets`` has an error.
        yield from launcher_traits(config).key_errors(config)
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"cluster.environment sets {name!r}, which is not a variable name: use letters, digits and _"
        elif name in KEYS_OF_VARIABLES:
            yield f"cluster.environment may not set {name}: set {KEYS_OF_VARIABLES[name]} instead"

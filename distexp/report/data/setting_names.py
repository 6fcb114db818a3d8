"""Short names of settings, such as ``seed`` for ``train.seed``.

Nothing here lists the strategies. The config groups in ``conf/`` and the sections of ``Config`` define them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from distexp.config.key_info import speed_references, strategy_groups, strategy_sections
from distexp.config.paths import config_groups
from distexp.runs.record import RunRecord

SEED = "seed"
WORKERS = "workers"

RENAMED = {
    "cluster.workers_per_node": WORKERS,
    "offload.enabled": "offload",
    "offload.pin_memory": "offload",
}
"""Keys whose short name follows no rule."""

HIDDEN_PREFIXES = ("cluster.environment.", "cluster.", "train.")


@lru_cache(maxsize=4096)
def short_name(key: str) -> str:
    """Return the name under which people type a key.

    ``model.name`` is set by the config group ``model``, and ``fsdp.sharding`` by the group ``sharding``, so they
    have the names of these groups. ``train.seed`` is ``seed``. ``model.num_layers`` has no shorter name.
    """
    if key in RENAMED:
        return RENAMED[key]
    section, _, leaf = key.partition(".")
    if leaf == "name" and section in config_groups() and section != "cluster":
        return section
    if leaf in config_groups():
        return leaf
    prefix = next((prefix for prefix in HIDDEN_PREFIXES if key.startswith(prefix)), "")
    return key.removeprefix(prefix)


def overridden_names(records: Sequence[RunRecord]) -> set[str]:
    """Return the short names of the keys that the overrides of some runs set."""
    keys = {text.split("=", 1)[0].lstrip("+~") for record in records for text in record.run.overrides}
    return {short_name(key) for key in keys}


@lru_cache(maxsize=1)
def kernel_options() -> frozenset[str]:
    """Return the short names of the keys that ``kernels=fast`` sets."""
    return frozenset(map(short_name, (*speed_references(), "model.attention")))


def is_strategy_option(name: str) -> bool:
    """Return whether a name is an option of one strategy, as ``fsdp.wrap``."""
    return name in strategy_groups() or name.partition(".")[0] in strategy_sections()


@lru_cache(maxsize=1)
def usual_order() -> tuple[str, ...]:
    """Return the settings that come first in tables, in their order."""
    return (
        *("model", "dataset", "engine", "strategy", *strategy_groups(), "offload", "precision", "kernels", "scaling"),
        *("device", "gpu", "nodes", WORKERS),
    )

"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

ALIASES = {
    "lr": "train.learning_rate",
    "epochs": "train.num_epochs",
    "epoch": "train.num_epochs",
    "batch_size": "train.micro_batch_size",
    "steps": "train.max_steps",
    "gpus": "cluster.workers_per_node",
    "num_gpus": "cluster.workers_per_node",
    "workers": "cluster.workers_per_node",
    "nproc_per_node": "cluster.workers_per_node",
    "nnodes": "cluster.nodes",
    "sequence_length": "dataset.max_length",
    "seq_len": "dataset.max_length",
    "max_seq_length": "dataset.max_length",
    "timeout": "cluster.timeout_min",
    "time": "cluster.timeout_min",
    "walltime": "cluster.timeout_min",
    "mem": "cluster.memory_gb",
}
"""Names of keys in other programs, with the keys of distexp."""

OPTION_ALIASES = {f"zero{separator}{stage}": f"zero_stage={stage}" for separator in ("", "-") for stage in range(4)}
"""Usual names of options, with the overrides that choose them."""


def suggest(wrong: str, known: Iterable[str]) -> str:
    """Return ``. Did you mean a or b?``, or an empty text if no known name is similar."""
    return _question(difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.6))


def suggest_key(wrong: str, known: Iterable[str]) -> str:
    """Return the same for dotted keys.

    Only the last part of a key is compared, because the right name in a wrong section is a common error.
    """
    section, _, name = wrong.rpartition(".")
    if name in ALIASES:
        return _question([ALIASES[name]])
    by_name: dict[str, list[str]] = {}
    for key in sorted(key for key in known if "/" not in key):
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    containing = [other for other in by_name if name in (other, *other.split("_"))]
    near = containing or difflib.get_close_matches(name, by_name, n=3, cutoff=0.6)
    keys = [key for other in near for key in by_name[other]]
    return _question([key for key in keys if key.rpartition(".")[0] == section] or keys)


def _question(near: Sequence[str]) -> str:
    return f". Did you mean {' or '.join(near[:3])}?" if near else ""

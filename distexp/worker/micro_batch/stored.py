"""Results of earlier searches, in the cache of distexp: ``micro-batch/KEY.json``.

The key is a hash of what determines speed and memory: the GPU, the number of workers, the versions, and the
configuration without what only changes the numbers in the tensors.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from distexp.config import Config
from distexp.data.cache import cache_dir
from distexp.runs.environment import make_environment
from distexp.runs.micro_batch import MicroBatchSearch
from distexp.system.cgroups import usable_memory

FORMAT = 1

SECTIONS = ("model", "dataset", "strategy", "ddp", "fsdp", "deepspeed", "offload", "precision", "train")

CLUSTER_KEYS = ("nodes", "workers_per_node", "device", "cpus_per_worker", "gpu_memory_limit_gb")

SAME_SPEED = (
    *("num_epochs", "max_steps", "learning_rate", "weight_decay", "betas", "eps", "schedule", "step_size"),
    *("gamma", "warmup_steps", "measure_after_step", "profile_steps", "log_every", "seed", "on_nan", "resume"),
    *("checkpoint_every", "save_model", "score_answers", "eval_batch_size", "gradient_accumulation_steps"),
)
"""Keys of ``train`` on which neither the speed nor the memory of a step depends.

The time limit is part of the key, because a search with more time may find a faster size.
"""

FACTS = ("python", "torch", "cuda", "transformers", "deepspeed", "gpu_name", "gpu_total_mib", "cpu_count")
"""Facts of the machine, as in the record."""


def stored_path(config: Config) -> Path:
    """Return the file for the search of a configuration on this machine.

    Raises:
        ConfigError: the user has no home directory.
    """
    text = json.dumps(_key(config), sort_keys=True, default=str)
    return cache_dir() / "micro-batch" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _key(config: Config) -> dict[str, Any]:
    content = asdict(config)
    key = {section: content[section] for section in SECTIONS}
    for name in SAME_SPEED:
        del key["train"][name]
    environment = asdict(make_environment(on_gpu=config.cluster.device == "cuda"))
    machine = {name: environment[name] for name in FACTS}
    if config.cluster.device == "cpu":
        machine["memory"] = usable_memory()
    cluster = {name: content["cluster"][name] for name in CLUSTER_KEYS}
    return {**key, "cluster": cluster, "machine": machine, "format": FORMAT}


def read_stored(path: Path, samples: int) -> MicroBatchSearch | None:
    """Return a stored search; None if there is none, or its size is no divisor of the samples of a step."""
    search = MicroBatchSearch.read(path)
    if search is None or search.chosen is None or search.chosen < 1 or samples % search.chosen:
        return None
    return replace(search, stored_in=str(path))


def store(search: MicroBatchSearch, path: Path) -> None:
    """Store a search. A cache that cannot be written costs the next run a search, and this one a note."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        search.write(path)
    except OSError as error:
        print(f"note: the micro-batch size cannot be stored in {path} ({error.strerror})", flush=True)

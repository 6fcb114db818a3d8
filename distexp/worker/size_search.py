"""The micro-batch size of a run with ``train.micro_batch_size=auto``: stored, or searched."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from distexp.config import Config
from distexp.config.model_checks import samples_per_worker, searches_micro_batch, with_micro_batch
from distexp.distributed.process_group import Store, open_store, sub_store
from distexp.runs.events import Events
from distexp.runs.record_sections import make_environment
from distexp.runs.run_dir import MICRO_BATCH
from distexp.runs.spec import RunSpec
from distexp.runs.step_files import MicroBatchSearch, describe_search
from distexp.strategies.base import load_strategy
from distexp.system import cgroups, typed_values
from distexp.system.cache_dir import cache_dir
from distexp.worker import size_processes, size_trial


def find_micro_batch(spec: RunSpec, run_dir: Path, events: Events) -> tuple[RunSpec, Store | None]:
    """Return the run with a number as its micro-batch size, and the store to join; None: a new one.

    All ranks must call it, before they use a GPU. Without ``auto`` it changes nothing. If no size fits, it raises
    torch.OutOfMemoryError on a GPU and MemoryError on a CPU.
    """
    if not searches_micro_batch(spec.config) or spec.config.is_preflight:
        return spec, None
    events.set_phase("search")
    connection = open_store(spec)
    is_rank_0 = os.environ["RANK"] == "0"
    path = stored_path(spec.config)
    search = _share(connection, "stored", read_stored(path, samples_per_worker(spec.config)) if is_rank_0 else None)
    if search is None:
        search = run_search(spec, run_dir, connection)
        if is_rank_0 and search.chosen is not None and search.complete:
            store(search, path)
    if is_rank_0:
        search.write(run_dir / MICRO_BATCH)
    if search.chosen is None:
        raise nothing_fits(spec.config, search)
    if is_rank_0:
        print(describe_search(search), flush=True)
    events.set_phase("setup")
    chosen = replace(spec, config=with_micro_batch(spec.config, search.chosen))
    return chosen, sub_store("training", connection)


def nothing_fits(config: Config, search: MicroBatchSearch) -> Exception:
    """Return the error of a search without a result: that of the device whose memory is too small."""
    limit = "dataset.max_length" if config.model.task == "causal_lm" else "dataset.image_size"
    smallest = min((candidate.micro_batch_size for candidate in search.candidates), default=1)
    savings = list(_savings(config))
    message = (
        f"train.micro_batch_size=auto found no size that fits: a micro-batch of {smallest} "
        f"sample{'s' if smallest > 1 else ''} needs more memory than there is. Lower {limit}"
        + (f", or choose {' or '.join(savings)}" if savings else "")
    )
    return torch.OutOfMemoryError(message) if config.cluster.device == "cuda" else MemoryError(message)


def _savings(config: Config) -> Iterator[str]:
    """Yield overrides that the run does not have yet, and that need less memory."""
    strategy = load_strategy(config)
    yield from strategy.smaller_states(config, workers=max(2, config.cluster.world_size))  # The user may add workers.
    if config.cluster.device == "cuda" and strategy.supports_offload(config) and not config.offload.enabled:
        yield "offload=true"
    if not config.train.activation_checkpointing:
        yield "train.activation_checkpointing=true"


def run_search(spec: RunSpec, run_dir: Path, connection: Store) -> MicroBatchSearch:
    """Try sizes until the search is complete or its time is over; the result is the same on all ranks."""
    started = time.monotonic()
    deadline = started + spec.config.train.micro_batch_search_s
    done: size_trial.SizeSearch | None = None
    while done is None or (done.next_size() is not None and _may_continue(done, connection, deadline)):
        tried = done.tried if done else []
        done = size_processes.Round(spec, run_dir, size_processes.round_store(connection, tried), tried).run(deadline)
    seconds, complete = time.monotonic() - started, done.next_size() is None
    return MicroBatchSearch(done.choose(), list(done.tried), seconds, skipped=done.too_large(), complete=complete)


def _may_continue(done: size_trial.SizeSearch, connection: Store, deadline: float) -> bool:
    """Return whether there is no result, or rank 0 has time for another round; the same on all ranks."""
    if done.choose() is None:
        return True
    key = f"has-time/{len(done.tried)}"
    if os.environ["RANK"] == "0":
        connection.set(key, str(int(time.monotonic() < deadline)))
    connection.wait([key], size_processes.LONGEST)
    return bool(connection.get(key) == b"1")


def _share(connection: Store, key: str, search: MicroBatchSearch | None) -> MicroBatchSearch | None:
    """Return rank 0's search on all ranks."""
    if os.environ["RANK"] == "0":
        connection.set(key, json.dumps(asdict(search)) if search else "")
    connection.wait([key], size_processes.LONGEST)
    content = connection.get(key)
    return typed_values.parse_dataclass(MicroBatchSearch, json.loads(content)) if content else None


# Results of earlier searches, in the cache of distexp: ``micro-batch/KEY.json``.
# The key is a hash of what determines speed and memory: the GPU, the number of workers, the versions, and the
# configuration without what only changes the numbers in the tensors.

FORMAT = 1
# Sections on which neither the speed nor the memory of a step depends, other than by keys of the other sections.
OTHER_SECTIONS = (
    *("engine", "kernels", "measure", "tracker", "preflight", "plan", "choose", "forecast", "scale", "scaling"),
    *("sweep", "cluster"),  # of the cluster, only CLUSTER_KEYS count
)
CLUSTER_KEYS = ("nodes", "workers_per_node", "device", "cpus_per_worker", "gpu_memory_limit_gb")
# Keys of ``train`` on which neither the speed nor the memory of a step depends. The time limit is part of the key,
# because a search with more time may find a faster size.
SAME_SPEED = (
    *("num_epochs", "max_steps", "learning_rate", "weight_decay", "betas", "eps", "schedule", "step_size"),
    *("gamma", "warmup_steps", "measure_after_step", "profile_steps", "log_every", "seed", "on_nan", "resume"),
    *("checkpoint_every", "save_model", "score_answers", "eval_batch_size", "gradient_accumulation_steps"),
)
# Facts of the machine, as in the record.
FACTS = ("python", "torch", "cuda", "transformers", "deepspeed", "gpu_name", "gpu_total_mib", "cpu_count")


def stored_path(config: Config) -> Path:
    """Return the file of a search on this machine. Raises ConfigError if the user has no home directory."""
    text = json.dumps(_key(config), sort_keys=True, default=str)
    return cache_dir() / "micro-batch" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _key(config: Config) -> dict[str, Any]:
    content = asdict(config)
    key = {name: keys for name, keys in content.items() if isinstance(keys, dict) and name not in OTHER_SECTIONS}
    for name in SAME_SPEED:
        del key["train"][name]
    environment = asdict(make_environment(on_gpu=config.cluster.device == "cuda"))
    machine = {name: environment[name] for name in FACTS}
    if config.cluster.device == "cpu":
        machine["memory"] = cgroups.usable_memory()
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

"""The micro-batch size of a run with ``train.micro_batch_size=auto``: stored, or searched."""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distexp.config import Config
from distexp.config.model_checks import divisors, samples_per_worker, searches_micro_batch, with_micro_batch
from distexp.data.base import TaskData
from distexp.distributed.context import Context
from distexp.distributed.process_group import Store, open_store, sub_store
from distexp.runs import run_state
from distexp.runs.events import Events
from distexp.runs.record import RunSpec
from distexp.runs.record_sections import make_environment
from distexp.runs.run_dir import MICRO_BATCH
from distexp.runs.step_files import FITS, OUT_OF_MEMORY, MicroBatchSearch, TriedSize, describe_search
from distexp.strategies.base import load_strategy
from distexp.system import cgroups, typed_values, units
from distexp.system.cache_dir import cache_dir
from distexp.training.build import build_model, load_data
from distexp.worker.forked_trial import LATE, LONGEST, ForkedTrial, ran_out_of_memory
from distexp.worker.size_trial import SizeSearch, SizeTrials, config_of_round, micro_batches_per_step


def find_micro_batch(
    spec: RunSpec, run_dir: Path, events: Events, connection: Store | None = None
) -> tuple[RunSpec, Store | None]:
    """Return the run with a number as its micro-batch size, and the store to join; None: a new one.

    All ranks must call it, before they use a GPU. Without ``auto`` it changes nothing. If no size fits, it raises
    torch.OutOfMemoryError on a GPU and MemoryError on a CPU.
    """
    if not searches_micro_batch(spec.config) or spec.config.is_preflight:
        return spec, None if connection is None else sub_store("training", connection)
    events.set_phase("search")
    connection = connection or open_store(spec)
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
    limit = "dataset.max_length" if config.model.traits.is_text else "dataset.image_size"
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
    if config.train.activation_checkpointing not in (True, "offload"):
        yield "train.activation_checkpointing=true"


def run_search(spec: RunSpec, run_dir: Path, connection: Store) -> MicroBatchSearch:
    """Try sizes until the search is complete or its time is over; the result is the same on all ranks."""
    started = time.monotonic()
    deadline = started + spec.config.train.micro_batch_search_s
    done: SizeSearch | None = None
    while done is None or (done.next_size() is not None and _may_continue(done, connection, deadline)):
        tried = done.tried if done else []
        done = Round(spec, run_dir, sub_store(round_prefix(tried), connection), tried).run(deadline)
    seconds, complete = time.monotonic() - started, done.next_size() is None
    return MicroBatchSearch(done.choose(), list(done.tried), seconds, skipped=done.too_large(), complete=complete)


def _may_continue(done: SizeSearch, connection: Store, deadline: float) -> bool:
    """Return whether there is no result, or rank 0 has time for another round; the same on all ranks."""
    if done.choose() is None:
        return True
    key = f"has-time/{len(done.tried)}"
    if os.environ["RANK"] == "0":
        connection.set(key, str(int(time.monotonic() < deadline)))
    connection.wait([key], LONGEST)
    return bool(connection.get(key) == b"1")


def _share(connection: Store, key: str, search: MicroBatchSearch | None) -> MicroBatchSearch | None:
    """Return rank 0's search on all ranks."""
    if os.environ["RANK"] == "0":
        connection.set(key, json.dumps(asdict(search)) if search else "")
    connection.wait([key], LONGEST)
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


# Rounds of trials, each in processes of ``distexp.worker.forked_trial``.

SAVED = "whole saves MiB"  # key of the store: ``SizeSearch.whole_saves_mib``


@dataclass(frozen=True)
class Round(ForkedTrial):
    """Processes that try sizes until one runs out of memory, or the next size needs other processes."""

    tried: Sequence[TriedSize]  # the candidates of earlier rounds

    purpose: ClassVar[str] = "the search for train.micro_batch_size=auto"
    hint: ClassVar[str] = "set a number"

    @property
    def prefix(self) -> str:
        """Return the prefix of the keys in the store."""
        return round_prefix(self.tried)

    def run(self, deadline: float) -> SizeSearch:
        """Run the processes on all ranks; return all candidates so far.

        If there is a candidate, rank 0 ends the round after the deadline, a value of ``time.monotonic``. Raises
        SearchError if a process failed, and ConfigError if one refused the configuration.
        """
        return self._conclude(self.run_processes(deadline))

    def is_late(self, deadline: float) -> bool:
        """Return whether the deadline has passed, and a candidate fits."""
        is_over = super().is_late(deadline)
        return is_over and any(candidate.outcome == FITS for candidate in [*self.tried, *self._candidates()])

    def _conclude(self, ends: list[dict[str, Any]]) -> SizeSearch:
        """Return the candidates, with the one during which a process ran out of memory."""
        out_of_memory = ran_out_of_memory(ends)
        # A collective of another rank fails if this one is ended after the deadline.
        if not out_of_memory and any(end["code"] for end in ends) and not self.store.check([LATE]):
            self.raise_first(ends)
        sizes = json.loads(self.store.get("sizes")) if self.store.check(["sizes"]) else [1]
        saved = json.loads(self.store.get(SAVED)) if self.store.check([SAVED]) else 0.0
        tried = [*self.tried, *self._candidates()]
        search = SizeSearch(sizes, tried, self.spec.config.train.compiled != "none", saved)
        failed = search.next_size()
        if out_of_memory and failed is not None:
            return replace(search, tried=[*search.tried, TriedSize(failed, OUT_OF_MEMORY)])
        return search

    def _candidates(self) -> list[TriedSize]:
        stored = (self.store.get(f"candidate/{number}") for number in range(self.store.add("candidates", 0)))
        return [typed_values.parse_dataclass(TriedSize, json.loads(candidate)) for candidate in stored]

    def try_in_process(self, store: Store, context: Context) -> None:
        """Try sizes until the next one needs other processes, and put the candidates into the store."""
        config = self.spec.config
        data = load_data(config, context)
        blueprint = build_model(config, data, context)
        sizes = allowed_sizes(config, data, blueprint.model)
        saved = whole_saves_mib(config, sizes[-1], blueprint.model)
        store.set("sizes", json.dumps(sizes))
        store.set(SAVED, json.dumps(saved))
        search = SizeSearch(sizes, self.tried, config.train.compiled != "none", saved)
        size = search.next_size()
        if size is None:
            return
        config = config_of_round(config, size)
        trials = SizeTrials(config, blueprint, data, context)
        del blueprint  # that of rank 0 holds all weights in host memory
        first = size
        while size is not None and not needs_new_process(config, first, size):
            print(f"micro-batch {size}", flush=True)
            candidate = trials.measure(size)
            search = replace(search, tried=[*search.tried, candidate])
            if context.rank == 0:
                run_state.record_progress(self.run_dir)
                number = len(search.tried) - len(self.tried) - 1
                store.set(f"candidate/{number}", json.dumps(asdict(candidate)))
                store.add("candidates", 1)  # after it is stored, so that every rank can read all that count
            dist.barrier()  # so that the candidate is stored before the next one may run out of memory
            size = search.next_size()


def allowed_sizes(config: Config, data: TaskData, model: nn.Module) -> list[int]:
    """Return the sizes to choose from, in ascending order. A batch norm may fail for a single sample."""
    sizes = divisors(samples_per_worker(config), -(-len(data.train) // config.data_parallel))
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
    return [size for size in sizes if size > 1 or not has_batch_norm] or sizes


def whole_saves_mib(config: Config, largest: int, model: nn.Module) -> float:
    """Return the MiB of the fp32 gradients that ``train.fused_update`` saves if a step is a single micro-batch."""
    collects = config.train.fused_update and config.train.compute_weights == "step"
    if not collects or largest != samples_per_worker(config):
        return 0.0
    return 4 * sum(weight.numel() for weight in model.parameters() if weight.requires_grad) / units.MIB


def round_prefix(tried: Sequence[TriedSize]) -> str:
    """Return the prefix of the keys of a round after some candidates."""
    return f"micro-batch/{len(tried)}"


def needs_new_process(config: Config, first: int, size: int) -> bool:
    """Return whether a size cannot be tried in processes that were made for another size.

    Compiled code would be specialized for several shapes at once, and CUDA graphs keep their memory. A model with
    ``train.fused_update`` is built for a single micro-batch per step, or for several.
    """
    if size == first:
        return False
    is_fixed = load_strategy(config).fixes_accumulation or bool(config.train.fused_update)
    changes_steps = micro_batches_per_step(config, first) != micro_batches_per_step(config, size)
    return config.train.compiled != "none" or (is_fixed and changes_steps)

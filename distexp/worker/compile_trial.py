"""What ``kernels=fast`` compiles: its first choice that compiles in a trial before the training.

The trial runs the first step of the training in other processes. So the training itself has the same initial weights,
data and random numbers as without a trial, and it finds the compiled code in the cache of torch. The result is stored:
later runs need no trial, and skip what does not compile.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from distexp.config import Config, ConfigError
from distexp.config.model_checks import divisors, samples_per_worker, with_micro_batch
from distexp.distributed.context import Context
from distexp.distributed.process_group import Store, open_store, sub_store
from distexp.models.blueprint import BlueprintOfZeros
from distexp.models.transforms import CompilationError, explained_compilation
from distexp.resolve import compile_results
from distexp.resolve.compile_results import CompileResult
from distexp.runs import run_state
from distexp.runs.events import Events
from distexp.runs.record import RunSpec
from distexp.system.typed_values import parse_dataclass
from distexp.training.build import build_model, load_data
from distexp.worker.forked_trial import LATE, LONGEST, ForkedTrial, first_failure, log_of, ran_out_of_memory
from distexp.worker.size_trial import SizeTrials

BOUND_S = 120.0
"""Longest time of the first step. BLOOM-560m as one graph took 53 to 63 s on an H200 (torch 2.11). The
bound is twice that. Gemma 3 1B as one graph was not ready after 120 s, and is as fast with compiled blocks."""

REPORT_S = 5.0  # time between two lines about a compilation
MICRO_BATCH = 4  # largest micro-batch of a trial if the one of the training is still to be searched
STARTED, SECONDS = "started", "seconds"  # keys of the store: the first step has started, and how long it took


def choose_compile(spec: RunSpec, run_dir: Path, events: Events) -> tuple[RunSpec, Store | None]:
    """Return the run with a value of ``train.compile`` that compiles, and the connection to the store; None: a new one.

    All ranks must call it, before they use a GPU, and return the same. A value that was typed is never changed.
    """
    config = spec.config
    is_rank_0 = os.environ["RANK"] == "0"
    if config.kernels.compile is None or spec.config.is_preflight:
        if is_rank_0 and config.kernels.compile_note:
            print(f"note: kernels=fast compiles nothing, because {config.kernels.compile_note}", flush=True)
        return spec, None
    connection = open_store(spec)
    note, source = config.kernels.compile_note, "it compiled before"
    for choice in compile_results.choices_of(config):
        config = compile_results.with_choice(config, choice, note)
        if choice == "none":
            break
        stored = _share(connection, choice, compile_results.read_result(config, choice) if is_rank_0 else None)
        result = stored or try_choice(replace(spec, config=config), run_dir, events, connection)
        if result.compiles:
            source = source if stored else result.reason or f"compiled in {result.seconds:.0f} s"
            break
        note = compile_results.describe_failure(choice, result)
    if is_rank_0:
        because = f", because {config.kernels.compile_note}" if config.kernels.compile_note else f": {source}"
        print(f"note: kernels=fast chose train.compile={str(config.train.compile).lower()}{because}", flush=True)
    return replace(spec, config=config), connection


def _share(connection: Store, choice: str, result: CompileResult | None) -> CompileResult | None:
    """Return rank 0's result on all ranks."""
    key = f"compile-result/{choice}"
    if os.environ["RANK"] == "0":
        connection.set(key, json.dumps(asdict(result)) if result else "")
    connection.wait([key], LONGEST)
    content = connection.get(key)
    return parse_dataclass(CompileResult, json.loads(content)) if content else None


def try_choice(spec: RunSpec, run_dir: Path, events: Events, connection: Store) -> CompileResult:
    """Run the first step of a training in other processes, and store what that shows; the same on all ranks."""
    events.set_phase("compiling")
    choice = spec.config.train.compiled
    trial = CompileTrial(spec, run_dir, sub_store(prefix_of(choice), connection), events)
    result, is_certain = trial.conclude(trial.run_processes())
    events.set_phase("setup")
    if is_certain and os.environ["RANK"] == "0":
        compile_results.store_result(spec.config, choice, result)
    return result


def prefix_of(choice: str) -> str:
    """Return the prefix of the keys of a trial."""
    return f"compile/{choice}"


@dataclass(frozen=True)
class CompileTrial(ForkedTrial):
    """Processes that run the first step of a training."""

    events: Events
    clock: dict[str, float] = field(default_factory=dict)  # when the step started, and when it was last reported

    purpose: ClassVar[str] = "the trial of train.compile"
    hint: ClassVar[str] = "use train.compile=false"

    @property
    def prefix(self) -> str:
        """Return the prefix of the keys in the store."""
        return prefix_of(self.spec.config.train.compiled)

    def is_late(self, deadline: float) -> bool:
        """Report how long the first step has been running, and return whether that is too long."""
        now = time.monotonic()
        if STARTED not in self.clock and self.store.check([STARTED]):
            self.clock.update({STARTED: now, "reported": now})
        elapsed = now - self.clock.get(STARTED, now)
        if STARTED in self.clock and now - self.clock["reported"] >= REPORT_S:
            self.clock["reported"] = now
            self.events.emit(compiling=self.spec.config.train.compiled, elapsed_s=round(elapsed))
            run_state.record_progress(self.run_dir)  # The bound ends it, and not the hang timeout.
        return elapsed > BOUND_S

    def try_in_process(self, store: Store, context: Context) -> None:
        """Run the first step. Raise CompilationError if torch cannot compile it."""
        config = trial_config(self.spec.config)
        data = load_data(config, context)
        trials = SizeTrials(config, build_model(config, data, context, BlueprintOfZeros), data, context)
        torch.distributed.barrier()  # The bound is for the step, and not for another rank's download.
        store.set(STARTED, "")
        with explained_compilation(config.train.compiled):
            seconds = trials.first_step()
        store.set(SECONDS, json.dumps(seconds))

    def conclude(self, ends: Sequence[dict[str, Any]]) -> tuple[CompileResult, bool]:
        """Return the result, and whether it is certain enough to be stored."""
        if self.store.check([LATE]):
            return CompileResult(False, f"it was still compiling after {BOUND_S:.0f} s", BOUND_S), True
        if not any(end["code"] for end in ends):
            return CompileResult(True, seconds=json.loads(self.store.get(SECONDS))), True
        rank, end = first_failure(ends)
        is_certain = end.get("type") == CompilationError.__name__
        message = str(end.get("message", f"exit code {end['code']}")).strip().partition("\n")[0]
        reason = end["cause"] if is_certain else f"{end.get('type', 'the process')}: {message}"
        # The training itself reports what is not due to the compiler, such as too little memory or missing data.
        if ran_out_of_memory(ends) or not self.store.check([STARTED]):
            return CompileResult(True, f"the trial failed before it compiled ({reason}), see {log_of(rank)}"), False
        if os.environ["RANK"] == "0":
            print(f"note: for the error of the trial see {log_of(rank)}", flush=True)
        return CompileResult(False, reason), is_certain


def later_failure(config: Config, error: CompilationError) -> ConfigError:
    """Store that a choice of ``kernels=fast`` failed during the training, and return the error for the user."""
    choice = config.train.compiled
    compile_results.store_result(config, choice, CompileResult(False, error.cause))
    return ConfigError(
        f"train.compile={choice} failed during the training: {error.cause}. kernels=fast chose it, and chooses another "
        "value from now on: start the run again"
    )


def trial_config(config: Config) -> Config:
    """Return the configuration of a trial. Without a micro-batch, it has a small one."""
    if isinstance(config.train.micro_batch_size, str):
        config = with_micro_batch(config, max(divisors(samples_per_worker(config), MICRO_BATCH)))
    steps = min(2, config.train.gradient_accumulation_steps)  # the first and the last one, if there are several
    return with_micro_batch(config, config.train.micro_batch, steps)

"""Choose what to compile on each rank, with a bound that nothing keeps: ``torchrun impatient_ranks.py RUN_DIR``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from distexp.runs.events import Events
from distexp.runs.record import RunSpec
from distexp.system.processes import end_at_once
from distexp.worker import compile_trial


def main() -> None:
    """Write the choice of this rank."""
    compile_trial.BOUND_S = 0.1
    run_dir, rank = Path(sys.argv[1]), os.environ["RANK"]
    spec, store = compile_trial.choose_compile(RunSpec.read(run_dir), run_dir, Events(run_dir, enabled=rank == "0"))
    assert store is not None
    chosen = [spec.config.train.compile, spec.config.kernels.compile_note]
    (run_dir / f"choice{rank}.json").write_text(json.dumps(chosen))
    store.set(f"written/{rank}", "")
    if rank == "0":  # It has the store, which ends with it.
        store.wait([f"written/{other}" for other in range(spec.world_size)])
    end_at_once(0)


if __name__ == "__main__":
    main()

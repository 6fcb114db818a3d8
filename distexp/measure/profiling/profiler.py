"""torch's profiler over the last steps of a training, which are not measured otherwise: what was communication.

Every rank profiles: one alone would be the slowest by that, and the others would wait for it. A collective
lasts until the slowest rank has come, so waiting for it shows as communication too; the rank with the least
share waited least.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from distexp.config import TrainConfig
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.measure.clock import synchronize
from distexp.measure.profiling.chrome_trace import read_timeline
from distexp.measure.profiling.communication import Shares, shares

TRACE = Path("profile", "rank0.json.gz")
"""Within the run's directory; ui.perfetto.dev opens it."""

SILENT = "100"
"""Above every level of the profiler's own messages, which tell of each start, and of a CPU that it is no GPU."""

WARMUP = 1  # steps before the profiled ones, in which the profiler pays for its start


@dataclass(frozen=True)
class Window:
    """The steps of a training that are profiled, its last; the warm-up before them is not measured either."""

    begin: int  # steps done before the warm-up
    steps: int

    @classmethod
    def of(cls, train: TrainConfig, *, total: int, per_epoch: int, done: int) -> Window | None:
        """As many steps as are asked for, and fewer where speed would be measured on fewer; None of none.

        What is measured keeps at least half of the steps that ``measure_after_step`` leaves, and no evaluation
        lies between two profiled steps.
        """
        measurable = total - done - train.measure_after_step
        in_last_epoch = total - (total - 1) // per_epoch * per_epoch
        steps = min(train.profile_steps, measurable // 2 - WARMUP, in_last_epoch - WARMUP - 1)
        return cls(total - steps - WARMUP, steps) if steps >= 1 else None


class StepProfiler:
    """Profiles one training on one rank; nothing at all where ``train.profile_steps`` is 0."""

    def __init__(self, context: Context, wanted: int) -> None:
        self.context, self.wanted = context, wanted
        self.window: Window | None = None
        self.done = 0  # steps since the profiler began, its warm-up among them
        self.overhead_s = 0.0  # of starting and stopping, which is no part of the training
        self.spoilt: str | None = None  # why what was profiled tells nothing
        self._profile: profile | None = None
        self._finished = False

    @property
    def running(self) -> bool:
        """Whether it has begun and not ended: such steps are not measured."""
        return self._profile is not None and not self._finished

    @property
    def began(self) -> bool:
        """Whether it has begun, and perhaps ended."""
        return self._profile is not None

    def begin(self) -> None:
        """The next step is the warm-up."""
        assert self.window is not None, "who begins knows when"
        on_gpu = self.context.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
        synchronize(self.context.device)
        before = time.perf_counter()
        rhythm = schedule(wait=0, warmup=WARMUP, active=self.window.steps, repeat=1)
        self._profile = profile(activities=activities, schedule=rhythm)
        self._profile.start()
        self.overhead_s += time.perf_counter() - before

    def step(self) -> None:
        """A step is done; the device is waited for where one kind of steps ends, so that none leaks into another."""
        if self._profile is None or self.window is None or self._finished:
            return
        self.done += 1
        if self.done in (WARMUP, WARMUP + self.window.steps):
            synchronize(self.context.device)
        before = time.perf_counter()
        self._profile.step()
        if self.done == WARMUP + self.window.steps:
            self._finished = True
            self._profile.stop()
        self.overhead_s += time.perf_counter() - before

    def interrupted(self, by: str) -> None:
        """Something else lies between two steps: it would count as part of one."""
        if self.running and self.done >= WARMUP:
            self.spoilt = f"{by} between the profiled steps: not measured"

    def summary(self) -> dict[str, Any] | None:
        """``metrics.communication`` of the record, means over the ranks; None where nobody asked. A collective.

        Rank 0 leaves its trace in the run's directory.
        """
        if not self.wanted:
            return None
        if self._profile is not None and not self._finished:  # the training has to end early
            self._profile.stop()
        own: Shares | str = self.spoilt or self._own()
        return _together(gather_to_all(own), self.window)

    def _own(self) -> Shares | str:
        """This rank's shares, or why there are none."""
        if self.window is None:
            return (
                f"too few steps to measure speed and to profile as well (train.profile_steps={self.wanted}): "
                "train for more"
            )
        if self._profile is None or not self._finished:
            return "the training ended before its last steps, which are profiled"
        with tempfile.TemporaryDirectory(prefix="distexp-profile-") as folder:
            trace = Path(folder) / "trace.json"
            try:
                self._profile.export_chrome_trace(str(trace))
                self._profile = None  # and its events
                if self.context.rank == 0:
                    _keep(trace, self.context.run_dir / TRACE)
                return shares(read_timeline(trace, on_gpu=self.context.device.type == "cuda"))
            except (OSError, ValueError) as error:
                return str(error)


def _keep(trace: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    with trace.open("rb") as source, gzip.open(target, "wb", compresslevel=3) as packed:
        shutil.copyfileobj(source, packed)


def _together(ranks: Sequence[Shares | str], window: Window | None) -> dict[str, Any]:
    """The ranks' shares as one entry; figures are null, and a note says why, where any rank has none.

    ``first_step`` (counted from 1) is the first that is not measured otherwise, the profiler's warm-up.
    """
    known = [each for each in ranks if isinstance(each, Shares)]
    errors = list(dict.fromkeys(each for each in ranks if isinstance(each, str)))
    entry: dict[str, Any] = {
        "share": None,
        "exposed_share": None,
        "profiled_steps": window.steps if window else 0,
        "first_step": window.begin + 1 if window else None,
        "step_s": None,
        "by_collective": {},
        "ranks": [],
        "note": "; ".join(errors) or None,
    }
    if errors:
        return entry
    exposed = [each.exposed_share for each in known if each.exposed_share is not None]
    kinds = sorted({kind for each in known for kind in each.by_collective})
    return entry | {
        "share": _mean([each.share for each in known]),
        "exposed_share": _mean(exposed) if exposed else None,
        "step_s": _mean([each.step_s for each in known]),
        "by_collective": {kind: _mean([each.by_collective.get(kind, 0.0) for each in known]) for kind in kinds},
        "ranks": [
            {"rank": rank, "share": each.share, "exposed_share": each.exposed_share} for rank, each in enumerate(known)
        ],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

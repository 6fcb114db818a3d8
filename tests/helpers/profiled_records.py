"""Records of profiled runs that are bound by one thing, and what ``distexp explain`` finds in them."""

from __future__ import annotations

from typing import Any, NamedTuple

from distexp.explain.explanation import explain
from distexp.runs.metrics import PARTS
from distexp.runs.record import RunRecord
from tests.helpers.records import record

GPU = {"cluster__device": "cuda"}

LAUNCH_BOUND = {"matmul": 20.0, "other_kernels": 20.0, "launch_idle": 55.0, "optimizer": 5.0}
COMMUNICATION_BOUND = {"matmul": 30.0, "other_kernels": 20.0, "exposed_communication": 45.0, "optimizer": 5.0}
DATA_BOUND = {"matmul": 30.0, "other_kernels": 20.0, "data_wait": 45.0, "optimizer": 5.0}
SIX_OVERHEADS = {
    **{"matmul": 40.0, "other_kernels": 6.0, "waiting": 9.5, "host": 8.5},
    **dict.fromkeys(("launch_idle", "optimizer", "exposed_communication", "data_wait"), 9.0),
}
COMPUTE_BOUND = {"matmul": 70.0, "other_kernels": 20.0, "launch_idle": 5.0, "optimizer": 5.0}


class Finding(NamedTuple):
    """What a test compares of an explanation."""

    bottleneck: str
    share: float
    sentence: str
    alternatives: list[str]


def profiled(*ranks: dict[str, float], number: int = 0, **settings: Any) -> RunRecord:
    """Return a record with the parts of each rank, in ms. Without settings it is a run of DDP on GPUs of 140 GB."""
    settings = {"precision__name": "bf16", "peak": 1000.0, **settings}
    found = record(number, overrides=(f"train.seed={number}",), **settings)
    gpu = found.config["cluster"]["device"] == "cuda"
    found.metrics.step_breakdown = [
        {
            "rank": rank,
            "step_ms": sum(parts.values()),
            **{f"{name}_ms": parts.get(name, None if name == "bubble" else 0.0) for name in PARTS},
            "hidden_communication_ms": 1.0,
            "launches": 4000 if gpu else None,
        }
        for rank, parts in enumerate(ranks)
    ]
    return found


def with_memory(found: RunRecord, reserved_mib: float, constant_mib: float = 0.0) -> RunRecord:
    """Add the measured memory of a rank: the peak, and the part that does not grow with the micro-batch."""
    found.memory["torch"] = [{"rank": 0, "peak_reserved_mib": reserved_mib}]
    found.memory["parts"] = [{"rank": 0, "parameters_mib": constant_mib, "optimizer_states_mib": 0.0}]
    return found


def explanation(found: RunRecord) -> Finding:
    result = explain(found)
    assert result is not None
    return Finding(result.bottleneck, round(result.share, 3), result.sentence, result.alternatives)

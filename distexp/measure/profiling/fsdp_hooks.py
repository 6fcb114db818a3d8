"""The collectives of FSDP from the annotations of its hooks, which a profile has with any number of workers.

With one worker FSDP gathers and reduces nothing. Then its hooks show where it would.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distexp.measure.profiling.chrome_trace import FSDP_HOOK
from distexp.measure.profiling.intervals import Interval
from distexp.measure.profiling.phases import StepPhases
from distexp.system.torch_internals.fsdp import FSDPUnitSize

ALL_GATHER, REDUCE_SCATTER = "all_gather", "reduce_scatter"

HOOK = re.compile(rf"{FSDP_HOOK}(\w+)(?: \(([^)]*)\)| for ([^\[]*?))?(?: \[.*\])?$")
"""FSDP::pre_forward (layers.0), FSDP::backward_prefetch for layers.1, FSDP::pre_forward of the root."""


@dataclass(frozen=True)
class HookCollective:
    """A collective that FSDP starts in a hook."""

    when: float
    kind: str
    bytes: int


def collectives_of_hooks(
    calls: Sequence[tuple[str, Interval]], units: Mapping[str, FSDPUnitSize], phases: StepPhases
) -> list[HookCollective]:
    """Return the collectives of a step, in the order of time.

    Args:
        calls: Hooks by name, with their times on the CPU.
        units: Sizes of the units by name; the root has an empty name.
        phases: Phases of the step.
    """
    first, last = phases.window
    hooks = sorted((when[0], name) for name, when in calls if name.startswith(FSDP_HOOK) and first <= when[0] < last)
    parsed = [(when, *_parse(name)) for when, name in hooks]
    known = [(when, hook, units[unit]) for when, hook, unit in parsed if unit in units]
    reduced = [HookCollective(when, REDUCE_SCATTER, u.reduced_bytes) for when, h, u in known if h == REDUCE_HOOK]
    if any(hook == "all_gather" for _, hook, _ in parsed):  # several workers
        gathered = [HookCollective(when, ALL_GATHER, u.gathered_bytes) for when, h, u in known if h == "all_gather"]
    else:
        gathered = _gathers([hook for hook in parsed if hook[2] in units], units, phases)
    return sorted([*gathered, *reduced], key=lambda collective: collective.when)


REDUCE_HOOK = "post_backward_reduce"


def _parse(name: str) -> tuple[str, str]:
    """Return the hook and the unit of an annotation."""
    found = HOOK.match(name)
    return ("", "") if found is None else (found[1], found[2] or found[3] or "")


def _gathers(
    hooks: Sequence[tuple[float, str, str]], units: Mapping[str, FSDPUnitSize], phases: StepPhases
) -> list[HookCollective]:
    """Return where FSDP would gather: in the first hook that needs the weights of a unit that are not there."""
    present: set[str] = set()
    found = []
    keeps = not any(unit.reshards_after_forward for name, unit in units.items() if name)
    last = phases.backward[-1][0] if phases.backward else phases.window[0]  # start of the last backward pass

    def frees(hook: str, unit: FSDPUnitSize, when: float) -> bool:
        after_forward = hook == "post_forward" and unit.reshards_after_forward
        return after_forward or (hook == "post_backward_reshard" and (not keeps or when >= last))

    for when, hook, unit in hooks:
        if hook in ("pre_forward", "pre_backward", "backward_prefetch") and unit not in present:
            present.add(unit)
            found.append(HookCollective(when, ALL_GATHER, units[unit].gathered_bytes))
        elif frees(hook, units[unit], when):
            present.discard(unit)
    return found

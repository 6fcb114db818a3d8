"""Tests of the communication in the rough forecast of a search, compared with that of ``distexp forecast``."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest

from distexp.choose.predictions.rough_forecast import MachineSpeeds, Work, rough_step_s
from distexp.forecast.communication import Target, add_replication, plan_communication
from distexp.runs.step_files import BACKWARD, FORWARD, OPTIMIZER, Collective, Item, Parameters, Segment, StepModel
from distexp.strategies.base import load_strategy
from tests.helpers.runs import resolve_cell

PARAMETERS = 1_000_000
SCALAR_BYTES = 100
"""Collectives up to this size are the sums of norms."""


def communication_s(overrides: Sequence[str], link: float, network: float) -> float:
    """Return the communication of a step without computation, with links of so many GB/s."""
    config = resolve_cell("cluster.device=cpu", *overrides)
    speeds = MachineSpeeds(inf, inf, link, network_gb_per_s=network, launch_s=0.0)
    return rough_step_s(config, Work(0.0, 0.0, 0.0, PARAMETERS), speeds)


def planned_bytes(overrides: Sequence[str]) -> float:
    """Return the bytes that each of two workers sends by ``distexp forecast``. An all-reduce sends each value twice."""
    config = resolve_cell("cluster.device=cpu", *overrides)
    settings, steps = load_strategy(config).communication(config), config.train.gradient_accumulation_steps
    phases = [(phase, step) for step in range(steps) for phase in (FORWARD, BACKWARD)]
    items: list[Item] = [Segment(phase, step, 0.001, 0.01, 0.01, 0.01, 5) for phase, step in phases]
    items.append(Segment(OPTIMIZER, steps - 1, 0.001, 0.01, 0.01, 0.01, 5))
    units = (Parameters("a", (PARAMETERS // 2,)), Parameters("b", (PARAMETERS // 2,)))
    groups = ((PARAMETERS,),)
    model = StepModel(False, 1, 1, steps, 0.1, ((0.1,),), tuple(items), units, group_elements=groups)
    planned = plan_communication(items, model, settings, micro_batches=steps)
    planned = add_replication(planned, settings, Target(1, 2, steps, 8.0))
    sent = [item for item in planned if isinstance(item, Collective) and (item.bytes or 0) > SCALAR_BYTES]
    return sum((2 if item.kind == "all_reduce" else 1) * (item.bytes or 0) for item in sent) / 2


STRATEGIES = (
    *("strategy=ddp", "sharding=no_shard", "sharding=full_shard", "sharding=shard_grad_op"),
    *("zero_stage=0", "zero_stage=1", "zero_stage=2"),
)
"""Strategies whose collectives do not depend on the modules of the model, as those of ZeRO-3 do."""


@pytest.mark.parametrize(("precision", "steps"), [("fp32", 4), ("bf16", 1)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_search_expects_the_collectives_of_distexp_forecast(strategy: str, precision: str, steps: int) -> None:
    overrides = (
        *(strategy, f"precision={precision}", f"train.gradient_accumulation_steps={steps}"),
        *("cluster.workers_per_node=2", "scale=full"),
    )
    assert 1e9 * communication_s(overrides, 1.0, 1.0) == pytest.approx(planned_bytes(overrides))


def test_the_workers_of_a_node_use_the_network_together() -> None:
    nodes = ("strategy=ddp", "cluster.nodes=2")
    one = communication_s((*nodes, "cluster.workers_per_node=1"), 200.0, 20.0)
    four = communication_s((*nodes, "cluster.workers_per_node=4"), 200.0, 20.0)
    sixteen = communication_s((*nodes, "cluster.workers_per_node=16"), 200.0, 20.0)
    assert four == pytest.approx(one / 4 * (7 / 8) / (1 / 2))
    assert sixteen == pytest.approx(8 * PARAMETERS / 200e9 * 31 / 32)


def test_hybrid_shard_sends_only_its_share_between_nodes() -> None:
    overrides = ("sharding=hybrid_shard", "cluster.nodes=2", "cluster.workers_per_node=4")
    inside, between = 12 * PARAMETERS / 200e9 * 3 / 4, 8 * PARAMETERS / 4 / 1e9 / 2
    assert communication_s(overrides, 200.0, 1.0) == pytest.approx(inside + between)

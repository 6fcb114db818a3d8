"""Tests of the collectives of each strategy, for a profiled run with one worker. Times are in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from distexp.config import ConfigError
from distexp.forecast.communication import Target, add_replication, group_layout, plan_communication, with_micro_batches
from distexp.forecast.profiled_run import assign_waits, fill_sizes
from distexp.runs.step_files import (
    BACKWARD,
    FORWARD,
    NEXT,
    OPTIMIZER,
    Collective,
    Item,
    Parameters,
    Segment,
    StepModel,
)
from distexp.strategies.communication import FSDPCommunication, Sharding, StepCommunication
from distexp.strategies.ddp import DDP, DDPCommunication
from distexp.strategies.deepspeed import DeepSpeed
from distexp.strategies.single import SingleCommunication
from distexp.strategies.zero.ds_communication import ZeroCommunication, ZeroOptions, read_zero_options

MIB = 2**20
UNITS = (Parameters("embedding", (4 * MIB,)), Parameters("block", (MIB, MIB)), Parameters("head", (2 * MIB,)))
"""8 Mi parameters."""


def step(micro_batches: int = 2, parts: int = 8) -> tuple[Item, ...]:
    """Return a step of one worker, whose passes have so many segments of a second."""
    passes = [(phase, number) for number in range(micro_batches) for phase in (FORWARD, BACKWARD)]
    segments: list[Item] = [Segment(phase, number, 0.1, 1.0, 1.1) for phase, number in passes for _ in range(parts)]
    return (*segments, Segment(OPTIMIZER, micro_batches - 1, 0.1, 1.0, 1.1))


def model(
    items: Sequence[Item], *, workers: int = 1, micro_batches: int = 2, buckets: tuple[int, ...] = ()
) -> StepModel:
    return StepModel(
        on_gpu=True,
        workers=workers,
        nodes=1,
        micro_batches=2,
        step_s=1.0,
        step_s_by_rank=((1.0,),),
        items=tuple(items),
        units=UNITS,
        bucket_elements=buckets,
        group_elements=((8 * MIB,),),
        modules=((0,), (1, 2), (3,)),
    )


def plan(settings: StepCommunication, micro_batches: int = 2) -> tuple[Item, ...]:
    items = step(micro_batches)
    found = plan_communication(items, model(items), settings, micro_batches=micro_batches)
    return assign_waits(found, settings, on_gpu=True)


def zero(stage: int, **options: Any) -> ZeroCommunication:
    """Return the settings of a ZeRO stage in 16 bits, with small buckets."""
    options = {"reduce_bucket_size": 4 * MIB, **options}
    return ZeroCommunication(stage=stage, zero=ZeroOptions(**options), weight_bytes=2, gradient_bytes=2)


def places(items: Sequence[Item], kind: str) -> list[tuple[str, int, float, int]]:
    """Return phase, micro-batch, seconds of the pass before it and MiB of each collective of a kind."""
    found = []
    for position, item in enumerate(items):
        if isinstance(item, Collective) and item.kind == kind and (item.bytes or 0) > 4:
            place = item.phase, item.micro_batch
            before = [earlier for earlier in items[:position] if isinstance(earlier, Segment)]
            done = sum(segment.device_s for segment in before if (segment.phase, segment.micro_batch) == place)
            found.append((*place, done, (item.bytes or 0) // MIB))
    return found


def test_ddp_reduces_its_buckets_in_the_last_backward_pass() -> None:
    settings = DDPCommunication(bucket_bytes=16 * MIB)
    # head 8 MiB closes the first bucket; blocks and embedding: 4 + 4 + 16 MiB
    assert settings.buckets(model(step())) == [8 * MIB, 24 * MIB]
    found = plan(settings)
    assert places(found, "all_reduce") == [(BACKWARD, 1, 2, 8), (BACKWARD, 1, 8, 24)]
    assert {item.awaited for item in found if isinstance(item, Collective)} == {OPTIMIZER}


def test_a_set_bucket_size_is_also_that_of_the_first_bucket() -> None:
    chosen = DDP().communication({"ddp": {"bucket_cap_mb": 16}})
    assert chosen.buckets(model(step())) == [16 * MIB, 16 * MIB]
    default = DDP().communication({})
    assert default.buckets(model(step())) == [8 * MIB, 24 * MIB]


def test_ddp_uses_the_buckets_and_the_places_of_the_profiled_run() -> None:
    items = list(step())
    for position in (28, 30):  # both are in the last backward pass
        items.insert(position, Collective("all_reduce", None, 1, "all", BACKWARD, 1))
    settings = DDPCommunication(gradient_bytes=2)
    profiled = model(items, buckets=(2 * MIB, 6 * MIB))
    found = plan_communication(items, profiled, settings, micro_batches=2)
    assert places(found, "all_reduce") == [(BACKWARD, 1, 4, 4), (BACKWARD, 1, 5, 12)]


def test_zero_1_reduces_after_the_last_backward_pass_and_gathers_after_the_optimizer() -> None:
    assert zero(1).buckets(UNITS) == [4 * MIB, 4 * MIB]
    found = plan(zero(1))
    assert places(found, "all_reduce") == [(BACKWARD, 1, 8, 8), (BACKWARD, 1, 8, 8)]
    assert places(found, "all_gather") == [(OPTIMIZER, 1, 1, 16)]


def test_zero_2_reduces_in_each_micro_batch() -> None:
    found = plan(zero(2))
    # both halves of the parameters are ready after half of the pass and at its end
    assert places(found, "all_reduce") == [(BACKWARD, m, done, 8) for m in (0, 1) for done in (4, 8)]
    assert {item.awaited for item in found if isinstance(item, Collective)} == {NEXT}
    overlapped = plan(zero(2, overlap_comm=True))
    assert OPTIMIZER in {item.awaited for item in overlapped if isinstance(item, Collective)}


@pytest.mark.parametrize(("sharding", "gathers"), [("full_shard", 12), ("shard_grad_op", 3), ("hybrid_shard", 12)])
def test_fsdp_gathers_as_its_sharding_and_reduces_once(sharding: str, gathers: int) -> None:
    found = plan(FSDPCommunication(sharding=Sharding(sharding), weight_bytes=2))
    assert len(places(found, "all_gather")) == gathers
    assert [place[1] for place in places(found, "reduce_scatter")] == [1, 1, 1]
    norms = [item for item in found if isinstance(item, Collective) and item.bytes == 4]
    assert [(item.kind, item.phase) for item in norms] == [("all_reduce", OPTIMIZER)]


def test_hybrid_shard_reduces_its_share_between_replicas() -> None:
    settings = FSDPCommunication(sharding=Sharding("hybrid_shard"))
    target = Target(nodes=2, workers_per_node=4, micro_batches=2, samples_per_step=1)
    found = add_replication(plan(settings), settings, target)
    for one, following in pairwise(found):
        if isinstance(one, Collective) and one.kind == "reduce_scatter":
            assert isinstance(following, Collective)
            assert (following.kind, following.axis, following.bytes) == (
                "all_reduce",
                "replicate",
                (one.bytes or 0) // 4,
            )
    shard, replicate = (group_layout(settings, axis, target) for axis in ("shard", "replicate"))
    assert (shard.ranks, shard.nodes, replicate.ranks, replicate.nodes) == (4, 1, 2, 2)
    assert add_replication(plan(settings), settings, Target(1, 4, 2, 1)) == plan(settings)


def test_a_single_worker_has_no_plan() -> None:
    assert plan(SingleCommunication()) == step()


def observed(micro_batches: int, kinds: Sequence[str] = ("all_reduce",)) -> tuple[Item, ...]:
    """Return a step of two workers with one micro-batch each second, and reductions in the last one."""
    items: list[Item] = [Collective("all_reduce", 4, 2, "all", FORWARD, 0, transfer_s=0.1)]
    for number in range(micro_batches):
        items += [Segment(FORWARD, number, 0.1, 1.0, 1.1), Segment(BACKWARD, number, 0.1, number + 2.0, 2.1)]
    last = micro_batches - 1
    items += [Collective(kind, None, 2, "all", BACKWARD, last, transfer_s=0.5) for kind in kinds]
    return (*items, Segment(OPTIMIZER, last, 0.1, 1.0, 1.1))


ON_DDP = DDPCommunication()


@pytest.mark.parametrize("wanted", [1, 2, 3, 5])
@pytest.mark.parametrize("profiled", [1, 2, 3])
def test_another_number_of_micro_batches_has_one_reduction(profiled: int, wanted: int) -> None:
    found = with_micro_batches(observed(profiled), profiled, wanted, ON_DDP)
    backward = [item for item in found if isinstance(item, Segment) and item.phase == BACKWARD]
    assert [item.micro_batch for item in backward] == list(range(wanted))
    collectives = [(item.phase, item.micro_batch) for item in found if isinstance(item, Collective)]
    assert [collective for collective in collectives if collective[0] == BACKWARD] == [(BACKWARD, wanted - 1)]
    assert collectives.count((FORWARD, 0)) <= 1
    assert isinstance(found[-1], Segment)
    assert (found[-1].phase, found[-1].micro_batch) == (OPTIMIZER, wanted - 1)


def test_micro_batches_in_between_are_as_the_profiled_one_in_between() -> None:
    found = with_micro_batches(observed(3), 3, 5, ON_DDP)
    times = [item.device_s for item in found if isinstance(item, Segment) and item.phase == BACKWARD]
    assert times == [2, 3, 3, 3, 4]
    items = tuple(replace_number(item, 2, 7) for item in observed(3))  # of 8 micro-batches the profile has three
    again = with_micro_batches(items, 8, 8, ON_DDP)
    assert [i.device_s for i in again if isinstance(i, Segment) and i.phase == BACKWARD] == [2, *[3] * 6, 4]


def replace_number(item: Item, old: int, new: int) -> Item:

    return replace(item, micro_batch=new) if item.micro_batch == old else item


def test_zero_2_reduces_in_added_micro_batches_and_shard_grad_op_does_not_gather() -> None:
    found = with_micro_batches(observed(1), 1, 3, zero(2))
    assert [i.micro_batch for i in found if isinstance(i, Collective) and i.phase == BACKWARD] == [0, 1, 2]
    keeps = FSDPCommunication(sharding=Sharding("shard_grad_op"))
    gather = Collective("all_gather", 8, 2, "shard", FORWARD, 0, transfer_s=0.1)
    items = (gather, *observed(2))
    assert [i.micro_batch for i in with_micro_batches(items, 2, 4, keeps) if i == gather or is_gather(i)] == [0]
    assert [i.phase for i in with_micro_batches(items, 2, 1, keeps) if is_gather(i)] == [FORWARD]


def is_gather(item: Item) -> bool:
    return isinstance(item, Collective) and item.kind == "all_gather"


def test_sizes_that_gloo_does_not_record_come_from_the_model() -> None:
    items = observed(1, kinds=("all_reduce", "all_reduce"))
    known = fill_sizes(items, model(items, workers=2, buckets=(MIB, 7 * MIB)), ON_DDP)
    assert [item.bytes for item in known if isinstance(item, Collective)] == [4, 4 * MIB, 28 * MIB]
    four = observed(1, kinds=("all_reduce",) * 4)  # not the planned buckets
    equal = fill_sizes(four, model(four, workers=2), ON_DDP)
    assert [item.bytes for item in equal if isinstance(item, Collective)] == [4, *[8 * MIB] * 4]


def test_settings_are_read_from_a_configuration() -> None:
    config = {"strategy": {"name": "deepspeed"}, "precision": {"name": "bf16"}, "deepspeed": {"zero_stage": 3}}
    config["offload"] = {"enabled": True}
    assert DeepSpeed().communication(config) == ZeroCommunication(
        stage=3, weight_bytes=2, gradient_bytes=2, offloads=True
    )
    ddp = {"strategy": {"name": "ddp"}, "precision": {"name": "bf16"}, "ddp": {"communication": "bf16"}}
    assert DDP().communication(ddp).gradient_bytes == 2
    small = DDP().communication({**ddp, "ddp": {"bucket_cap_mb": 2}})
    assert (small.gradient_bytes, small.bucket_bytes) == (4, 2 * MIB)


def test_options_of_deepspeed_are_those_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"zero_optimization": {"stage": 3, "reduce_bucket_size": 5, "overlap_comm": false}}')
    found = read_zero_options(tmp_path)
    assert found == ZeroOptions(reduce_bucket_size=5, overlap_comm=False)
    assert [found.overlaps(stage) for stage in (2, 3)] == [False, False]
    assert [ZeroOptions().overlaps(stage) for stage in (2, 3)] == [False, True], "the defaults of DeepSpeed"
    path.unlink()
    with pytest.raises(ConfigError, match=r"has no readable ds_config\.json .*: give the directory that the run has"):
        read_zero_options(tmp_path)

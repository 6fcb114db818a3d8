"""Tests of the candidates of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from distexp.choose.axes import read_axes
from distexp.choose.candidate import Candidate, Status
from distexp.choose.loss_check import references_of
from distexp.choose.search_output import count_reasons
from distexp.choose.space import make_space, with_overrides
from distexp.compose.composition import MakeCell
from distexp.config import ConfigError
from distexp.runs.record_sections import Predicted
from tests.helpers.planning import composed

COMMAND = ("cluster.device=cpu", "cluster.workers_per_node=2", "train.global_batch_size=16")


@pytest.fixture(scope="module", name="command")
def composed_command() -> Iterator[tuple[list[str], MakeCell]]:
    with composed(COMMAND) as ((cell,), make):
        yield cell.overrides, make


SpaceOf = Callable[..., list[Candidate]]


@pytest.fixture(name="space_of")
def space_maker(command: tuple[list[str], MakeCell]) -> SpaceOf:
    """Return the function that makes the space of further overrides of the command."""

    def space_of(more: Sequence[str], *, gpus: Sequence[int] = (), space: Sequence[str] = ()) -> list[Candidate]:
        overrides = with_overrides(command[0], more)
        return make_space(command[1], overrides, gpus, read_axes(space, overrides))

    return space_of


def labels(candidates: Sequence[Candidate]) -> set[str]:
    return {" ".join(candidate.overrides) for candidate in candidates}


def test_the_space_has_divisors_of_the_batch_and_reasons_for_what_is_invalid_or_double(space_of: SpaceOf) -> None:
    found = space_of([], gpus=[1, 2, 3], space=["strategy=single,ddp", "train.activation_checkpointing=false"])
    assert {candidate.micro_batch for candidate in found if candidate.workers == 1} == {1, 2, 4, 8, 16}
    assert "strategy=ddp cluster.workers_per_node=2 train.micro_batch_size=8" in labels(found)
    assert {
        candidate.config.train.gradient_accumulation_steps
        for candidate in found
        if candidate.config and candidate.workers == 2
    } == {*(1, 2, 4, 8)}
    reasons = {candidate.workers: candidate.reason for candidate in found if candidate.status is Status.PRUNED}
    assert reasons[3].startswith("invalid: train.global_batch_size=16 is no multiple")
    doubles = [candidate for candidate in found if candidate.reason.startswith("the same as strategy=")]
    assert all("kernels=fast" in candidate.overrides for candidate in doubles)


def test_a_batch_that_no_number_of_workers_can_share_is_an_error(space_of: SpaceOf) -> None:
    message = r"global_batch_size=7 is no multiple of 2 or 4 workers: use 6 or 8, or other numbers of workers \(choose"
    with pytest.raises(ConfigError, match=message):
        space_of(["train.global_batch_size=7"], gpus=[4, 2])


def test_auto_varies_the_micro_batch_also_if_only_another_axis_is_named(space_of: SpaceOf) -> None:
    found = space_of(["train.micro_batch_size=auto"], space=["strategy"])
    assert {candidate.micro_batch for candidate in found} == {1, 2, 4, 8}


def test_what_the_command_sets_does_not_vary(space_of: SpaceOf) -> None:
    command = ["sharding=shard_grad_op", "kernels=reference", "train.micro_batch_size=2", "offload=false"]
    found = space_of([*command, "train.activation_checkpointing=true"])
    assert [candidate.overrides[0] for candidate in found] == ["sharding=shard_grad_op"]
    assert found[0].config is not None
    assert found[0].config.train.activation_checkpointing


def test_a_key_alone_varies_only_that_axis(space_of: SpaceOf) -> None:
    found = space_of(["train.micro_batch_size=4"], space=["kernels"])
    assert [candidate.overrides[:-1] for candidate in found] == [
        ("cluster.workers_per_node=2",),
        ("kernels=fast", "cluster.workers_per_node=2"),
    ]


def test_a_key_of_a_strategy_is_for_its_candidates(space_of: SpaceOf) -> None:
    fixed = ["kernels=reference", "ddp.bucket_cap_mb=5,25", "train.micro_batch_size=1", "offload=false"]
    found = labels(space_of([], space=["strategy=ddp,fsdp", "sharding=full_shard", *fixed]))
    assert len([label for label in found if "strategy=ddp" in label and "bucket" in label]) == 4
    assert len([label for label in found if "sharding=full_shard" in label and "bucket" not in label]) == 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("train.learning_rate=1,2", "train.learning_rate=1,2 changes the training"),
        ("stratgy=ddp", "did you mean strategy?"),
        ("strategy=dp", "strategy=dp is not possible: use ddp, deepspeed"),
        ("train.micro_batch_size=0", "use at least 1"),
        ("train.compile=yes", "train.compile=yes is not possible: use false, true, blocks"),
        ("fsdp.forward_prefetch", "has no values"),
    ],
)
def test_a_wrong_entry_is_an_error_with_a_hint(entry: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_axes([entry], [])
    assert message in str(caught.value)


def test_the_global_batch_is_required(space_of: SpaceOf) -> None:
    with pytest.raises(ConfigError, match=r"set train\.global_batch_size"):
        space_of(["train.global_batch_size=null"])


def test_single_is_searched_on_one_worker(command: tuple[list[str], MakeCell]) -> None:
    given = ["cluster.device=cpu", "train.global_batch_size=4", "strategy=single", "kernels=reference"]
    found = make_space(command[1], given, (), read_axes(["train.micro_batch_size"], given))
    assert {(candidate.workers, candidate.micro_batch) for candidate in found} == {(1, 1), (1, 2), (1, 4)}
    with pytest.raises(ConfigError, match=r"strategy=single needs choose\.gpus=1"):
        make_space(command[1], given, (2,), read_axes([], given))


def test_overrides_of_a_candidate_replace_those_of_the_command() -> None:
    command = ["strategy=ddp", "train.micro_batch_size=4", "train.seed=1"]
    assert with_overrides(command, ["zero_stage=2", "train.micro_batch_size=8"]) == [
        *("train.seed=1", "zero_stage='2'", "train.micro_batch_size=8")
    ]


def test_degrees_vary_with_their_own_micro_batches_and_reasons(space_of: SpaceOf) -> None:
    entries = ["strategy=ddp,deepspeed", "zero_stage=1", "kernels=reference", "train.activation_checkpointing=false"]
    entries.append("offload=false")
    degrees = ["parallel.tensor=1,2", "parallel.pipeline=1,2", "parallel.schedule=gpipe,1f1b"]
    found = space_of(["model=gpt_tiny", "dataset=synthetic"], space=[*entries, *degrees])
    assert not any("parallel.tensor=1" in label or "parallel.pipeline=1" in label for label in labels(found))
    assert all("parallel.pipeline=2" in label for label in labels(found) if "schedule" in label)
    valid = {candidate.family[:-1]: set[int]() for candidate in found if candidate.config is not None}
    for candidate in found:
        if candidate.config is not None:
            valid[candidate.family[:-1]].add(candidate.micro_batch)
    rows = {1, 2, 4, 8}
    assert valid == {
        ("strategy=ddp",): rows,
        ("zero_stage=1",): rows,
        ("strategy=ddp", "parallel.tensor=2"): {*rows, 16},  # One group has all rows of the batch.
        ("strategy=ddp", "parallel.pipeline=2", "parallel.schedule=gpipe"): {*rows, 16},
        ("strategy=ddp", "parallel.pipeline=2", "parallel.schedule=1f1b"): rows,  # It needs two micro-batches.
    }
    reasons = count_reasons([candidate for candidate in found if candidate.config is None])
    assert "parallel.tensor=2 is not supported by strategy=deepspeed" in reasons
    assert any(reason.startswith("parallel.tensor=2 parallel.pipeline=2 have groups of") for reason in reasons)


@pytest.mark.parametrize(
    ("command", "space", "unused"),
    [
        (["strategy=ddp"], ["sharding=full_shard,shard_grad_op"], "sharding"),
        (["strategy=ddp"], ["strategy=ddp", "fsdp.backward_prefetch=1,2"], "fsdp.backward_prefetch"),
        ([], ["sharding", "train.micro_batch_size"], "sharding"),
        ([], ["strategy=fsdp", "sharding", "train.micro_batch_size"], ""),
        ([], ["fsdp.backward_prefetch=1,2", "train.micro_batch_size"], ""),  # for the strategy of the command
        (["strategy=ddp"], ["strategy=fsdp", "sharding=full_shard"], ""),
    ],
)
def test_a_key_of_a_strategy_that_is_not_tried_is_refused(command: list[str], space: list[str], unused: str) -> None:
    if not unused:
        assert read_axes(space, command)
        return
    with pytest.raises(ConfigError, match=f"choose.space: {unused} has no effect, because strategy=fsdp is not tried"):
        read_axes(space, command)


IMAGES = ("model=resnet_tiny", "dataset=tinyimagenet_sample")


@pytest.mark.parametrize(
    ("more", "space", "sizes"),
    [
        ((), (), {8}),
        (("train.micro_batch_size=auto",), (), {1, 2, 4, 8, 16}),
        (("train.micro_batch_size=4",), (), {4}),
        ((), ("strategy", "train.micro_batch_size=2,4"), {2, 4}),
    ],
)
def test_a_model_with_batch_norms_keeps_a_micro_batch_that_all_workers_can_have(
    more: Sequence[str], space: Sequence[str], sizes: set[int], space_of: SpaceOf
) -> None:
    found = space_of([*IMAGES, *more], gpus=[1, 2], space=[*space, "offload=false"])
    assert {candidate.micro_batch for candidate in found} == sizes


def test_a_batch_of_a_model_with_batch_norms_that_no_workers_can_share_is_an_error(space_of: SpaceOf) -> None:
    with pytest.raises(ConfigError, match=r"train.global_batch_size=3 is no multiple of 2 workers: use 2 or 4"):
        space_of([*IMAGES, "train.global_batch_size=3"])


def test_losses_of_a_model_with_batch_norms_are_compared_at_the_same_micro_batch(space_of: SpaceOf) -> None:
    more = [*IMAGES, "kernels=reference", "train.micro_batch_size=auto"]
    found = space_of(more, gpus=[1, 2], space=["strategy=single,ddp"])
    for candidate in found:
        candidate.predicted = Predicted(verdict="fits")
    winner = next(one for one in found if one.workers == 2 and one.micro_batch == 4)
    first, *_, last = references_of(winner, found, [])
    assert (first.micro_batch, first.workers, last.micro_batch == 4) == (4, 1, False)

"""Which changes of a configuration make another run, and which do not."""

from __future__ import annotations

import json

import pytest

from distexp.resolve.run_id import run_id
from tests.helpers.runs import resolve_cell


def test_run_id_depends_on_the_training_and_not_on_the_machine() -> None:
    base = run_id(resolve_cell("strategy=ddp"))
    assert run_id(resolve_cell("strategy=ddp", "name=other", "cluster.cpus_per_worker=3")) == base
    for change in ("strategy=fsdp", "train.seed=1", "cluster.workers_per_node=3", "model.num_layers=3"):
        assert run_id(resolve_cell(change)) != base


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("strategy=single", "cluster.workers_per_node=1"), "e2b2b1b6e10b"),
        (("strategy=ddp", "train.compile=true", "cluster.workers_per_node=1"), "3d3646b5f9c0"),
        (("sharding=full_shard", "model=gpt_tiny", "cluster.workers_per_node=1"), "54d114150bfc"),
        (("zero_stage=2", "offload=true", "precision=bf16", "cluster.workers_per_node=1"), "d05f6f05bb74"),
        (("model=resnet_tiny", "dataset=synthetic", "strategy=ddp", "cluster.workers_per_node=1"), "2b3ce66b3b2f"),
        (
            ("model=gpt", "dataset=squad", "train.logits=targets", "strategy=ddp", "cluster.workers_per_node=1"),
            "94733394940a",
        ),
        (("engine=hf_trainer", "strategy=ddp", "cluster.workers_per_node=1"), "cbd35771f2dd"),
    ],
)
def test_run_ids_stay_those_of_finished_runs(overrides: tuple[str, ...], expected: str) -> None:
    """A new key changes no id unless it is set. Mark it with ``id_if_changed``."""
    assert run_id(resolve_cell(*overrides, "cluster.device=cpu")) == expected


def test_run_id_depends_on_the_content_of_the_data(tmp_path_factory: pytest.TempPathFactory) -> None:
    def identity(text: str) -> str:
        path = tmp_path_factory.mktemp("data") / "squad[1].json"
        path.write_text(text)
        path.with_name("squad1.json").write_text("another file, which the name would match as a pattern")
        return run_id(resolve_cell("dataset=squad", f"dataset.train_path='{path}'", f"dataset.eval_path='{path}'"))

    question = {"id": "1", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]}
    text = json.dumps({"data": [{"paragraphs": [{"context": "Ada wrote it.", "qas": [question]}]}]})
    assert identity(text) == identity(text) != identity(f"{text} ")


def test_run_id_does_not_depend_on_the_queue() -> None:
    base = run_id(resolve_cell("cluster=slurm"))
    place = ("cluster.partition=p", "cluster.wait=false", "cluster.memory_gb=3", "+cluster.environment.A=b")
    assert run_id(resolve_cell("cluster=slurm", *place)) == base
    assert run_id(resolve_cell("cluster=slurm", "cluster.nodes=2")) != base

"""``distexp verify``: its output, its exit codes, and runs without a false alarm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import REPOSITORY, run_distexp
from tests.verify.test_museum import CONF

OPTIONS = ("model=gpt_tiny", "cluster.device=cpu", "--config-dir", str(CONF), "trusted_packages=[tests]")
ENV = {"PYTHONPATH": str(REPOSITORY)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what one command printed about DDP, a strategy with a bug, and one that fails."""
    cells = [
        ["strategy=ddp"],
        ["strategy=museum", "strategy.options.bug=summed"],
        ["strategy=museum", "strategy.options.bug=fails"],
    ]
    swept = f"sweep.cells={json.dumps(cells, separators=(',', ':'))}"
    folder = tmp_path_factory.mktemp("verify")
    done = run_distexp("verify", "--quick", "--json", "--multirun", swept, *OPTIONS, cwd=folder, env=ENV)
    assert done.returncode == 1, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_the_same_training_is_equal(results: list[dict[str, Any]]) -> None:
    found = results[0]
    assert (found["label"], found["status"]) == ("ddp", "equal")
    assert [phase["phase"] for phase in found["phases"]] == ["sgd", "uneven", "accumulation", "training"]
    for phase in found["phases"]:
        assert {"samples", "initial", "loss", "gradient", "norm", "lr", "update"} <= phase["worst"].keys()
        assert phase["worst"]["gradient"]["error"] < 1e-5
    assert "evaluation" in found["phases"][1]["worst"]


def test_a_difference_has_its_place_and_its_cause(results: list[dict[str, Any]]) -> None:
    cause: Mapping[str, Any] = results[1]["cause"]
    assert (cause["id"], cause["phase"], cause["step"]) == ("summed", "sgd", 1)
    assert cause["sentence"].endswith("are 2 times those of single: summed over the 2 workers, not averaged")
    proof = json.loads(Path(results[1]["proof"]).read_text())
    assert proof == results[1]
    assert proof["versions"]["torch"]
    assert len(proof["configuration"]) == 12


def test_a_strategy_that_fails_cannot_be_compared(results: list[dict[str, Any]]) -> None:
    found = results[2]
    assert found["status"] == "not comparable"
    assert found["reasons"][0] == (
        "phase sgd: the variant run failed on rank 1: RuntimeError: the second update is broken"
    )


def test_workers_elsewhere_are_refused(tmp_path: Path) -> None:
    done = run_distexp("verify", "cluster=slurm", cwd=tmp_path)
    assert done.returncode == 2
    assert "use cluster=local" in done.stderr
    assert not list(tmp_path.rglob("proof.json"))


def test_a_run_refuses_the_keys_of_verify(tmp_path: Path) -> None:
    done = run_distexp("verify.quick=true", cwd=tmp_path)
    assert done.returncode == 2
    assert "verify.quick=true is for distexp verify" in done.stderr


CLEAN = (
    ["strategy=ddp"],
    ["strategy=ddp", "kernels=fast"],
    ["strategy=ddp", "precision=bf16"],
    ["strategy=ddp", "engine=hf_trainer"],
    ["strategy=fsdp", "train.activation_checkpointing=true"],
    ["strategy=fsdp", "precision=bf16"],
    ["strategy=fsdp", "engine=hf_trainer"],
    ["sharding=shard_grad_op"],
    ["sharding=hybrid_shard", "cluster.nodes=2", "cluster.workers_per_node=2"],
    ["sharding=full_shard", "offload=true"],
    ["zero_stage=0"],
    ["zero_stage=1"],
    ["zero_stage=2", "offload=true"],
    ["zero_stage=2", "engine=hf_trainer"],
    ["zero_stage=3"],
    ["strategy=ddp", "model=resnet_tiny"],
    ["strategy=fsdp", "model=resnet_tiny"],
    ["strategy=fsdp", "model=gpt_tiny"],
)


@pytest.mark.slow
def test_the_quick_phases_give_no_false_alarm(tmp_path: Path) -> None:
    swept = f"sweep.cells={json.dumps(CLEAN, separators=(',', ':'))}"
    done = run_distexp("verify", "--quick", "--json", "--multirun", swept, "cluster.device=cpu", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert len(found) == len(CLEAN)
    assert [each for each in found if each["status"] != "equal"] == []
    assert done.returncode == 0

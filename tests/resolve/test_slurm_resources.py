"""What is asked of Slurm, before any Slurm is asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distexp.config import ConfigError
from distexp.launch import ledger
from distexp.launch.ledger import Entry
from distexp.launch.slurm.script import JobArray, resource_key
from distexp.resolve.run_id import run_id
from distexp.runs.run_dir import LEDGER
from tests.helpers.runs import resolve_cell, run_distexp

NO_SLURM = {"PATH": "/usr/bin:/bin", "SLURM_CONF": "/nowhere"}


def text(*overrides: str) -> str:
    """The sbatch file of a configuration."""
    config = resolve_cell(*overrides)
    return JobArray("array0", config, Path("/sweep"), Path("/sweep/snapshot"), ("0", "1", "2")).render()


def options(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_a_run_asks_for_one_task_a_node_and_a_gpu_a_worker() -> None:
    script = text("cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=3", "cluster.cpus_per_worker=5")
    asked = options(script)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("2", "1", "3")
    assert asked["cpus-per-task"] == "15"
    assert asked["array"] == "0-2%3"
    assert "requeue" in asked
    assert asked["signal"] == "USR2@120"
    (srun,) = [line for line in script.splitlines() if line.startswith("srun")]
    assert "--cpus-per-task=15" in srun, "srun no longer takes it over from sbatch"
    assert "--gpu-bind=none" in srun


def test_cpu_runs_ask_for_gpus_only_where_told() -> None:
    assert "gpus-per-node" not in options(text("cluster=slurm", "cluster.device=cpu"))
    asked = options(text("cluster=slurm", "cluster.device=cpu", "cluster.gpus_per_node=2"))
    assert asked["gpus-per-node"] == "2"


def test_every_key_reaches_the_file() -> None:
    script = text(
        "cluster=slurm",
        "cluster.memory_gb=1.5",
        "cluster.timeout_min=7.2",
        "cluster.partition=p",
        "cluster.constraint='c&d'",
        "cluster.account=a",
        "cluster.qos=q",
        "cluster.reservation=r",
        "cluster.exclusive=true",
        "cluster.array_parallelism=2",
        "cluster.requeue=false",
        "cluster.modules=[cuda/12,gcc]",
        "cluster.setup=['source my_env']",
        "+cluster.environment.NCCL_SOCKET_IFNAME=ib0",
        "+cluster.sbatch.mail-type=END",
        "cluster.srun=['--mpi=none']",
        "cluster.python='apptainer exec my.sif python'",
    )
    asked = options(script)
    assert (asked["mem"], asked["time"], asked["array"]) == ("1536M", "8", "0-2%2")
    assert [asked[name] for name in ("partition", "account", "qos", "reservation")] == ["p", "a", "q", "r"]
    assert asked["constraint"] == "'c&d'"
    assert {"exclusive", "no-requeue"} <= set(asked)
    assert asked["mail-type"] == "END"
    lines = script.splitlines()
    order = ["module load cuda/12 gcc", "source my_env", "export NCCL_SOCKET_IFNAME=ib0", "export PYTHONPATH="]
    places = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in order]
    assert places == sorted(places)
    assert "--mpi=none apptainer exec my.sif python -u -m distexp.launch.slurm.node_task" in lines[-1]


def test_whole_nodes_come_with_their_memory_and_all_their_cores() -> None:
    script = text("cluster=slurm", "cluster.exclusive=true")
    assert options(script)["mem"] == "0"
    assert "--cpu-bind=none" in script


@pytest.mark.parametrize("site", ["ibex_v100", "ibex_a100"])
def test_the_workshops_cluster(site: str) -> None:
    script = text(f"cluster={site}", "cluster.workers_per_node=2")
    asked = options(script)
    assert (asked["constraint"], asked["mem"], asked["time"]) == (site.removeprefix("ibex_"), "65536M", "30")
    assert asked["cpus-per-task"] == "8"
    assert "export NCCL_SOCKET_IFNAME=ib0" in script
    assert "NCCL_ALGO" not in script
    assert "BLOCKING_WAIT" not in script


def test_the_shape_is_what_is_asked_for_and_nothing_else() -> None:
    base = resource_key(resolve_cell("cluster=slurm"))
    assert resource_key(resolve_cell("cluster=slurm", "train.seed=7", "zero_stage=3")) == base
    for other in ("cluster.nodes=2", "cluster.qos=q", "+cluster.environment.A=b", "cluster.setup=[x]"):
        assert resource_key(resolve_cell("cluster=slurm", other)) != base


def test_a_run_is_the_same_training_wherever_it_waits() -> None:
    base = run_id(resolve_cell("cluster=slurm"))
    place = ("cluster.partition=p", "cluster.wait=false", "cluster.memory_gb=3", "+cluster.environment.A=b")
    assert run_id(resolve_cell("cluster=slurm", *place)) == base
    assert run_id(resolve_cell("cluster=slurm", "cluster.nodes=2")) != base


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("cluster=slurm", "cluster.gpus_per_node=1", "cluster.workers_per_node=2"), "every worker needs a GPU"),
        (("cluster=slurm", "+cluster.sbatch.nodes=3"), "set cluster.nodes instead"),
        (("cluster=slurm", "+cluster.environment={a-b: 1}"), "not a variable name"),
        (("cluster.partition=gpu",), "for Slurm only"),
        (("cluster=slurm", "cluster.memory_gb=0"), "must be above 0"),
    ],
)
def test_what_cannot_be_asked_is_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_cell(*overrides)


def test_a_dry_run_prints_a_file_a_shape_and_leaves_nothing(tmp_path: Path) -> None:
    words = ("--multirun", "cluster=slurm", "cluster.nodes=1,2", "train.seed=1,2", "cluster.dry_run=true")
    done = run_distexp(*words, cwd=tmp_path, env=NO_SLURM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("#!/bin/bash") == 2
    assert "# runs 0, 1" in done.stdout
    assert "#SBATCH --array=0-1%2" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("hydra.launcher.nodes=2", "cluster.nodes=1"), "hydra.launcher.nodes=2 contradicts cluster.nodes=1"),
        (("hydra.launcher.partition=a", "cluster.partition=b"), "partition=a contradicts cluster.partition=b"),
        (("hydra.launcher.tasks_per_node=2",), "one task per node"),
        (("hydra.launcher.cpus_per_task=3", "cluster.workers_per_node=2"), "is not divisible by"),
        (("cluster.launcher=local",), "choose the launcher with cluster="),
        (("hydra.launcher.partitoin=a",), "hydra.launcher.partitoin"),
    ],
)
def test_the_plugins_keys_and_ours_may_not_contradict(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = run_distexp("cluster=slurm", "cluster.dry_run=true", *words, cwd=tmp_path, env=NO_SLURM)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_plugins_keys_keep_working(tmp_path: Path) -> None:
    given = ("nodes=2", "timeout_min=9", "mem_gb=3", "partition=a", "comment=hi", "cpus_per_task=6")
    words = [f"hydra.launcher.{text}" for text in given]
    done = run_distexp(
        "cluster=slurm", "cluster.dry_run=true", "cluster.workers_per_node=3", *words, cwd=tmp_path, env=NO_SLURM
    )
    assert done.returncode == 0, done.stderr
    asked = options(done.stdout)
    assert [asked[key] for key in ("nodes", "time", "mem", "partition", "comment", "cpus-per-task")] == (
        ["2", "9", "3072M", "a", "hi", "6"]
    )


def test_without_slurm_the_command_says_so(tmp_path: Path) -> None:
    done = run_distexp("cluster=slurm", cwd=tmp_path, env={"PATH": "/nowhere"})
    assert done.returncode == 2
    assert "needs sbatch" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ["error: fetch_config: DNS SRV lookup failed", "fatal: Could not establish a configuration source"],
            2,
            "not configured on this machine (Could not establish a configuration source): log in",
        ),
        (
            ["error: Unable to contact slurm controller (connect failure)"],
            1,
            "Slurm does not answer (Unable to contact slurm controller (connect failure)); nothing was submitted",
        ),
    ],
    ids=["not configured", "no answer"],
)
def test_a_slurm_that_cannot_be_asked_is_said_in_a_sentence(
    tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    for tool in ("sbatch", "scontrol"):
        program = tmp_path / "bin" / tool
        program.parent.mkdir(exist_ok=True)
        program.write_text("\n".join(["#!/bin/sh", *(f"echo '{tool}: {word}' >&2" for word in words), "exit 1\n"]))
        program.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    done = run_distexp("cluster=slurm", cwd=work, env={"PATH": path})
    assert done.returncode == code
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(work.iterdir()) == []


def test_a_site_of_ones_own_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("defaults: [slurm]\nname: mine\npartition: ours\n")
    (tmp_path / "cluster" / "torn.yaml").write_text("name: torn\n")
    words = ("--config-dir", str(tmp_path), "cluster.dry_run=true")
    done = run_distexp(*words, "cluster=mine", cwd=tmp_path, env=NO_SLURM)
    assert options(done.stdout)["partition"] == "ours", done.stderr
    done = run_distexp("--config-dir", str(tmp_path), "cluster=torn", cwd=tmp_path)
    assert done.returncode == 2
    assert "chooses no launcher" in done.stderr


def test_a_torn_line_of_the_ledger_is_passed_over_and_closed(tmp_path: Path) -> None:
    ledger.append(tmp_path, [Entry(0, "a", "0", "5_0", "submitted"), Entry(1, "b", "1", "5_1", "submitted")])
    with (tmp_path / LEDGER).open("a") as file:
        file.write('{"run": 1, "id"')
    ledger.append(tmp_path, [Entry(0, "a", "0", "5_0", "completed")])
    assert {run: entry.state for run, entry in ledger.latest(tmp_path).items()} == {0: "completed", 1: "submitted"}

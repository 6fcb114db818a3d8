"""Tests of the resources that a run requests from Slurm, without Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distexp.config import ConfigError
from distexp.launch import run_dirs
from distexp.launch.run_dirs import Entry
from distexp.launch.slurm.script import JobArray, resource_key
from distexp.runs.run_dir import LEDGER
from tests.helpers.runs import REPOSITORY, resolve_cell, run_distexp

NO_SLURM = {"PATH": "/usr/bin:/bin", "SLURM_CONF": "/nowhere"}


def text(*overrides: str) -> str:
    """Return the sbatch file of a configuration."""
    config = resolve_cell(*overrides)
    return JobArray("array0", config, Path("/sweep"), Path("/sweep/snapshot"), ("0", "1", "2")).render()


def options(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_run_requests_one_task_per_node_and_one_gpu_per_worker() -> None:
    script = text("cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=3", "cluster.cpus_per_worker=5")
    requested = options(script)
    assert (requested["nodes"], requested["ntasks-per-node"], requested["gpus-per-node"]) == ("2", "1", "3")
    assert requested["cpus-per-task"] == "15"
    assert requested["array"] == "0-2%3"
    assert "requeue" in requested
    assert requested["signal"] == "USR2@120"
    (srun,) = [line for line in script.splitlines() if line.startswith("srun")]
    assert "--cpus-per-task=15" in srun, "srun no longer takes it over from sbatch"
    assert "--gpu-bind=none" in srun


def test_cpu_run_requests_gpus_only_if_configured() -> None:
    assert "gpus-per-node" not in options(text("cluster=slurm", "cluster.device=cpu"))
    requested = options(text("cluster=slurm", "cluster.device=cpu", "cluster.gpus_per_node=2"))
    assert requested["gpus-per-node"] == "2"


@pytest.mark.parametrize(("device", "limit"), [("cuda", 5.0), ("cpu", None)])
def test_preflight_on_slurm_has_a_default_limit_on_gpus_only(device: str, limit: float | None) -> None:
    config = resolve_cell("cluster=slurm", f"cluster.device={device}", "preflight.enabled=true")
    assert config.preflight.min_busbw_gbps == limit


@pytest.mark.parametrize("name", ["cpus-per-gpu", "cpus_per_gpu", "--cpus-per-gpu"])
def test_cpus_per_gpu_replace_those_of_a_task_in_every_spelling(name: str) -> None:
    found = options(text("cluster=slurm", "strategy=ddp", f"+cluster.sbatch={{{name}: 8}}"))
    assert found["cpus-per-gpu"] == "8"
    assert "cpus-per-task" not in found


@pytest.mark.parametrize("name", ["gres", "--gres"])
def test_gres_replaces_the_gpus_of_a_node_in_every_spelling(name: str) -> None:
    found = options(text("cluster=slurm", "strategy=ddp", f"+cluster.sbatch={{{name}: gpu}}"))
    assert found["gres"] == "gpu"
    assert "gpus-per-node" not in found


@pytest.mark.parametrize(("option", "value"), [("gres", "gpu:4"), ("gpus", "4"), ("gpus-per-task", "1")])
def test_two_requests_for_gpus_are_refused(option: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_cell("cluster=slurm", "cluster.gpus_per_node=2", f"+cluster.sbatch={{{option}: '{value}'}}")
    request = f"cluster.sbatch.{option}={value}"
    assert refused.value.errors == [f"cluster.gpus_per_node=2 and {request} both request GPUs: leave one of them out"]


def test_every_key_is_in_the_sbatch_file() -> None:
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
    requested = options(script)
    assert (requested["mem"], requested["time"], requested["array"]) == ("1536M", "8", "0-2%2")
    assert [requested[name] for name in ("partition", "account", "qos", "reservation")] == ["p", "a", "q", "r"]
    assert requested["constraint"] == "'c&d'"
    assert {"exclusive", "no-requeue"} <= set(requested)
    assert requested["mail-type"] == "END"
    lines = script.splitlines()
    order = ["module load cuda/12 gcc", "source my_env", "export NCCL_SOCKET_IFNAME=ib0", "export PYTHONPATH="]
    places = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in order]
    assert places == sorted(places)
    assert "--mpi=none apptainer exec my.sif python -u -m distexp.launch.slurm.node_task" in lines[-1]


def test_exclusive_requests_all_memory_and_cores() -> None:
    script = text("cluster=slurm", "cluster.exclusive=true")
    assert options(script)["mem"] == "0"
    assert "--cpu-bind=none" in script


@pytest.mark.parametrize("site", ["ibex_v100", pytest.param("ibex_a100", marks=pytest.mark.release)])
def test_example_sites_compose(site: str, tmp_path: Path) -> None:
    sites = str(REPOSITORY / "examples" / "sites")
    chosen = (f"cluster={site}", "cluster.workers_per_node=2", "cluster.dry_run=true")
    done = run_distexp("--config-dir", sites, *chosen, cwd=tmp_path, env=NO_SLURM)
    assert done.returncode == 0, done.stderr
    requested = options(done.stdout)
    assert (requested["constraint"], requested["mem"], requested["time"]) == (
        site.removeprefix("ibex_"),
        "65536M",
        "30",
    )
    assert requested["cpus-per-task"] == "8"
    assert "export NCCL_SOCKET_IFNAME=ib0" in done.stdout
    assert "NCCL_ALGO" not in done.stdout
    assert "BLOCKING_WAIT" not in done.stdout


def test_shape_depends_on_resources_only() -> None:
    base = resource_key(resolve_cell("cluster=slurm"))
    assert resource_key(resolve_cell("cluster=slurm", "train.seed=7", "zero_stage=3")) == base
    for other in ("cluster.nodes=2", "cluster.qos=q", "+cluster.environment.A=b", "cluster.setup=[x]"):
        assert resource_key(resolve_cell("cluster=slurm", other)) != base


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("cluster=slurm", "cluster.gpus_per_node=1", "cluster.workers_per_node=2"), "every worker needs a GPU"),
        (("cluster=slurm", "+cluster.sbatch.nodes=3"), "set cluster.nodes instead"),
        (("cluster=slurm", "+cluster.environment={a-b: 1}"), "not a variable name"),
        (("cluster.partition=gpu",), "for Slurm only"),
        (("cluster.wait=false",), "^cluster.wait=false is for Slurm only: leave it out"),
        (("cluster.requeue=false", "cluster.signal_delay_s=9"), "signal_delay_s=9 is for Slurm"),
        (("cluster=slurm", "cluster.memory_gb=0"), "must be above 0"),
    ],
)
def test_impossible_requests_are_errors(overrides: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        resolve_cell(*overrides)


def test_dry_run_prints_one_file_per_shape_and_writes_nothing(tmp_path: Path) -> None:
    words = ("--multirun", "cluster=slurm", "cluster.nodes=1,2", "train.seed=1,2", "cluster.dry_run=true")
    done = run_distexp(*words, cwd=tmp_path, env=NO_SLURM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("#!/bin/bash") == 2
    assert "# runs 0, 1\n#   0: cluster.nodes=1 train.seed=1\n#   1: cluster.nodes=1 train.seed=2\n" in done.stdout
    assert done.stdout.endswith(
        "# 4 jobs, nothing was submitted. The folder of the sweep and its files are made at submission.\n"
    )
    assert "#SBATCH --array=0-1%2" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("hydra.launcher.nodes=2", "cluster.nodes=1"), "hydra.launcher.nodes=2 contradicts cluster.nodes=1"),
        (("hydra.launcher.tasks_per_node=2",), "one task per node"),
        (("hydra.launcher.cpus_per_task=3", "cluster.workers_per_node=2"), "is not divisible by"),
        (("cluster.launcher=local",), "choose the launcher with cluster="),
        (("hydra.launcher.partitoin=a",), "hydra.launcher.partitoin"),
    ],
)
def test_contradicting_keys_of_the_plugin_are_errors(words: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    done = run_distexp("cluster=slurm", "cluster.dry_run=true", *words, cwd=tmp_path, env=NO_SLURM)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_keys_of_the_plugin_are_accepted(tmp_path: Path) -> None:
    given = ("nodes=2", "timeout_min=9", "mem_gb=3", "partition=a", "comment=hi", "cpus_per_task=6")
    words = [f"hydra.launcher.{text}" for text in given]
    done = run_distexp(
        "cluster=slurm", "cluster.dry_run=true", "cluster.workers_per_node=3", *words, cwd=tmp_path, env=NO_SLURM
    )
    assert done.returncode == 0, done.stderr
    requested = options(done.stdout)
    assert [requested[key] for key in ("nodes", "time", "mem", "partition", "comment", "cpus-per-task")] == (
        ["2", "9", "3072M", "a", "hi", "6"]
    )


def test_missing_slurm_is_reported(tmp_path: Path) -> None:
    done = run_distexp("cluster=slurm", cwd=tmp_path, env={"PATH": "/nowhere"})
    assert done.returncode == 2
    assert "needs sbatch" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "code", "expected"),
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
def test_unreachable_slurm_is_reported_in_one_line(tmp_path: Path, output: list[str], code: int, expected: str) -> None:
    for tool in ("sbatch", "scontrol"):
        program = tmp_path / "bin" / tool
        program.parent.mkdir(exist_ok=True)
        program.write_text("\n".join(["#!/bin/sh", *(f"echo '{tool}: {line}' >&2" for line in output), "exit 1\n"]))
        program.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    done = run_distexp("cluster=slurm", cwd=work, env={"PATH": path})
    assert done.returncode == code
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(work.iterdir()) == []


def test_custom_site_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("defaults: [slurm]\nname: mine\npartition: ours\n")
    (tmp_path / "cluster" / "torn.yaml").write_text("name: torn\n")
    words = ("--config-dir", str(tmp_path), "cluster.dry_run=true")
    done = run_distexp(*words, "cluster=mine", cwd=tmp_path, env=NO_SLURM)
    assert options(done.stdout)["partition"] == "ours", done.stderr
    assert done.stdout.startswith("# run 0\n#   0: cluster.dry_run=true cluster=mine\n")
    done = run_distexp("--config-dir", str(tmp_path), "cluster=torn", cwd=tmp_path)
    assert done.returncode == 2
    assert "chooses no launcher" in done.stderr


def test_incomplete_line_of_the_ledger_is_skipped(tmp_path: Path) -> None:
    run_dirs.append(tmp_path, [Entry(0, "a", "0", "5_0", "submitted"), Entry(1, "b", "1", "5_1", "submitted")])
    with (tmp_path / LEDGER).open("a") as file:
        file.write('{"run": 1, "id"')
    run_dirs.append(tmp_path, [Entry(0, "a", "0", "5_0", "completed")])
    assert {run: entry.state for run, entry in run_dirs.latest(tmp_path).items()} == {0: "completed", 1: "submitted"}

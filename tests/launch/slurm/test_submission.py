"""Tests of the submission of a sweep with fake Slurm commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distexp.cli.main import main
from distexp.launch import run_dirs
from distexp.launch.slurm import client
from tests.helpers.fake_slurm import calls, fake_slurm
from tests.helpers.records import record
from tests.helpers.runs import TIMEOUT_S

LAUNCH = """
import signal, sys
from distexp.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""
"""``python -m distexp`` that reacts to Ctrl-C even if a shell has started the tests in the background."""


def launch(folder: Path, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command of distexp in a folder."""
    command = [sys.executable, "-c", LAUNCH, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def submit(folder: Path, *overrides: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Submit a sweep to ``folder/sweep`` without waiting for its end."""
    arguments = ("--multirun", "cluster=slurm", "cluster.wait=false", *overrides, f"hydra.sweep.dir={folder}/sweep")
    return launch(folder, *arguments, env=env)


def test_runs_keep_their_numbers_in_arrays_of_the_largest_size(tmp_path: Path) -> None:
    env = fake_slurm(tmp_path / "bin", max_array_size=40)
    seeds = [str(seed) for seed in range(90, 40, -1)]
    done = submit(tmp_path, f"train.seed={','.join(seeds)}", "precision=bf16", env=env)
    assert done.returncode == 0, done.stderr
    arrays = [Path(call.split()[-1]) for call in calls(tmp_path / "bin", "sbatch")]
    assert [path.name for path in arrays] == ["array0.sbatch", "array1.sbatch"]
    listed = [name for path in arrays for name in json.loads(path.with_suffix(".json").read_text())["directories"]]
    assert listed == [str(number) for number in range(50)]
    specs = [json.loads((tmp_path / "sweep" / name / "spec.json").read_text()) for name in listed]
    assert [spec["config"]["train"]["seed"] for spec in specs] == [int(seed) for seed in seeds]
    assert "num: 7\n" in (tmp_path / "sweep/7/.hydra/hydra.yaml").read_text()
    overrides = (tmp_path / "sweep/7/.hydra/overrides.yaml").read_text().splitlines()
    assert overrides == ["- cluster=slurm", "- cluster.wait=False", "- train.seed=83", "- precision='bf16'"]
    jobs = {number: entry.job for number, entry in run_dirs.latest(tmp_path / "sweep").items()}
    assert (jobs[0], jobs[39], jobs[40], jobs[49]) == ("100_0", "100_39", "101_0", "101_9")


def test_ctrl_c_while_submitting_cancels_what_was_submitted(tmp_path: Path) -> None:
    env = fake_slurm(tmp_path / "bin", sbatch="kill -INT $PPID")
    done = submit(tmp_path, "cluster.nodes=1,2,3", env=env)
    assert done.returncode == 130, done.stderr
    assert len(calls(tmp_path / "bin", "sbatch")) == 1, "nothing is submitted after Ctrl-C"
    assert calls(tmp_path / "bin", "scancel") == ["--quiet 100"]
    assert [(entry.job, entry.state) for entry in run_dirs.read(tmp_path / "sweep")] == [
        ("100_0", "submitted"),
        ("100_0", "cancelled"),
    ]
    message = done.stderr.strip()
    assert message == (
        f"distexp: interrupted: 1 submitted job cancelled; to submit the runs: distexp resume {tmp_path}/sweep"
    )


def test_ctrl_c_before_the_submission_submits_nothing(tmp_path: Path) -> None:
    interrupting = tmp_path / "usr" / "git"
    env = fake_slurm(tmp_path / "bin")
    interrupting.parent.mkdir()
    interrupting.write_text("#!/bin/sh\nkill -INT $PPID\n")
    interrupting.chmod(0o755)
    env["PATH"] = f"{interrupting.parent}:{env['PATH']}"  # git is called for the snapshot of the code
    done = submit(tmp_path, "train.seed=1,2", env=env)
    assert done.returncode == 130, done.stderr
    assert f"interrupted: nothing was submitted; to submit the runs: distexp resume {tmp_path}/sweep" in done.stderr
    assert calls(tmp_path / "bin", "sbatch") == []


def test_ctrl_c_while_waiting_prints_the_finished_runs_and_the_next_commands(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    pending = "echo '100|1|PENDING|Priority||N/A'"
    env = fake_slurm(tmp_path / "bin", squeue=f"[ -e {asked} ] && kill -INT $PPID; touch {asked}; {pending}")
    sweep = tmp_path / "sweep"
    for number in (0, 1):
        (sweep / str(number)).mkdir(parents=True)
    record(0).write(sweep / "0")
    run_dirs.append(
        sweep, [run_dirs.Entry(number, f"id{number}", str(number), f"100_{number}", "submitted") for number in (0, 1)]
    )
    done = launch(tmp_path, "status", str(sweep), "--watch", env={**env, "COLUMNS": "100"})
    assert done.returncode == 130, done.stderr
    assert "samples/s" in done.stdout
    assert [line.partition("/")[0].strip() for line in done.stdout.splitlines()[-4:]] == [
        "to draw the report: distexp report",
        "",
        "The jobs continue. To follow them: distexp status",
        "To cancel them:               distexp cancel",
    ]


@pytest.mark.parametrize(
    "text", ["7", "7;cluster", "Submitted batch job 7", "500\nSubmitted batch job 7 on cluster c", "500\n7"]
)
def test_the_job_is_known_from_every_text_of_sbatch(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_slurm(tmp_path / "bin", sbatch=f"echo '{text}'; exit 0")["PATH"])
    assert client.submit(tmp_path / "array0.sbatch") == "7"


TIMED_OUT = "printf 'sbatch: account a is charged\\nsbatch: error: Socket timed out\\n' >&2; exit 1"


@pytest.mark.parametrize("odd", ["echo 'job sent'; exit 0", TIMED_OUT])
def test_a_submission_without_a_known_job_is_not_a_refusal(
    odd: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", fake_slurm(tmp_path / "bin", sbatch=odd)["PATH"])
    sweep = tmp_path / "sweep"
    assert main(["--multirun", "cluster=slurm", "cluster.wait=false", f"hydra.sweep.dir={sweep}"]) == 1
    shown = "".join(capsys.readouterr())
    assert "The job of array0 may be in the queue" in shown
    assert f"squeue --me, and end it with scancel before distexp resume {sweep}\n" in shown
    assert main(["status", str(sweep)]) == 0
    assert f"no record  not started: distexp resume {sweep}\n" in capsys.readouterr().out
    assert main(["cancel", str(sweep)]) == 0
    assert capsys.readouterr().out == "0 runs cancelled\n"


def test_odd_lines_of_slurm_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = "printf 'squeue: warning: old\\nodd | text\\n100|1||||\\n100|0|PENDING|Priority||N/A\\n'"
    accounting = "printf '100_1||\\n\\nsacct: warning\\n100_1|CANCELLED by 7|n1\\n'"
    monkeypatch.setenv("PATH", fake_slurm(tmp_path / "bin", squeue=queue, sacct=accounting)["PATH"])
    found = client.query_jobs(["100_0", "100_1"])
    assert {job: state.state for job, state in found.items()} == {"100_0": "PENDING", "100_1": "CANCELLED"}
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho 'squeue: warning: old'\n")
    assert client.query_jobs(["100_1"])["100_1"].state == "CANCELLED"
    with pytest.raises(client.UnreachableError, match="squeue printed no state, but 'squeue: warning: old'"):
        client.query_jobs(["100_0"])


def test_a_repeated_cell_is_left_out_with_a_warning(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cells = 'sweep.cells=[["zero_stage=1"],["zero_stage=1"],["zero_stage=1"],["zero_stage=2"]]'
    arguments = ("--multirun", "cluster=slurm", "cluster.dry_run=true", f"hydra.sweep.dir={tmp_path}/sweep")
    assert main([*arguments, cells]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("# runs 0, 1\n")
    warning = "distexp: warning: 2 repeated cells left out (zero_stage=1): to repeat runs, add repeats=2\n"
    assert shown.err == warning
    assert list(tmp_path.iterdir()) == [], "a dry run writes nothing"


@pytest.mark.parametrize(
    ("overrides", "jobs", "missing"),
    [
        (
            ("experiment=ddp/multi_node",),
            4,
            ["dataset=tinyimagenet needs a folder: set dataset.root to one in the official layout of TinyImageNet"],
        ),
        (
            (
                "experiment=deepspeed/two_gpu_stages",
                "dataset.train_path=/data/t.json",
                "dataset.eval_path=/data/e.json",
            ),
            6,
            [f"dataset.{name}_path=/data/{name[0]}.json is not a file: correct the path" for name in ("train", "eval")],
        ),
    ],
)
def test_a_dry_run_without_the_data_prints_the_jobs(
    overrides: tuple[str, ...], jobs: int, missing: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*overrides, "cluster=slurm", "cluster.dry_run=true", f"hydra.sweep.dir={tmp_path}/sweep"]) == 0
    lines = capsys.readouterr().out.splitlines()
    notes = [line for line in lines if line.startswith("# note")]
    assert notes == [f"# note: not found on this machine, and checked at submission: {error}" for error in missing]
    assert lines[-1].startswith(f"# {jobs} jobs, nothing was submitted.")
    assert not any("invalid" in line for line in lines)

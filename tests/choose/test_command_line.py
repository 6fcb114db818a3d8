"""Tests of ``distexp choose`` as a user types it, with real trials on the CPU."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distexp.choose.__main__ import with_brackets
from distexp.runs.record import RunRecord
from tests.helpers.runs import REPOSITORY, run_distexp

SEARCH = (
    *("choose", "--json", "model=gpt_tiny", "train.global_batch_size=4", "cluster.workers_per_node=2"),
    *("cluster.device=cpu", "strategy=ddp", "kernels=reference", "train.activation_checkpointing=false"),
    *("choose.objective=memory", "choose.space=[train.micro_batch_size]"),
)
"""A search of two micro-batches, whose finalists are not repeated."""

START_S = 540.0


def test_help_describes_the_options(tmp_path: Path) -> None:
    found = run_distexp("help", "choose", cwd=tmp_path).stdout
    assert "choose.dry_run=true" in found
    assert "choose.gpus=1,2" in found


def test_several_values_need_no_brackets() -> None:
    assert with_brackets("choose.gpus=1,2") == "choose.gpus=[1,2]"
    assert with_brackets("choose.space=strategy,kernels") == "choose.space=[strategy,kernels]"
    assert with_brackets("choose.space=strategy=ddp,fsdp") == 'choose.space=["strategy=ddp,fsdp"]'
    for kept in (
        "choose.space=strategy=ddp,kernels=fast",
        "choose.gpus=[1,2]",
        "choose.space=['strategy=ddp,fsdp']",
        "strategy=ddp,fsdp",
        "choose.gpus=",
    ):
        assert with_brackets(kept) == kept


@pytest.mark.slow
def test_a_dry_run_plans_the_search_of_a_machine_with_other_gpus(tmp_path: Path) -> None:
    given = ("choose", "--json", "model=gpt_tiny", "train.global_batch_size=64", "cluster.workers_per_node=4")
    done = run_distexp(
        *given, "strategy=ddp", "kernels=reference", "choose.dry_run=true", "plan.gpu=h200-141gb", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["planned_gpu_seconds"] > 0
    predicted = [candidate for candidate in found["candidates"] if candidate["predicted"]]
    assert predicted
    assert all("cluster.workers_per_node=4" in candidate["overrides"] for candidate in predicted)
    assert all(candidate["predicted"]["nvidia_smi_mib"] for candidate in predicted), "it is for GPUs"
    assert "CPUs" not in done.stderr


@pytest.mark.slow
def test_an_interrupted_search_is_resumed(tmp_path: Path) -> None:
    """Ctrl-C arrives after the first trial. ``distexp resume`` keeps it, and finds a winner."""
    folder = tmp_path / "search"
    arguments = [sys.executable, "-m", "distexp", *SEARCH, f"hydra.sweep.dir={folder}"]
    process = subprocess.Popen(
        arguments,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background processes with SIGINT ignored, and these tests may run in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,  # noqa: PLW1509
    )
    deadline = time.monotonic() + START_S
    while not (folder / "0" / "record.json").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=START_S)
    assert (process.returncode, stdout) == (130, ""), stderr
    # On a busy machine the launcher may not have seen the first record yet, or may be some trials further.
    counted = r"interrupted after (0 trials\.|1 trial\. It is kept\.|\d+ trials\. They are kept\.) To continue: "
    assert re.search(f"{counted}distexp resume " + re.escape(str(folder)), stderr), stderr
    first = (folder / "0" / "record.json").stat().st_mtime
    done = run_distexp("resume", str(folder), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (folder / "0" / "record.json").stat().st_mtime == first
    assert found["losses"]["equal"] is True
    assert found["losses"]["reference"].startswith("single")
    assert found["losses"]["steps"] == 8
    measured = [candidate for candidate in found["candidates"] if candidate["measured"]]
    assert {candidate["status"] for candidate in measured} == {"tried"}
    assert found["gpu_seconds"] > found["startup_gpu_seconds"] > 0
    # Ctrl-C between the directory of a trial and its entry leaves an empty directory, and the next trial has its own.
    for trial in found["trials"]:
        record = RunRecord.read(folder / str(trial["number"]) / "record.json")
        assert (record.status, record.config["train"]["global_batch_size"]) == ("completed", 4)
    assert found["winner"]["command"].startswith("distexp model=gpt_tiny train.global_batch_size=4")

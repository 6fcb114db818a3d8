"""Foreign YAML files: Hydra creates no object of a package that the user does not trust."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distexp.cli.main import main

STRANGE = """import hydra.experimental.callback
import logging
from pathlib import Path

Path('started').touch()


class Callback(hydra.experimental.callback.Callback):
    pass


class Handler(logging.StreamHandler):
    pass
"""
STOP = ("dataset=squad", "dataset.path=/nowhere")
"""A later error, so that no run starts."""

LOGGING = "{version: 1, root: {level: INFO}, disable_existing_loggers: false"
ATTACKS = {  # presets, with a part of the message
    "{callbacks: {x: {_target_: strange.Callback}}}": "hydra.callbacks.x._target_=strange.Callback",
    "{callbacks: {x: {_target_: logging.NullHandler, y: {_target_: strange.Callback}}}}": (
        "hydra.callbacks.x.y._target_=strange.Callback"
    ),
    "{callbacks: {x: {_target_: '${name}.Callback'}}}": "hydra.callbacks.x._target_=${name}.Callback",
    "{callbacks: {x: '${model.options}'}}": "hydra.callbacks.x=${model.options}",
    "{callbacks: {x: '${oc.decode:\"{_target_: strange.Callback}\"}'}}": "hydra.callbacks.x=${oc.decode:",
    "{callbacks: {x: {_target_: hydra.utils.get_class, path: strange.Callback}}}": "_target_=hydra.utils.get_class",
    "{sweeper: {params: {train.seed: {_target_: strange.Callback}}}}": "hydra.sweeper.params.train.seed={",
    f"{{hydra_logging: {LOGGING}, handlers: {{x: {{class: strange.Handler}}}}}}}}": (
        "hydra.hydra_logging.handlers.x.class=strange.Handler"
    ),
    f"{{job_logging: {LOGGING}, handlers: {{x: {{'()': strange.Handler}}}}}}}}": (
        "hydra.job_logging.handlers.x.()=strange.Handler"
    ),
    f"{{job_logging: {LOGGING}, filters: {{x: {{name: 'ext://strange.Handler'}}}}}}}}": "=ext://strange.Handler",
    f"{{hydra_logging: {LOGGING}, handlers: {{x: {{class: logging.FileHandler, filename: started}}}}}}}}": (
        "hydra.hydra_logging.handlers.x.filename=started"
    ),
    "{sweeper: {params: '${model.options}'}}": "hydra.sweeper.params=${model.options}",
    "{launcher: {_target_: strange.Callback}}": "hydra.launcher._target_=strange.Callback",
    "{launcher: '${model.options}'}": "hydra.launcher=${model.options}",
    "{job: {env_set: {LD_PRELOAD: ./strange.so}}}": "hydra.job.env_set.LD_PRELOAD=./strange.so",
    "{job: {env_copy: [HOME]}}": "hydra.job.env_copy=[HOME] is set by",
    "{overrides: {hydra: ['hydra.searchpath=[pkg://strange]']}}": "hydra.searchpath contains pkg://strange",
    "{sweeper: {params: {++cluster.environment.PYTHONPATH: strange}}}": "cluster.environment.PYTHONPATH=strange",
}


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder with a package of a stranger; importing it leaves the file ``started``."""
    (tmp_path / "strange.py").write_text(STRANGE)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "cluster").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["distexp"])
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "strange", raising=False)
    monkeypatch.setattr("distexp.cli.run.MAX_ERRORS", 1)  # The search for more errors takes as long as the command.
    return tmp_path


def run_preset(folder: Path, preset: str, *overrides: str) -> int:
    """Run a preset of the folder in this process; return the exit code."""
    (folder / "conf" / "experiment" / "theirs.yaml").write_text(f"# @package _global_\nname: strange\n{preset}\n")
    return main(["--config-dir", "conf", "experiment=theirs", *STOP, *overrides])


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_hydra_section_of_a_file_runs_no_code(
    attack: str, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "model: {options: {_target_: strange.Callback}}"
    assert run_preset(stranger, f"{options}\nhydra: {attack}") == 2
    message = capsys.readouterr().err
    assert ATTACKS[attack] in message
    assert "to the command" in message
    assert len(message.splitlines()) == 1, message
    assert {path.name for path in stranger.iterdir()} == {"conf", "strange.py"}, "nothing was imported or started"


def test_the_message_names_the_file_and_what_to_type(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset = "hydra: {callbacks: {x: {_target_: strange.Callback}}}"
    assert run_preset(stranger, preset) == 2
    source = stranger / "conf" / "experiment" / "theirs.yaml"
    assert capsys.readouterr().err == (
        f"distexp: hydra.callbacks.x._target_=strange.Callback is set by {source}, and could run code: "
        "if you trust it, add 'hydra.callbacks.x._target_=strange.Callback' to the command\n"
    )
    assert run_preset(stranger, preset, "trusted_packages=[strange]") == 2
    assert "hydra.callbacks.x._target_=strange.Callback is set by" in capsys.readouterr().err
    run_preset(stranger, preset, "hydra.callbacks.x._target_=strange.Callback")
    assert "/nowhere" in capsys.readouterr().err
    assert (stranger / "started").exists(), "the user has typed it"


def test_a_file_cannot_choose_where_hydra_overwrites_files(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = stranger / "victim"
    preset = f"hydra: {{output_subdir: {victim}}}"
    assert run_preset(stranger, preset) == 2
    source = stranger / "conf" / "experiment" / "theirs.yaml"
    assert capsys.readouterr().err == (
        f"distexp: hydra.output_subdir={victim} is set by {source}, and would overwrite files in another folder: "
        "remove it from the file\n"
    )
    for typed in (f"hydra.output_subdir={victim}", f"hydra={{output_subdir: {victim}}}"):
        assert run_preset(stranger, preset, typed) == 2
        capsys.readouterr()
    assert not victim.exists()


def test_the_user_may_copy_variables(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_preset(stranger, "", "hydra.job.env_copy=[HOME]")
    assert "/nowhere" in (message := capsys.readouterr().err)
    assert "could run code" not in message


def test_no_file_of_distexp_is_named_as_the_source(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last value is a text of many files, such as ``1``."""
    assert run_preset(stranger, "hydra: {job: {env_set: {LD_PRELOAD: /tmp/x.so, OMP_NUM_THREADS: 1}}}") == 2
    message = capsys.readouterr().err
    assert "OMP_NUM_THREADS=1 is set by" in message
    assert f"is set by {stranger / 'conf'}" in message


SMALL = ("strategy=single", "model=gpt_tiny", "dataset=squad_sample", "cluster.device=cpu")


def test_a_run_outside_of_its_sweep_is_refused(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("../victim", "a/../../victim", str(stranger / "victim")):
        assert main([*SMALL, f"hydra.sweep.subdir={folder}", "hydra.sweep.dir=sweep"]) == 2
        assert f"hydra.sweep.subdir={folder} is not inside of sweep" in capsys.readouterr().err
    assert not (stranger / "victim").exists()


def test_a_search_path_of_a_primary_file_imports_no_package(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stranger / "conf" / "config.yaml").write_text("hydra: {searchpath: ['pkg://strange.conf']}\n")
    assert main(["--config-path", str(stranger / "conf")]) == 2
    assert "hydra.searchpath contains pkg://strange.conf" in capsys.readouterr().err
    assert not (stranger / "started").exists()


def test_harmless_settings_of_hydra_are_accepted(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harmless = "hydra: {verbose: false, sweep: {dir: results}, sweeper: {params: {train.seed: '1,2'}}}"
    run_preset(stranger, harmless)
    assert "could run code" not in (message := "".join(capsys.readouterr())), message
    assert "/nowhere" in message


@pytest.mark.parametrize(
    ("preset", "refused"),
    {
        f"hydra: {{hydra_logging: {LOGGING}, handlers: {{x: {{class: logging.StreamHandler}}}}}}}}": (
            "hydra.hydra_logging.handlers.x.class=logging.StreamHandler"
        ),
        "cluster: {environment: {NCCL_ALGO: Tree}}": "cluster.environment.NCCL_ALGO=Tree",
        "hydra: {sweeper: {params: {train.seed: '${oc.decode:\"{_target_: strange.Callback}\"}'}}}": (
            "hydra.sweeper.params.train.seed=${oc.decode:"
        ),
    }.items(),
)
def test_guarded_keys_are_refused_with_any_value(
    preset: str, refused: str, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_preset(stranger, preset) == 2
    message = capsys.readouterr().err
    assert refused in message
    assert "could run code: if you trust it, " in message
    assert not (stranger / "started").exists()


def test_a_preset_may_choose_a_cluster_of_distexp(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_preset(stranger, "defaults: [{override /cluster: slurm}]", "cluster.dry_run=true")
    assert "could run code" not in (message := "".join(capsys.readouterr())), message


SERVER = "uri: http://strange:5000"


def test_a_preset_cannot_choose_the_server_of_a_tracker(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_preset(stranger, f"tracker: {{{SERVER}}}", "tracker=mlflow") == 2
    message = capsys.readouterr().err
    assert "tracker.uri=http://strange:5000 is set by" in message
    assert "would get the results and your credentials: if you trust it, choose its file with tracker=NAME" in message
    (stranger / "conf" / "tracker").mkdir()
    (stranger / "conf" / "tracker" / "ours.yaml").write_text(f"defaults: [mlflow]\n{SERVER}\n")
    for accepted in ("tracker=ours", "tracker.uri=http://strange:5000"):
        run_preset(stranger, f"tracker: {{{SERVER}}}", accepted)
        assert "credentials" not in capsys.readouterr().err


SITE = (
    "defaults: [slurm]\nsetup: ['source env/bin/activate']\nenvironment: {LD_LIBRARY_PATH: /opt/lib, NCCL_ALGO: Tree}\n"
)
CHOSEN = ("cluster=site", "cluster.dry_run=true")


def test_shell_lines_of_a_cluster_file_need_the_choice_of_the_user(
    stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stranger / "conf" / "cluster" / "site.yaml").write_text(SITE)
    assert run_preset(stranger, "defaults: [{override /cluster: site}]") == 2
    message = capsys.readouterr().err
    assert "cluster.setup=[source env/bin/activate] is set by" in message
    assert "cluster.environment.LD_LIBRARY_PATH=/opt/lib, cluster.environment.NCCL_ALGO=Tree is set by" in message
    assert "hydra.launcher" not in message
    assert "choose its file with cluster=NAME" in message
    run_preset(stranger, "", *CHOSEN)
    assert "could run code" not in capsys.readouterr().err


def test_a_preset_cannot_add_shell_lines_to_a_chosen_cluster(
    stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stranger / "conf" / "cluster" / "site.yaml").write_text(SITE)
    preset = "cluster: {setup: ['touch started'], environment: {LD_PRELOAD: ./strange.so}}"
    assert run_preset(stranger, preset, *CHOSEN) == 2
    message = capsys.readouterr().err
    assert "cluster.setup=[touch started]" in message
    assert "cluster.environment.LD_PRELOAD=./strange.so" in message
    assert "LD_LIBRARY_PATH" not in message
    run_preset(
        stranger, preset, *CHOSEN, "cluster.setup=[touch started]", "cluster.environment.LD_PRELOAD=./strange.so"
    )
    assert "could run code" not in capsys.readouterr().err

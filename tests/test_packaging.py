"""Contents of the wheel, and runs of the installed wheel without a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from distexp.runs.record import RunRecord
from tests.helpers.runs import REPOSITORY, TIMEOUT_S

UV = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
SHORT = (
    "strategy=single",
    "train.max_steps=2",
    "dataset.train_size=32",
    "dataset.eval_size=8",
    "cluster.device=cpu",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the wheel and the source distribution with ``uv build``.

    uv has cached the build backend since it installed distexp. A package index is asked only if it has not.
    """
    folder = tmp_path_factory.mktemp("dist")
    command = ("build", "--quiet", "--wheel", "--sdist", "--out-dir", str(folder), str(REPOSITORY))
    offline = subprocess.run([UV, *command, "--offline"], cwd=folder, capture_output=True, check=False)
    if offline.returncode != 0:
        run(UV, *command, cwd=folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in a new environment, which also finds the packages of this environment."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    run(UV, "venv", "--quiet", "--python", sys.executable, str(folder), cwd=folder.parent)
    python = str(folder / "bin" / "python")
    run(UV, "pip", "install", "--quiet", "--no-deps", "--python", python, str(built[0]), cwd=folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    # A .pth file in these packages is not read, so an editable distexp is not found.
    (site / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def run(program: str, *arguments: str, cwd: Path) -> str:
    """Run a command that cannot import from the checkout, and return its output."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [program, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_its_options_and_its_plugin(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ours = {
        Path("distexp/conf", path.relative_to(REPOSITORY / "conf")) for path in (REPOSITORY / "conf").rglob("*.yaml")
    }
    data = ("report/exercises/workshop.yaml", "hardware/facts.yaml", "strategies/zero/ds_keys.yaml")
    ours |= {Path("distexp", name) for name in data}
    assert {Path(name) for name in names if name.endswith(".yaml")} == ours
    assert {name.split("/")[0] for name in names} == {"distexp", "hydra_plugins"}
    assert "hydra_plugins/distexp_plugin/launcher.py" in names
    assert "hydra_plugins/__init__.py" not in names, "it would hide the plug-ins of others"
    assert {Path(name).suffix for name in names} == {".py", ".yaml", ".html", ".css", ".js", ".typed"}


def test_the_source_distribution_holds_nothing_else(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        tops = {Path(name).parts[1] for name in sdist.getnames() if len(Path(name).parts) > 1}
    assert tops == {
        "conf",
        "distexp",
        "hydra_plugins",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "PKG-INFO",
        ".gitignore",
    }


def test_an_installed_wheel_runs_anywhere(installed: Path, tmp_path: Path) -> None:
    python = str(installed / "bin" / "python")
    places = (
        "import distexp, distexp.config.keys as p, hydra_plugins.distexp_plugin as h; print(p.conf_dir(), *h.__path__)"
    )
    for place in run(python, "-c", places, cwd=tmp_path).split():
        assert Path(place).is_relative_to(installed), "this is not what the wheel brought"
    assert "zero_stage: 3" in run(python, "-m", "distexp", "--cfg", "job", "zero_stage=3", cwd=tmp_path)
    assert "squad_sample" in run(str(installed / "bin" / "distexp"), "--help", cwd=tmp_path)
    run(str(installed / "bin" / "distexp"), *SHORT, cwd=tmp_path)
    (path,) = tmp_path.glob("multirun_outputs/distexp/*/0/record.json")
    record = RunRecord.read(path)
    assert (record.status, record.metrics.total_steps) == ("completed", 2)
    assert str(REPOSITORY) not in (path.parent / ".hydra" / "hydra.yaml").read_text()


def test_no_text_installs_the_other_project_that_pypi_has_under_this_name() -> None:
    """An extra, as in ``pip install 'distexp[adapters]'``, is that of the installed distexp."""
    folders = [REPOSITORY / name for name in ("docs", "examples", "conf", "distexp")]
    texts = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".md", ".yml", ".yaml", ".py")]
    plain = re.compile(r"""pip install (-U )?['"]?distexp(?![\w\[-])""")
    assert [str(path) for path in (REPOSITORY / "README.md", *texts) if plain.search(path.read_text())] == []

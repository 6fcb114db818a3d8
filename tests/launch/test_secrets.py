"""Values of secret variables: they reach no file, because a configuration that contains one is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distexp.cli.main import main
from distexp.system.environment_variables import looks_secret, select_variables

VALUE = "0123456789abcdef"
REFUSED = {  # overrides, with a part of the message
    "cluster.environment.SSHPASS=x": "cluster.environment.SSHPASS is a secret",
    "cluster.environment.WANDB_API_KEY=x": "cluster.environment.WANDB_API_KEY is a secret",
    "++cluster.environment={HF_TOKEN: x}": "cluster.environment.HF_TOKEN is a secret",
    "hydra.job.env_copy=[MY_PASSWORD]": "hydra.job.env_copy=[MY_PASSWORD] is a secret",
    "+hydra.job.env_set.MY_PASSWORD=x": "hydra.job.env_set.MY_PASSWORD is a secret",
    "cluster.setup=['export DB_PASSWORD=abc']": "DB_PASSWORD in cluster.setup is a secret",
    "cluster.setup=[\"export X_TOKEN='abc'\"]": "X_TOKEN in cluster.setup is a secret",
    "cluster.sbatch.export='AWS_SECRET_ACCESS_KEY=abc'": "AWS_SECRET_ACCESS_KEY in cluster.sbatch is a secret",
    "name='${oc.env:MY_PASSWORD}'": "${oc.env:MY_PASSWORD} is a secret",
    f"name=run-{VALUE}": "name=... contains the value of $MY_PASSWORD",
    "tracker.uri='postgresql://me:pass@host/db'": "tracker.uri contains a password",
}
ACCEPTED = (
    "cluster.environment.NCCL_IB_PKEY=0x1",
    "cluster.environment.TOKENIZERS_PARALLELISM=false",
    "model.name='${oc.env:HOME}'",
    "tracker.uri='http://host:5000'",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["distexp"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("MY_PASSWORD", VALUE)
    monkeypatch.setattr("distexp.cli.run.MAX_ERRORS", 1)  # The search for more errors takes as long as the command.
    return tmp_path


@pytest.mark.parametrize("override", REFUSED)
def test_a_secret_in_the_configuration_is_refused_before_any_file_is_written(
    override: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--multirun", "train.seed=1,2", "strategy=single", override]) == 2
    message = capsys.readouterr().err
    assert REFUSED[override] in message
    assert VALUE not in message
    assert "shell" in message
    assert list(folder.iterdir()) == []


def test_a_file_with_an_interpolation_of_a_secret_does_not_get_its_value(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--multirun", "train.seed=1,2", "strategy=single", "model.name='x${oc.env:MY_PASSWORD,none}'"])
    assert "${oc.env:MY_PASSWORD} is a secret" in (shown := "".join(capsys.readouterr()))
    assert list(folder.iterdir()) == []
    assert VALUE not in shown


def test_other_variables_are_accepted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", *ACCEPTED]) == 0
    assert "secret" not in "".join(capsys.readouterr())


def test_secrets_are_not_recorded() -> None:
    found = select_variables({"NCCL_ALGO": "Ring", "NCCL_TOKEN": VALUE, "PYTORCH_API_KEY": VALUE, "HF_TOKEN": VALUE})
    assert found == {"NCCL_ALGO": "Ring"}


@pytest.mark.parametrize(
    "name",
    [
        *("OPENAI_KEY_2", "GITHUB_TOKEN", "MYSECRET", "apikey", "DB_PASSWD", "X_CREDENTIALS"),
        *("SSHPASS", "MYSQL_PWD", "DB_PASS", "GITHUB_PAT", "SSH_PASSPHRASE", "NPM_AUTH"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name", ["MONKEY", "PWD", "OLDPWD", "PATH", "PYTHONPATH", "SSH_AUTH_SOCK", "BYPASS", "AUTHOR", "LD_LIBRARY_PATH"]
)
def test_names_of_other_variables(name: str) -> None:
    assert not looks_secret(name)

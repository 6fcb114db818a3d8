"""Quotes around choices that Hydra would read as numbers or booleans, and around texts that it cannot read."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import OverrideParseException

from distexp.cli.errors import explain
from distexp.config.keys import config_groups
from distexp.config.overrides import copyable_overrides, override_of, parse, plain_value, quote_choice, values_of


@pytest.mark.parametrize(
    ("typed", "quoted"),
    [
        ("zero_stage=1,2,3", "zero_stage='1','2','3'"),
        ("zero_stage=3", "zero_stage='3'"),
        ("zero_stage=range(1,4)", "zero_stage='1','2','3'"),
        ("zero_stage=choice(0,3)", "zero_stage='0','3'"),
        ("offload=true,false", "offload='true','false'"),
        ("offload=True", "offload='true'"),
        ("offload=pinned", "offload=pinned"),
        ("offload='false'", "offload='false'"),
        ("model='größe'", "model='größe'"),
        (r"model='ada\'s'", r"model='ada\'s'"),
        ("strategy=glob(*)", "strategy=glob(*)"),
        ("experiment=deepspeed/zero_stages", "experiment=deepspeed/zero_stages"),
        ("train.max_steps=1,2", "train.max_steps=1,2"),
    ],
)
def test_choices_are_quoted_for_hydra(typed: str, quoted: str) -> None:
    assert quote_choice(typed, config_groups()) == quoted


@pytest.mark.parametrize(
    ("value", "values"),
    [
        ("ä.jsonl,b (1).jsonl,c", ["ä.jsonl", "b (1).jsonl", "c"]),
        ("one ä,two.jsonl", ["one ä,two.jsonl"]),  # There is such a file.
        ("choice(ä,b)", ["ä", "b"]),
        ("x ä, y ä , b", ["x ä", "y ä", "b"]),
        ("sort(ä, b, reverse=true)", ["ä", "b"]),
        ("Ada's texts/x", ["Ada's texts/x"]),
        ("Ada's and Bob's/x", ["Ada's and Bob's/x"]),
        ("Ada's,$5", ["Ada's", "$5"]),
    ],
)
def test_the_printed_quotes_keep_each_value(
    value: str, values: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one ä,two.jsonl").touch()
    with pytest.raises(OverrideParseException) as caught:
        parse([f"dataset.path={value}"])
    (message,) = explain(caught.value)
    assert message.startswith(f"dataset.path={value} needs quotes: write ")
    (typed,) = shlex.split(message.partition(" needs quotes: write ")[2])
    assert [plain_value(found) for found in values_of(parse([typed])[0])] == values


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("trusted_packages=[päck,other]", ["päck", "other"]),
        ("hydra.run.dir=it's [1]", "it's [1]"),
        ('hydra.run.dir=a"b', 'a"b'),
        ("hydra.sweep.dir=runs é, 2", "runs é, 2"),  # Hydra refuses several values of such a key.
    ],
)
def test_the_printed_quotes_keep_a_list_and_a_comma(override: str, value: object) -> None:
    with pytest.raises(OverrideParseException) as caught:
        parse([override])
    (typed,) = shlex.split(explain(caught.value)[0].partition(" needs quotes: write ")[2])
    assert plain_value(parse([typed])[0].value()) == value


def test_a_path_with_an_apostrophe_is_copyable() -> None:
    assert copyable_overrides("dataset.path=Ada's/x") == "\"dataset.path='Ada\\'s/x'\""


@pytest.mark.parametrize("value", [["--mpi=none"], ['export A=b, "c"', "echo $HOME"], ["cuda/12"], "a b=c", "a,b", 5])
def test_an_override_of_a_file_is_read_as_its_value(value: Any) -> None:
    (override,) = parse([override_of("cluster.setup", value)])
    assert plain_value(override.value()) == value


def test_a_list_that_a_record_has_without_quotes_is_printed_with_them() -> None:
    assert copyable_overrides("cluster.srun=[--mpi=none]") == "\"cluster.srun=['--mpi=none']\""

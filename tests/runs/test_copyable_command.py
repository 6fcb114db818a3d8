"""Commands to copy: bash and Hydra read from them what the original command had."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from distexp.config.overrides import (
    copyable_command,
    copyable_override,
    format_override,
    plain_value,
    quote_for_hydra,
)


def read(text: str) -> Any:
    """Return the value of an override, as Hydra reads it."""
    override = OverridesParser.create().parse_override(text)
    assert not override.is_sweep_override()
    return override.value()


@pytest.mark.parametrize(
    "value",
    [
        "plain", "my model", "a,b", "/data/train (1).json", "/data/a b,c/x.json", "it's", "a=b", "2,000", "[a", "{b}",
        "a\\", "x: y", "$HOME", "a;b & c", "~/data", "*", "é",
    ],
)  # fmt: skip
def test_a_text_of_a_record_survives_bash_and_hydra(value: str) -> None:
    """A record has the override without Hydra's quotes."""
    stored = format_override(f"name={quote_for_hydra(value)}")
    assert stored.startswith(f"name={value[:2]}")
    command, argument = shlex.split(copyable_command([stored]))
    assert command == "distexp"
    assert str(read(argument)) == value


@pytest.mark.parametrize("typed", ['name="it\'s"', "key=['it\\'s',b]", "key={a:'it\\'s'}"])
def test_an_apostrophe_survives_a_record(typed: str) -> None:
    (argument,) = shlex.split(copyable_command([format_override(typed)], command=""))
    assert plain_value(read(argument)) == plain_value(read(typed))


@pytest.mark.parametrize("value", ["it\\'s", "a,b", "a\\\\", "a\\\\\\'", "[x]", "1", "null", "true", "a b"])
def test_a_quoted_value_keeps_its_meaning(value: str) -> None:
    """Only sections without types read ``1`` and ``'1'`` differently."""
    typed = f"++dataset.options.key='{value}'"
    (argument,) = shlex.split(copyable_command([typed], command=""))
    assert read(argument) == read(typed)


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("zero_stage='1','2'", "zero_stage=1,2"),
        ("offload='true','false'", "offload=true,false"),
        ("offload=True", "offload=true"),
        ("name='a,b'", "\"name='a,b'\""),
        ("strategy=ddp,fsdp", "strategy=ddp,fsdp"),
        ("sweep.cells=[['strategy=ddp'],['zero_stage=1,2']]", "\"sweep.cells=[['strategy=ddp'],['zero_stage=1,2']]\""),
        ('sweep.cells=[["strategy=ddp"]]', "'sweep.cells=[[\"strategy=ddp\"]]'"),
        ("train.betas=[0.9,0.99]", "'train.betas=[0.9,0.99]'"),
        ("--multirun", "--multirun"),
    ],
)
def test_only_needed_quotes_are_shown_in_the_command_of_a_sweep(typed: str, shown: str) -> None:
    assert copyable_command([typed], may_sweep=True) == f"distexp {shown}"


def test_a_record_without_quotes_is_no_sweep() -> None:
    assert copyable_override("name=a,b") == "name='a,b'"
    assert copyable_override("name=a,b", may_sweep=True) == "name=a,b"


@pytest.mark.parametrize("name", ["1.50", "1_000", "true", "null", "[a]", " text", "text", "1.0.1"])
def test_a_name_that_looks_like_another_type_stays_a_text(name: str) -> None:
    """Records have the value of ``dataset.column='1.50'`` without quotes."""
    (argument,) = shlex.split(copyable_command([f"dataset.column={name}"], command=""))
    assert plain_value(read(argument)) == name
    assert ("'" in argument) is (name not in ("text", "1.0.1"))
    assert copyable_override("dataset.eval_path=null") == "dataset.eval_path=null"

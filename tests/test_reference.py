"""Tests of the generated reference pages."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest

from distexp.config import Config
from distexp.config.fields import info_of
from distexp.config.keys import describe_values, known_keys, schema_fields
from distexp.reference import PAGES
from distexp.resolve.scaling_rules import RULES
from distexp.runs.record import RunRecord
from tests.helpers.language import measure_prose
from tests.helpers.runs import REPOSITORY


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str) -> None:
    written = (REPOSITORY / "docs" / "reference" / f"{name}.md").read_text()
    assert written == PAGES[name](), f"run: distexp reference {name} > docs/reference/{name}.md"


@pytest.mark.parametrize("name", PAGES)
def test_page_has_short_sentences(name: str) -> None:
    assert measure_prose(PAGES[name]()).words_per_sentence <= 18


def test_command_prints_a_page() -> None:
    command = [sys.executable, "-m", "distexp", "reference", "record"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == PAGES["record"]()


def test_configuration_page_explains_options_and_keys() -> None:
    text = PAGES["configuration"]()
    assert "- `hybrid_shard`: " in text
    assert "| `learning_rate` | `float` | `5e-05` | at least 0 | " in text
    assert "- `deepspeed/zero_stages`: " in text


def test_record_page_lists_every_field() -> None:
    text = PAGES["record"]()
    for spec in fields(RunRecord):
        assert f"| `{spec.name}` |" in text
    assert "| `step_time_s.p50` |" in text


def test_every_key_and_field_has_a_meaning() -> None:
    without = [key for key, spec in schema_fields() if not info_of(spec).help]
    assert without == []
    assert all(info_of(spec).help for spec in fields(RunRecord))
    assert {spec.name for spec in fields(Config)} <= known_keys()


def test_accepted_values_are_described_from_the_schema() -> None:
    assert describe_values("train.max_steps") == "an integer or null"
    assert describe_values("train.schedule") == "one of linear, cosine, step, constant"
    assert describe_values("train.nonsense") is None


def test_schema_lists_every_scaling_rule() -> None:
    (spec,) = [spec for key, spec in schema_fields() if key == "scaling.name"]
    assert info_of(spec).choices == tuple(RULES)

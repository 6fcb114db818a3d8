"""The page of all groups and keys says what the sources say."""

from __future__ import annotations

from distexp.reference import page
from tests.helpers.runs import REPOSITORY


def test_the_page_is_up_to_date() -> None:
    written = (REPOSITORY / "docs" / "configuration.md").read_text()
    assert written == page(), "run: python -m distexp.reference > docs/configuration.md"


def test_it_explains_every_option_and_shows_defaults() -> None:
    text = page()
    assert "- `hybrid_shard`: Sharded within a node, replicated across nodes" in text
    assert "| `learning_rate` | `float` | `5e-05` |" in text
    assert "- `deepspeed/zero_stages`:" in text

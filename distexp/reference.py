"""``python -m distexp.reference > docs/configuration.md``: every group, option and key, from the YAML and the schema.

What stands there is what the sources say: the comment at the head of each YAML file, and the comment
beside each key of ``config.py``.
"""

from __future__ import annotations

import ast
import inspect
import tokenize
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from distexp import config
from distexp.cli.help import GROUPS
from distexp.config.paths import conf_dir

HEAD = """# Configuration

Made by `python -m distexp.reference`; change the sources, not this page. Choose an option of a group by
`group=option`, set a key by `section.key=value`, and sweep either with `--multirun` and values separated by commas.
`python -m distexp --cfg job ...` shows what a command line comes to.
"""


def page() -> str:
    """The whole page, in Markdown."""
    lines = [HEAD, "## Groups", ""]
    for group, meaning in GROUPS:
        lines += [f"### `{group}`: {meaning}", "", *_options(group), ""]
    made = {section.name: section.default_factory for section in fields(config.Config)}
    sections: dict[str, Any] = {name: nested for name, nested in made.items() if is_dataclass(nested)}
    lines += ["## Keys", "", "Null means: decided by the strategy, the model or the machine.", ""]
    lines += ["### Without a section", "", *_table(config.Config, skipping=sections), ""]
    for name, nested in sections.items():
        lines += [f"### `{name}`", "", *_about(nested), *_table(nested), ""]
    return "\n".join(lines).rstrip() + "\n"


def _options(group: str) -> Iterator[str]:
    """A line for each YAML file of a group, with the commands that its comment shows."""
    folder = conf_dir() / group
    for path in sorted(folder.rglob("*.yaml")):
        text, commands = head_comment(path)
        yield f"- `{path.relative_to(folder).with_suffix('')}`: {text}"
        if commands:
            yield ""
            yield from (f"      {command}" for command in commands)
            yield ""


def head_comment(path: Path) -> tuple[str, list[str]]:
    """The comment that a YAML file opens with: its sentences, and the commands, which are indented in it."""
    sentences: list[str] = []
    commands: list[str] = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("# @package"):
            continue
        told = line.removeprefix("#")
        (commands if told.startswith("   ") else sentences).append(told.strip())
    return " ".join(sentences), commands


def _about(section: type[Any]) -> list[str]:
    """The docstring of a section; a dataclass without one has its signature there."""
    text = inspect.getdoc(section) or ""
    return [] if text.startswith(f"{section.__name__}(") else [text, ""]


def _table(section: type[Any], *, skipping: Collection[str] = ()) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, *others in keys(section):
        if name not in skipping:
            kind, default, comment = (text.replace("|", "\\|") for text in others)
            yield f"| `{name}` | `{kind}` | `{default}` | {comment} |"


def keys(section: type[Any]) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and comment of each key of a section, as its source says them."""
    source = inspect.getsource(section)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign):
            told = [text for line, text in comments.items() if node.lineno <= line <= (node.end_lineno or 0)]
            yield ast.unparse(node.target), ast.unparse(node.annotation), _default(node.value), " ".join(told)


def _default(value: ast.expr | None) -> str:
    """A default as a person would type it."""
    if isinstance(value, ast.Call):  # field(default_factory=...)
        made = value.keywords[0].value
        if isinstance(made, ast.Lambda):
            return ast.unparse(made.body)
        return {"list": "[]", "dict": "{}"}.get(ast.unparse(made), "")
    if isinstance(value, ast.Name):
        return "???"
    assert isinstance(value, ast.Constant)
    named = {"None": "null", "True": "true", "False": "false"}
    return named.get(str(value.value), str(value.value))


if __name__ == "__main__":
    print(page(), end="")

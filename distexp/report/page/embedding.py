"""Scripts, styles and data in the form in which the page contains them."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import vl_convert
from markupsafe import Markup

from distexp.report.figures.base import VEGALITE
from distexp.runs.json_files import nan_to_none


@cache
def bundle_chart_library() -> str:
    """Return a JavaScript module with Vega, Vega-Lite and Vega-Embed. Cached, because it takes a second."""
    return vl_convert.javascript_bundle("export default vegaEmbed;", vl_version=VEGALITE)


def read_table_library(suffix: str) -> str:
    """Return the JavaScript module or the style of DataTables from the package itables.

    The package is not imported, because it would read the pyproject.toml of the current folder.
    """
    package = find_spec("itables")
    assert package is not None
    assert package.origin is not None
    return (Path(package.origin).parent / "html" / f"dt_bundle{suffix}").read_text()


def compress(text: str) -> str:
    """Compress a text, which the page's script decompresses. It makes the page four times smaller."""
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def escape_closing_tags(code: str) -> Markup:
    """Escape the tags that would end a script or style element early."""
    return Markup(code.replace("</script", "<\\/script").replace("</style", "<\\/style"))


def to_json(content: Any) -> str:
    """Return compact JSON; NaN and infinity become null."""
    return json.dumps(nan_to_none(content), separators=(",", ":"), allow_nan=False)

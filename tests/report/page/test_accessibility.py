"""What Lighthouse checks on the report page: names of elements, headings, tables, contrast, messages and size."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from distexp.report.__main__ import main
from tests.helpers.records import record, write
from tests.helpers.report_sweeps import growing_sweep, zero_sweep
from tests.report.page.test_page import large_proof

TIMEOUT_MS = 120_000
LARGEST_PAGE = 2_000_000  # bytes

PROBLEMS = r"""() => {
  const problems = [];
  const expect = (holds, text, node) => { if (!holds) problems.push(`${text}: ${node.outerHTML.slice(0, 150)}`); };
  const all = (selector) => [...document.querySelectorAll(selector)];
  const root = document.documentElement;
  expect(root.lang && document.title && document.querySelector("main"), "no language, title or main part", root);
  for (const svg of all("svg").filter((node) => !node.ownerSVGElement && node.ariaHidden !== "true"))
    expect(svg.role && svg.ariaLabel, "a drawing without role and name", svg);
  for (const image of all("img")) expect(image.hasAttribute("alt"), "an image without alt", image);
  let level = 0;
  for (const heading of all("h1, h2, h3, h4, h5, h6")) {
    expect(+heading.tagName[1] <= level + 1, `a heading below level ${level}`, heading);
    level = +heading.tagName[1];
  }
  if (all("h1").length !== 1) problems.push(`${all("h1").length} first headings`);
  for (const table of all("table")) expect(table.querySelector("th"), "a table without headers", table);
  for (const head of all("th")) expect(head.scope, "a header without scope", head);
  const label = (node) => node.labels?.[0]?.textContent || node.placeholder;
  const named = (node) => node.ariaLabel || node.textContent.trim() || label(node);
  for (const control of all("button, input, select, a[href], summary")) expect(named(control), "no name", control);
  const ids = all("[id]").map((node) => node.id);
  problems.push(...ids.filter((id, n) => ids.indexOf(id) !== n).map((id) => `two elements are ${id}`));

  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const pixel = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, alpha] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, alpha / 255];
  };
  const over = (top, below) => [0, 1, 2].map((n) => top[n] * top[3] + below[n] * (1 - top[3]));
  const behind = (node) => {
    const above = node.parentElement ? behind(node.parentElement) : [255, 255, 255];
    return over(pixel(getComputedStyle(node).backgroundColor), above);
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((n) => (n / 255 <= 0.03928 ? n / 255 / 12.92 : ((n / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  for (const node of all("body *")) {
    const style = getComputedStyle(node), drawing = node.ownerSVGElement;
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    const isSeen = node.getClientRects().length && style.visibility !== "hidden";
    if (!hasText || !isSeen || node.matches(".disabled")) continue;
    const below = behind(drawing ? drawing.parentElement : node);
    const [r, g, b, alpha] = pixel(drawing ? style.fill : style.color);
    const color = over([r, g, b, alpha * style.opacity * (drawing ? style.fillOpacity : 1)], below);
    const [dark, light] = [luminance(color), luminance(below)].sort((x, y) => x - y);
    const isLarge = parseFloat(style.fontSize) >= (style.fontWeight >= 700 ? 18.66 : 24);
    const ratio = (light + 0.05) / (dark + 0.05);
    expect(ratio >= (isLarge ? 3 : 4.5) || style.opacity === "0", `contrast ${ratio.toFixed(2)}`, node);
  }
  return problems;
}"""


def report_of(make: Callable[[Path], Path], folder: Path) -> Path:
    """Write a sweep and its report; return the page."""
    make(folder)
    assert main([str(folder)]) == 0
    return folder / "report" / "report.html"


MESHES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"tensor": 2}, 4),
    ({"pipeline": 4}, 4),
    ({"expert": 16}, 2_000_000_000),  # as a foreign record may have
    ({"tensor": 2, "pipeline": 2, "mesh": [2, 2]}, 16),
    ({"tensor": 4, "pipeline": 4, "mesh": [1, 1, 1]}, 4),  # as one may have too
)


def mesh_report(folder: Path) -> Path:
    """Write the report of runs whose workers share a model; return the page."""

    def make(path: Path) -> Path:
        runs = [record(n) for n in range(len(MESHES))]
        for run, (degrees, workers) in zip(runs, MESHES, strict=True):
            assert run.built
            for name, value in {**degrees, "world_size": workers}.items():
                setattr(run.built, name, value)
        return write(path, *runs)

    page = report_of(make, folder)
    text = page.read_text()
    assert 'aria-label="run 0: 2 x 2 workers (data x tensor). data 0: ranks 0 to 1; data 1: ranks 2 to 3"' in text
    assert "<title>rank 3: data 0, pipeline 3</title>" in text
    assert "2 x 2 x 2 x 2 workers (replica x shard x pipeline x tensor)" in text
    assert "<title>rank 6: replica 0, shard 1, pipeline 1, tensor 0</title>" in text
    assert text.count("Only the first ranks are drawn.") == 1
    return page


def proof_page(folder: Path) -> Path:
    """Write a page of ``distexp verify``; return it."""
    large_proof(folder / "proof.html")
    return folder / "proof.html"


@pytest.mark.parametrize(
    "make", [partial(report_of, zero_sweep), partial(report_of, growing_sweep), mesh_report, proof_page]
)
def test_the_pages_pass_the_checks_of_accessibility(make: Callable[[Path], Path], tmp_path: Path) -> None:
    page_file = make(tmp_path)
    assert page_file.stat().st_size < LARGEST_PAGE
    chromium = shutil.which("chromium")
    assert chromium, "chromium is missing: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, timeout=TIMEOUT_MS)
        for scheme in ("light", "dark"):
            page = browser.new_context(color_scheme=scheme).new_page()
            messages: list[str] = []
            page.on("console", lambda message, found=messages: found.append(message.text))
            page.on("pageerror", lambda error, found=messages: found.append(str(error)))
            page.goto(page_file.as_uri())
            if page_file.name == "report.html":
                page.wait_for_selector("html[data-ready=yes]", timeout=TIMEOUT_MS)
            page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
            assert page.evaluate(PROBLEMS) == [], scheme
            assert messages == [], scheme
        page.evaluate("document.querySelector('h1').outerHTML = '<h3>no first heading</h3>'")
        assert len(page.evaluate(PROBLEMS)) == 2
        browser.close()

"""``report.html`` in a real browser: it works offline, sorts, filters, compares and prints."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from distexp.report.__main__ import main
from distexp.report.data.overview import Overview
from distexp.report.data.rows import load_rows
from distexp.report.figures.step_figures import build_step_timeline
from distexp.report.files import DARK, LIGHT, errors_of_parameters, write_proof
from distexp.report.page import write_page
from distexp.report.traces import load_traces
from distexp.runs.record_sections import RunError
from tests.helpers.records import invalid, record, write
from tests.helpers.report_sweeps import enrich, growing_sweep, many_runs, with_traces, zero_sweep

MISSING = "\u2013"
EVIL = "</script><img src=http://example.invalid/x onerror=alert(1)>"
BOXES = "all => all.map(one => one.getBoundingClientRect()).map(box => [box.left, box.top, box.right, box.bottom])"
RIGHT_ENDS = """all => all.map(one => {
  const range = document.createRange();
  range.selectNodeContents(one);
  return range.getBoundingClientRect().right;
})"""
TIMEOUT_MS = 180_000
"""For anything in the browser, which a busy machine may slow down."""

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@dataclass
class WatchedPage:
    """A page with its requests and the browser's messages."""

    page: Page
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path, "chromium is missing: apt-get install chromium"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, timeout=TIMEOUT_MS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of a sweep on GPUs and move it to another folder."""
    made = tmp_path_factory.mktemp("made") / "sweep"
    zero_sweep(made)
    broken = record(
        12, strategy="deepspeed", deepspeed__zero_stage=0, model__name="bloom_560m", cluster__device="cuda",
        precision__name="bf16", status="failed", error=RunError("ValueError", EVIL, "eval", 1),
    )  # fmt: skip
    write(made, enrich(broken))
    assert main([str(made)]) == 0
    moved = tmp_path_factory.mktemp("moved") / "else where"
    shutil.move(made, moved)
    return moved / "report" / "report.html"


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = growing_sweep(tmp_path_factory.mktemp("grown") / "sweep")
    assert main([str(made)]) == 0
    return made / "report" / "report.html"


def watch(browser: Browser, path: Path, *, scheme: str = "light", viewport: dict[str, int] = DESK) -> WatchedPage:
    """Open the page in a new context and wait for its table and charts."""
    context = browser.new_context(color_scheme=scheme, viewport=viewport)  # type: ignore[arg-type]
    context.set_default_timeout(TIMEOUT_MS)
    seen = WatchedPage(context.new_page())
    seen.page.on("request", lambda request: seen.requests.append(request.url))
    seen.page.on("console", lambda message: seen.messages.append(message.text))
    seen.page.on("pageerror", lambda error: seen.messages.append(str(error)))
    seen.page.goto(path.as_uri())
    seen.page.wait_for_selector("html[data-ready=yes]")
    return seen


@pytest.fixture
def opened(browser: Browser, zero: Path) -> Iterator[Page]:
    page = watch(browser, zero).page
    yield page
    page.context.close()


@pytest.mark.parametrize(
    ("scheme", "viewport"), [("light", DESK), ("dark", DESK), ("light", PHONE)], ids=["light", "dark", "phone"]
)
def test_it_makes_no_requests_logs_nothing_and_fits_the_window(
    browser: Browser, zero: Path, grown: Path, scheme: str, viewport: dict[str, int]
) -> None:
    palette = {"light": LIGHT, "dark": DARK}[scheme]
    for path, charts in ((zero, 1 + 8 + 8 + 1 + 1), (grown, 1 + 2 + 6 + 6 + 1 + 1)):
        seen = watch(browser, path, scheme=scheme, viewport=viewport)
        assert {url.split(":")[0] for url in seen.requests} == {"file", "blob"}
        assert [url for url in seen.requests if url.startswith("file")] == [path.as_uri()]
        assert seen.messages == []
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        drawn = seen.page.locator(".chart svg:visible")
        assert drawn.count() == charts
        assert all(drawn.nth(n).locator("path, text").count() > 5 for n in range(charts))
        assert _computed(seen.page, "body", "background-color") == _rgb(palette["page"])
        assert _computed(seen.page, ".chart svg .mark-text.role-axis-title text", "fill") == _rgb(palette["muted"])
        assert _computed(seen.page, "#runs-table tbody td", "color") == _rgb(palette["ink"])
        assert _labels_that_overlap(seen.page) == []
        assert _right_end(seen.page, "samples/s") < _right_end(seen.page, "speedup")
        assert "Speedup: samples/s relative to run 0" in (seen.page.locator("#runs .sentences").text_content() or "")
        if viewport is DESK:
            assert _right_end(seen.page, "speedup") <= viewport["width"], "the page explains a column that is not seen"
        titles = seen.page.locator("h2, h3, figcaption, .subtitle").evaluate_all(RIGHT_ENDS)
        assert len(titles) > 8
        assert max(titles) <= viewport["width"], "a title is cut"
        seen.page.context.close()


def _right_end(page: Page, title: str) -> float:
    """Return the right end of a column of the table of runs, in pixels."""
    box = page.locator("#runs-table thead th", has_text=title).first.bounding_box()
    assert box is not None
    return box["x"] + box["width"]


def _labels_that_overlap(page: Page) -> list[str]:
    """Return the labels in the chart of memory and throughput that overlap a mark or another label."""
    chart = page.locator("#memory_throughput svg:visible")
    labels = chart.locator(".mark-text.role-mark text:not([opacity='0'])")
    names, boxes = labels.all_text_contents(), labels.evaluate_all(BOXES)
    assert len(names) > 3
    marks = chart.locator(".mark-symbol.role-mark path").evaluate_all(BOXES)
    pairs = [(n, other) for n in range(len(boxes)) for other in [*boxes[:n], *boxes[n + 1 :], *marks]]
    return [names[n] for n, other in pairs if _overlap(boxes[n], other)]


def _overlap(one: list[float], other: list[float]) -> bool:
    return all(one[k] + 1 < other[k + 2] and other[k] + 1 < one[k + 2] for k in (0, 1))


def test_requests_are_recorded(browser: Browser) -> None:
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.set_content("<img src='http://127.0.0.1:9/x.png'>")
    assert seen == ["http://127.0.0.1:9/x.png"]
    page.close()


def test_a_browser_without_decompression_shows_a_message(browser: Browser, zero: Path) -> None:
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.add_init_script("delete window.DecompressionStream")
    page.goto(zero.as_uri())
    page.get_by_text("This browser cannot sort the table").wait_for()
    assert page.locator("#runs-table tbody tr").count() == 13, "the table needs no script"
    page.close()


def test_tiles_rank_runs_of_one_task_only(browser: Browser, tmp_path: Path) -> None:
    for models, ranked in ((("bloom_tiny", "bloom_tiny"), True), (("bloom_tiny", "gpt_tiny"), False)):
        made = tmp_path / "-".join(models)
        write(made, invalid(0, "no such mesh", cluster__nodes=3))
        for number, model in enumerate(models, start=1):
            write(made, record(number, model__name=model, cluster__workers_per_node=number))
        assert main([str(made)]) == 0
        page = watch(browser, made / "report" / "report.html").page
        tiles = page.locator(".tiles").inner_text()
        assert ("fastest" in tiles) == ranked
        assert ("runs 1, 2 are equal within the noise of ±57%" in tiles) == ranked
        compared = [page.input_value(f"#run-{side}").split()[0] for side in "ab"]
        assert compared == ["1", "2"], "the comparison opens with completed runs"
        sentences = page.locator("#runs .sentences").text_content() or ""
        explained = ["Speedup: samples/s relative to" in sentences, "~1: equal to this run within" in sentences]
        assert explained == [ranked, ranked]
        assert ("speedup" in page.locator("#runs-table thead").inner_text()) == ranked
        if ranked:
            assert _column(page, "speedup") == [MISSING, "1.00", "~1"]
        page.context.close()


def test_a_baseline_that_is_not_to_be_trusted_is_no_headline(tmp_path: Path) -> None:
    runs = [record(n, cluster__workers_per_node=1 + n, speed=speed) for n, speed in enumerate((10.0, 91.8))]
    assert main([str(write(tmp_path, *runs))]) == 0
    text = (tmp_path / "report" / "report.html").read_text()
    assert "do not trust the baseline" in text
    assert "459% relative to run 0. Likely reason: other programs used its cores." in text
    assert "efficiency at the most workers" not in text


def three_strategies(path: Path, *, error: float = 0.004) -> Path:
    """Write a sweep of three strategies with the noise of their steps, and make its report. Return the page."""
    runs = []
    for number, (name, speed, peak) in enumerate(
        (("fsdp", 160.0, 11e3), ("ddp", 205.0, 30e3), ("deepspeed", 118.0, 17e3))
    ):
        runs.append(enrich(record(number, strategy=name, speed=speed, peak=peak, overrides=(f"strategy={name}",))))
        runs[-1].metrics.speed_error = {"relative": error, "blocks": 10.0}
    assert main([str(with_traces(path, runs))]) == 0
    return path / "report" / "report.html"


@pytest.fixture(scope="module")
def strategies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_strategies(tmp_path_factory.mktemp("strategies"))


def test_the_page_opens_with_the_answer_without_a_script(browser: Browser, strategies: Path) -> None:
    for width in (360, 1600):
        context = browser.new_context(java_script_enabled=False, viewport={"width": width, "height": 1000})
        page = context.new_page()
        page.goto(strategies.as_uri())
        answer = page.locator("#answer")
        taken = "Take ddp: it is 1.28x as fast as the next, fsdp full_shard, and needs 2.73x as much memory."
        assert answer.locator(".headline").all_inner_texts() == [taken]
        assert (
            answer.locator("h2").inner_text()
            == "fsdp full_shard needs 63% less memory than ddp and loses 22% of the speed"
        )
        assert answer.locator(".tiles .value").all_inner_texts() == ["205.0 samples/s", "11,000 MiB", "9.756 s"]
        assert "1.28x as fast as the next, run 0" in answer.locator(".tiles .detail").first.inner_text()
        assert answer.locator(".repeat code").inner_text() == "distexp strategy=ddp"
        chart = answer.locator("svg:visible")
        assert chart.locator("text", has_text=re.compile("^take ddp|^take 1$")).count() == 1
        for axis in ("x", "y"):
            titles = {"x": "peak GPU memory", "y": "samples/s"}
            assert f"'{titles[axis]}" in (
                name := str(chart.locator(f"[aria-label^={axis.upper()}-axis]").get_attribute("aria-label"))
            )
            assert "values from 0 to" in name
        mark = chart.locator("a[href='#run-1']").first
        assert "run: 1\nsettings: strategy=ddp" in (mark.locator("title").text_content() or "")
        mark.click()
        assert page.url.endswith("#run-1")
        assert _computed(page, "#runs-table tr:target td", "background-color") != "rgba(0, 0, 0, 0)"
        rows = page.locator("#runs-table tbody tr")
        assert [text.split()[:3] for text in rows.all_inner_texts()][1] == ["1", "ddp", "completed"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator(".chart:not(:has(svg:visible))").count() == 0
        assert not page.locator("#difference").is_visible(), "it needs the script"
        context.close()


def large_proof(path: Path) -> None:
    """Write the page of a model with 24 blocks, of which the gradients of one are wrong."""
    kinds = (
        "attention.query_key_value",
        "attention.dense",
        "input_layernorm",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    )
    blocks = [f"transformer.h.{n}.{kind}.{part}" for n in range(24) for kind in kinds for part in ("weight", "bias")]
    names = ["transformer.word_embeddings.weight", *blocks, "transformer.ln_f.weight"]
    gradients = {name: (0.5 if ".h.7." in name else 3e-7, 2e-5, 2) for name in names}
    errors = {"initial": dict.fromkeys(names, (0.0, 1e-4, 0)), "gradient": gradients, "loss": {"loss": (0.1, 1, 1)}}
    worst = {"gradient": {"error": 0.5, "bound": 2e-5, "step": 2}, "norm": {"error": None, "bound": 2e-4, "step": 1}}
    phases = [{"phase": "sgd", "status": "different", "worst": worst, "errors": errors}]
    result = {
        "label": "fsdp", "status": "different", "command": "distexp verify strategy=fsdp", "model": EVIL, "skipped": {},
        "arithmetic": ["fp32 highest"], "versions": {"torch": "2.13"}, "not_run": ["uneven"], "phases": phases,
        "parameters": errors_of_parameters(phases),
    }  # fmt: skip
    write_proof(
        result,
        ["different, first in phase sgd", "cause: one block is wrong"],
        {"gradient": "grads", "resume": "resume"},
        path,
    )


def test_the_page_of_a_proof_shows_where_a_large_model_differs(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "proof.html"
    large_proof(path)
    for width, scheme in ((360, "light"), (768, "dark"), (1600, "light")):
        context = browser.new_context(
            java_script_enabled=False, color_scheme=scheme, viewport={"width": width, "height": 900}
        )  # type: ignore[call-overload]
        page = context.new_page()
        page.goto(path.as_uri())
        answer = page.locator("#answer").inner_text()
        assert answer.splitlines()[0] == "different, first in phase sgd"
        assert "Repeat it: distexp verify strategy=fsdp" in " ".join(answer.split())
        assert "Worst parameter: transformer.h.7." in answer
        assert "grads: error 5.0e-01, bound 2.0e-05, in phase sgd, step 2" in answer
        rows = page.locator("#parameters > .scroll tbody tr")
        assert rows.count() == 26
        assert rows.locator("th").all_inner_texts()[7:9] == ["transformer.h.6", "transformer.h.7"]
        wrong = rows.locator("td.l4")
        assert wrong.count() == 1
        assert (wrong.get_attribute("title") or "").startswith("transformer.h.7.attention.")
        assert page.locator("#parameters details tbody tr").count() == 242
        assert page.locator("#phases thead th").all_inner_texts() == ["", "grads"]  # No phase has resumed.
        assert "grads: gradients before clipping. Numbers are" in page.locator("#phases .note").inner_text()
        page.locator("#parameters details").evaluate("one => one.open = true")
        names = page.locator("#parameters details th[scope=row]")
        assert names.evaluate_all(WHOLE_PARTS), "names break behind their dots only"
        page.locator("#parameters details").evaluate("one => one.open = false")
        assert page.locator("#phases td.l4").all_inner_texts() == ["5e-01!"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        map_width = page.locator("#parameters > .scroll").evaluate("one => one.scrollWidth - one.clientWidth")
        assert map_width <= 0, "the heat map is cut"
        palette = {"light": LIGHT, "dark": DARK}[scheme]
        assert _computed(page, "#parameters td.l4", "background-color") == _rgb(palette["bad"])
        context.close()


def test_noise_leaves_the_answer_open(tmp_path: Path) -> None:
    """With a noise of 36 % two speeds are equal: of these, the smaller run is taken."""
    text = three_strategies(tmp_path, error=0.16).read_text()
    assert (
        "Take fsdp full_shard: runs 1, 0 are equally fast within the noise of ±46%, and it needs the least memory"
        in text
    )
    assert "fsdp full_shard needs 63% less memory than ddp at about equal speed" in text
    assert '<span class="value">not decided</span>' in text
    assert "costs 22%" not in text


def test_a_strategy_has_one_color_in_all_figures(browser: Browser, strategies: Path) -> None:
    page = watch(browser, strategies).page
    marks = {
        n: page.locator(f"#memory_throughput svg:visible a[href='#run-{n}'] path[fill]").first.get_attribute("fill")
        for n in range(3)
    }
    assert len(set(marks.values())) == 3
    ticks = {
        n: page.locator(f"#step_times svg:visible a[href='#run-{n}'] path[fill]").first.get_attribute("fill")
        for n in range(3)
    }
    assert ticks == marks
    page.context.close()


def test_a_mark_shows_its_run_and_links_to_its_row(tmp_path: Path, browser: Browser) -> None:
    sweep = many_runs(tmp_path, 60)
    assert main([str(sweep)]) == 0
    page = watch(browser, sweep / "report" / "report.html").page
    assert page.locator("#run-40").count() == 0, "the row is on another page of the table"
    mark = page.locator("#memory_throughput svg:visible a[href='#run-40'] path")
    mark.dispatch_event("mouseover")
    assert page.locator("#tip").inner_text().startswith("run: 40\n")
    mark.dispatch_event("click")
    page.locator("#run-40.target").wait_for()
    assert page.locator("#run-40").is_visible()
    page.context.close()


def test_settings_are_text_and_not_html(browser: Browser, tmp_path: Path) -> None:
    image = "<img src=x onerror=alert(1)>"
    for number, name in enumerate((image, "bloom_tiny")):
        write(tmp_path, record(number, model__name=name, overrides=(f"model.name={name}",)))
    assert main([str(tmp_path)]) == 0
    seen = watch(browser, tmp_path / "report" / "report.html")
    assert seen.page.locator("img").count() == 0
    assert image in seen.page.locator("#runs-table tbody").inner_text()
    assert not [url for url in seen.requests if url.startswith("http")]
    seen.page.context.close()


def test_messages_of_runs_are_escaped(opened: Page) -> None:
    assert opened.locator("img").count() == 0
    assert EVIL in (opened.locator(".notes").text_content() or "")
    opened.get_by_placeholder("Search all columns").fill("onerror=alert")
    _expect(opened, ["12"])


def test_rows_sort_as_numbers(opened: Page) -> None:
    _expect(opened, [str(n) for n in range(13)])
    head = opened.locator("#runs-table thead th", has_text="samples/s")
    head.click()
    opened.wait_for_selector("#runs-table thead th[aria-sort=ascending]")
    speeds = [float(text) for text in _column(opened, "samples/s") if text != MISSING]
    assert len(speeds) == 11
    assert speeds == sorted(speeds)
    head.click()
    opened.wait_for_selector("#runs-table thead th[aria-sort=descending]")
    assert _column(opened, "samples/s")[0] == "120.0"
    assert _column(opened, "run")[0] == "0"
    assert _column(opened, "samples/s")[-2:] == [MISSING, MISSING]  # last in both directions


def test_rows_filter_by_any_text_and_by_column(opened: Page) -> None:
    search = opened.get_by_placeholder("Search all columns")
    search.fill("oom_gpu")
    _expect(opened, ["6"])
    search.fill("phase train")  # the reason, a tooltip of the status
    _expect(opened, ["6"])
    search.fill("")
    _filter(opened, "model", "560m")
    _expect(opened, [*map(str, range(6)), "12"])
    _filter(opened, "zero_stage", "3")
    _expect(opened, ["4", "5"])
    _filter(opened, "model", "")
    _expect(opened, ["4", "5", "10", "11"])


def test_two_configurations_can_be_compared(opened: Page) -> None:
    def compared(one: str, other: str) -> dict[str, list[str]]:
        opened.fill("#run-a", one)
        opened.fill("#run-b", other)
        rows = opened.locator("#difference-table tbody tr")
        texts = [rows.nth(n).locator("th, td").all_inner_texts() for n in range(rows.count())]
        return {key: values for key, *values in texts}

    found = compared("0", "5")
    assert found["config.deepspeed.zero_stage"] == ["1", "3"]
    assert found["config.offload.enabled"] == ["false", "true"]
    chosen = {"config.deepspeed.zero_stage", "config.offload.enabled", "overrides"}
    assert set(found) == {*chosen, "built.zero_stage"}
    assert set(compared("5", "11 · model=bloom_3b, zero_stage=3, offload=true")) == {"config.model.name", "overrides"}
    assert compared("3", "3") == {}
    assert re.fullmatch(r"All \d+ keys are equal\.", opened.inner_text("#difference-note"))
    assert compared("3", "no such run") == {}
    assert "Choose two runs" in opened.inner_text("#difference-note")


def test_links_are_relative_and_valid(opened: Page, zero: Path) -> None:
    links = opened.locator("a[href]").evaluate_all("all => all.map(one => one.getAttribute('href'))")
    files = [link for link in links if not link.startswith("#")]
    assert len(files) > 13 * 3
    assert [link for link in files if not (zero.parent / unquote(link)).exists()] == []
    assert any(link.endswith("0/record.json") for link in files)
    assert any(link.endswith("0/logs/") for link in files)
    targets = [link[1:] for link in links if link.startswith("#")]
    assert [name for name in targets if opened.locator(f"[id='{name}']").count() != 1] == []
    folder = zero.parents[3]
    assert "-" in folder.name, "so the name cannot be in a compressed part by accident"
    for text in (zero.read_text(), opened.evaluate("decompress('data')")):
        assert folder.name not in text


def test_figures_show_pareto_fronts_oom_phases_and_ideal_lines(browser: Browser, grown: Path, opened: Page) -> None:
    tradeoff = opened.locator("#memory_throughput svg:visible")
    assert "OOM" in (tradeoff.text_content() or "")
    assert tradeoff.locator(".mark-line path[stroke-dasharray]").count() == 2  # a front for each model
    panel = opened.locator("#gpu_memory .chart").nth(6).locator("svg:visible")
    fills = panel.locator(".mark-rect path").evaluate_all("all => all.map(one => getComputedStyle(one).fill)")
    assert fills == [_rgb(LIGHT[f"phase-{phase}"]) for phase in ("setup", "warmup", "train", "eval")]
    scaling = watch(browser, grown).page
    drawn = scaling.locator("#scaling .chart svg:visible").first.text_content() or ""
    assert "ideal" in drawn
    assert "one node" in drawn
    assert "2 x 2" in (scaling.locator("#scaling table").last.text_content() or "")
    scaling.context.close()


def test_it_prints_all_rows_in_light_colors(browser: Browser, zero: Path) -> None:
    page = watch(browser, zero, scheme="dark").page
    page.get_by_role("combobox", name="rows").select_option("10")
    assert len(_column(page, "run")) == 10
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 15
    page.emulate_media(media="print")
    assert _computed(page, "body", "color") == _rgb(LIGHT["ink"])
    assert not page.locator("header nav").is_visible()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert len(_column(page, "run")) == 13
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert len(_column(page, "run")) == 10
    page.context.close()


def test_the_button_switches_between_light_and_dark(opened: Page) -> None:
    for palette in (DARK, LIGHT):
        opened.click("#theme")
        assert _computed(opened, "body", "background-color") == _rgb(palette["page"])


def test_the_timeline_of_a_step_zooms(browser: Browser, tmp_path: Path) -> None:
    write(tmp_path, record(0))
    spans = [[n, n + 0.5, n % 2] for n in range(50)]
    lanes = [{"name": name, "spans": spans} for name in ("compute", "communication", "cpu")]
    content = {"schema": 1, "labels": ["matmul", "all_reduce"], "ranks": [{"rank": 0, "step_ms": 50, "lanes": lanes}]}
    (tmp_path / "0" / "profile").mkdir()
    (tmp_path / "0" / "profile" / "summary.json").write_text(json.dumps(content))
    overview = Overview.from_rows(load_rows([tmp_path])[0])
    figure = build_step_timeline(overview, load_traces(overview))
    assert figure is not None
    write_page(overview, [figure], tmp_path / "report.html")
    seen = watch(browser, tmp_path / "report.html", scheme="dark", viewport=PHONE)
    chart = seen.page.locator("[data-chart=step_timeline-0] svg")
    assert chart.locator(".mark-rect.role-mark path").count() == 150
    assert seen.page.locator("#difference").count() == 0, "a single run has no other one to compare it with"
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    seen.page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 30)
    before = _axis_labels(chart)
    seen.page.mouse.wheel(0, 20)
    seen.page.keyboard.down("Control")
    assert _axis_labels(chart) == before, "without Ctrl the page scrolls"
    seen.page.mouse.wheel(0, -400)
    seen.page.wait_for_function(
        "before => document.querySelector('[data-chart=step_timeline-0] .role-axis-label').textContent !== before",
        arg="".join(before),
    )
    assert seen.messages == []
    seen.page.context.close()


def _axis_labels(chart: Locator) -> list[str]:
    """Return the labels of the axis of a chart's time."""
    return chart.locator(".role-axis-label").first.locator("text").all_text_contents()


def test_a_page_of_many_runs_can_be_searched_and_sorted(tmp_path: Path, browser: Browser) -> None:
    sweep = many_runs(tmp_path, 1000)
    assert main([str(sweep)]) == 0
    path = sweep / "report" / "report.html"
    assert path.stat().st_size < 3e6
    page = watch(browser, path).page
    assert page.locator("#runs-table tbody tr").count() == 25
    page.get_by_placeholder("Search all columns").fill("1,098.0")
    page.wait_for_function("document.querySelectorAll('#runs-table tbody tr').length < 25")
    page.locator("#runs-table thead th", has_text="GPU peak").click()
    page.fill("#run-b", "999")
    assert page.locator("#difference-table tbody tr").count() > 0
    page.context.close()


def _column(page: Page, title: str) -> list[str]:
    """Return the texts of a column of the visible rows."""
    titles = [text.strip() for text in page.locator("#runs-table thead tr").first.locator("th").all_inner_texts()]
    rows = page.locator("#runs-table tbody tr").evaluate_all(
        "all => all.map(row => [...row.cells].map(c => c.innerText))"
    )
    return [row[titles.index(title)] for row in rows]


def _expect(page: Page, runs: list[str]) -> None:
    """Wait until these runs are visible. The table draws asynchronously."""
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while (shown := _column(page, "run")) != runs and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    assert shown == runs


def _filter(page: Page, title: str, text: str) -> None:
    titles = [title.strip() for title in page.locator("#runs-table thead tr").first.locator("th").all_inner_texts()]
    page.locator("#runs-table thead tr").nth(1).locator("th, td").nth(titles.index(title)).locator("input").fill(text)


WHOLE_PARTS = """names => names.flatMap(name => [...name.childNodes]).every(node => {
    const range = document.createRange();
    range.selectNodeContents(node);
    return range.getClientRects().length <= 1;
})"""
"""Whether each part of a name, up to a dot, is on one line."""


def _computed(page: Page, selector: str, name: str) -> str:
    return str(page.locator(selector).first.evaluate(f"one => getComputedStyle(one).getPropertyValue('{name}')"))


def _rgb(color: str) -> str:
    return f"rgb({', '.join(str(int(color[n : n + 2], 16)) for n in (1, 3, 5))})"

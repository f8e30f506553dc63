"""The HTML report: what is in the file, and that a real browser shows it. Browser tests skip where no Chromium is found."""
from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shutil
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from sample_pipeline import sample_pipeline
from sample_plan import LAYERS, sample_plan

from autoshard import cli
from autoshard.base import quantities
from autoshard.base.plan import CATEGORIES, Alive, Fallback, Moment, PlacedTensor, Plan
from autoshard.report.page.html import document, embedded, page, write
from autoshard.report.page.tree import tree
from autoshard.simulation.conditions import Conditions
from autoshard.simulation.critical_path import Share
from autoshard.simulation.result import Idle, Simulation
from autoshard.simulation.trace import Span, Track
from autoshard.simulation.traffic import LinkTime, LinkUse, Size
from autoshard.study.explain import EdgeRow, EdgeTable, OpRow, OpTable

NASTY = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>&amp;\u2028${x}"
GIB = 2**30


def timed_plan(**changes: object) -> Plan:
    """The sample plan with a step of four moments; the third is the peak."""
    def moment(i: int, window: str, kind: str, saved: float, temporaries: float) -> Moment:
        return Moment(i, window, kind, f"op_{i}", f"layers.{i}", f"/home/me/model.py:{i}",
                      (2 * GIB, 0, 8 * GIB, 1024, 0, int(saved * GIB), 0, int(temporaries * GIB)))

    timeline = (moment(0, "forward", "start", 0, 0), moment(1, "forward", "compute", 2, 0.5),
                moment(2, "backward", "compute", 3, 1), moment(3, "update", "update", 0, 0.1))
    largest = (Alive("gelu_0[R,R]", "saved", 3 * GIB, "layers.2", "/home/me/model.py:2"),)
    return sample_plan({"timeline": timeline, "largest": largest}, **changes)


def nasty_plan() -> Plan:
    """Every name that a model, a user or a profile chooses is markup."""
    plan = timed_plan()
    return replace(
        plan, model={"reference": NASTY}, notes=(NASTY,), seeds={NASTY: NASTY}, cluster={"name": NASTY},
        collectives=tuple(replace(c, module=NASTY, source=NASTY, value=NASTY, op=NASTY) for c in plan.collectives),
        fallbacks=(Fallback(NASTY, NASTY, 1e-6, NASTY, NASTY),), layouts=(PlacedTensor("weight", f"a.{NASTY}", "a", (4, 4), "float32", (0, 1)),),
        ops={NASTY: plan.ops["wq"]}, copies=tuple(replace(c, value=NASTY) for c in plan.copies),
        stages=tuple(replace(
            s, timeline=tuple(replace(m, op=NASTY, module=NASTY, source=NASTY) for m in s.timeline),
            largest=tuple(replace(a, name=NASTY, module=NASTY, source=NASTY) for a in s.largest)) for s in plan.stages), search={NASTY: NASTY})


def comparison(plan: Plan) -> SimpleNamespace:
    """What `page` reads of a `compare.Comparison`."""
    slow = replace(plan, objective_s=2.0, predicted={**plan.predicted, "step_s": 2.0, "blocking_s": 1.05})
    rows = [("chosen by the search", "", plan, "optimal"), ("DDP", "data dp", slow, ""), ("none", "", None, NASTY)]
    return SimpleNamespace(limit_bytes=70 * GIB, notes=("a note",), contenders=[
        SimpleNamespace(name=name, axes=axes, plan=found, memory_bytes=found and GIB, moved_bytes=found and 5, fits=found is not None, note=note)
        for name, axes, found, note in rows])


def prices() -> tuple:
    edge = EdgeTable("wq", "wq in layers.0", "add_0", 0, (64, 64), "bfloat16",
                     (EdgeRow("[dp, tp]", ("[-, -]",), ((2, 4), (1, 1)), ("AllGather over tp",), 8192, 1e-4, 1e-5, True),), 3)
    op = OpTable("wq", "wq in layers.0", (OpRow(("[dp, -]",), ("[dp, tp]",), 1e-5, 0.0, 0.0, 0.0, 8192, True, 0.0),
                                         OpRow(("[-, -]",), ("[-, -]",), 8e-5, 0.0, 0.0, 0.0, 65536, False, None)))
    return edge, op


def data_of(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


# -- the file ---------------------------------------------------------------------------------------

def test_the_page_holds_the_document():
    assert data_of(page(timed_plan())) == json.loads(embedded(document(timed_plan())))


def test_the_page_loads_nothing():
    text = page(timed_plan())
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text and not re.search(r"@import|url\(", text)


def test_only_the_script_of_the_page_may_run():
    text = page(timed_plan())
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    allowed = re.search(r"script-src 'sha256-([^']+)'", text)[1]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() == allowed


def test_names_cannot_leave_the_data():
    text = page(nasty_plan())
    assert NASTY not in text and text.count("<script") == 2 and text.count("</script>") == 2 and "<img" not in text
    assert data_of(text)["notes"] == [NASTY]


def test_infinite_numbers_are_null():
    assert data_of(page(timed_plan(gap=math.inf)))["gap"] is None


def test_every_tensor_is_in_the_tree_once():
    plan = timed_plan()

    def count(nodes: list) -> int:
        return sum(sum(t["copies"] for t in [*n["tensors"], *([n["output"]] if n["output"] else [])]) + count(n["children"]) for n in nodes)

    assert count(tree(plan)) + document(plan)["whole_buffers"] == len(plan.layouts)


def test_repeated_layers_are_one_node_and_the_other_layer_its_own():
    nodes = {n["name"]: n for n in tree(timed_plan())}
    assert {"embed", "layers.*", "layers.{0-2}", "layers.3", "inputs", "results"} <= set(nodes)
    assert nodes["layers.*"]["copies"] == LAYERS and nodes["layers.*"]["output"]["placement"] == "[dp, -, -] partial sum over tp"
    assert [c["name"] for c in nodes["layers.*"]["children"]] == ["attn"]


def test_what_explains_a_row_exists():
    tables = document(timed_plan(), prices=prices())["tables"]
    for table in tables.values():
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
        for other, rows in (x for detail in table["detail"] or () for x in detail):
            assert rows is None or set(rows) <= set(range(len(tables[other]["rows"])))
    assert [other for other, _ in tables["ops"]["detail"][0]] == ["copies", "price 0", "price 1"]


def test_calls_of_a_folded_row_are_those_it_adds_up():
    tables = document(timed_plan())["tables"]
    for row, [(_, calls)] in zip(tables["collectives"]["rows"], tables["collectives"]["detail"], strict=True):
        assert len(calls) == row[4] and sum(tables["calls"]["rows"][i][7] for i in calls) == row[6]


def test_write_is_whole_or_refused(tmp_path):
    write(tmp_path / "report.html", timed_plan())
    assert (tmp_path / "report.html").read_text() == page(timed_plan())
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


# -- commands ---------------------------------------------------------------------------------------

@pytest.fixture
def run(monkeypatch, capsys):
    """run(*arguments) -> (exit code, standard error), in this process."""
    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["autoshard", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code or 0
        return code, capsys.readouterr().err

    return call


MLP = ("mlp", "--mesh", "d=2", "--cluster", "cpu-gloo", "--batch", "64")


def test_report_writes_the_page_of_a_saved_plan(run, tmp_path):
    saved, html = tmp_path / "plan.json", tmp_path / "report.html"
    timed_plan().save(saved)
    code, err = run("report", saved, "--html", html)
    assert code == 0 and str(html) in err
    assert html.read_text() == page(Plan.load(saved))


def test_plan_writes_baselines_and_prices(run, tmp_path):
    html = tmp_path / "report.html"
    code, err = run("plan", *MLP, "--html", html, "--with-baselines", "-o", tmp_path / "plan.json")
    assert code == 0, err
    data = data_of(html.read_text())
    assert {"DDP", "FSDP (ZeRO-3)"} <= {row["name"] for row in data["comparison"]["rows"]}
    assert any(row[0].startswith("op: ") for row in data["tables"]["prices"]["rows"])
    assert data["objective"] == Plan.load(tmp_path / "plan.json").objective_s and "search" in dict(data["timings"])


def test_the_plan_is_the_same_with_and_without_a_page(run, tmp_path):
    for name, more in (("a", ()), ("b", ("--html", tmp_path / "report.html"))):
        code, err = run("plan", *MLP, "-q", "-o", tmp_path / f"{name}.json", *more)
        assert code == 0, err
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert data_of((tmp_path / "report.html").read_text())["comparison"] is None


def test_compare_writes_its_plans(run, tmp_path):
    code, err = run("compare", *MLP, "-q", "--html", tmp_path / "report.html")
    assert code == 0, err
    assert data_of((tmp_path / "report.html").read_text())["comparison"]["rows"][0]["name"] == "chosen by the search"


@pytest.mark.parametrize(("arguments", "words"), [
    (("--with-baselines",), "give --html"), (("--html", "/no/such/folder/report.html"), "/no/such/folder/report.html")])
def test_a_page_that_cannot_be_is_refused_before_any_work(run, arguments, words):
    code, err = run("plan", *MLP, *arguments)
    assert code == 2 and words in err and "trace" not in err


# -- in a browser -----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def browser():
    driver = shutil.which("chromedriver")
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not driver or not binary:
        pytest.skip("no chromium with chromedriver on this machine (Debian: apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is missing: pip install -e '.[test]'")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    root = ["--no-sandbox"] if os.getuid() == 0 else []
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", *root):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    found.set_script_timeout(60)
    yield found
    found.quit()


class Shown:
    """A report in the browser."""

    def __init__(self, browser, url: str) -> None:
        self.browser, self.url = browser, url

    def open(self, width: int = 1366, height: int = 768, scheme: str = "light") -> "Shown":
        cdp = self.browser.execute_cdp_cmd
        cdp("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        cdp("Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600})
        self.browser.get(self.url)
        return self

    def js(self, code: str, *arguments: object):
        return self.browser.execute_script(f"return {code}", *arguments)

    def press(self, selector: str, key: str) -> None:
        """Put the keyboard's focus on an element, as Tab would, and press a key."""
        self.browser.execute_script("document.querySelector(arguments[0]).focus()", selector)
        self.browser.switch_to.active_element.send_keys(key)

    def column(self, section: str, number: int) -> list[str]:
        return self.js("[...document.querySelectorAll(arguments[0])].map(td => td.textContent)",
                       f"#{section} .table > .scroll > table > tbody > tr > td:nth-child({number})")

    @property
    def errors(self) -> list[str]:
        return [e["message"] for e in self.browser.get_log("browser") if e["level"] != "INFO"]


@pytest.fixture(scope="module")
def show(browser, tmp_path_factory):
    def make(text: str) -> Shown:
        path = tmp_path_factory.mktemp("report") / "report.html"
        path.write_text(text)
        return Shown(browser, path.as_uri())

    return make


@pytest.fixture(scope="module")
def full(show):
    plan = timed_plan()
    return show(page(plan, comparison(plan), prices()))


def test_opens_without_errors_and_shows_every_section(full):
    full.open()
    ids = full.js("[...document.querySelectorAll('main > section')].map(s => s.id)")
    assert ids == ["summary", "baselines", "layers", "memory", "collectives", "changes", "prices", "ops", "fallbacks", "notes", "search"]
    assert full.js("[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))") == ids
    assert full.js("performance.getEntriesByType('resource').length") == 0
    for words in ("h100-dgx", "1.00 s", "15.0 GiB", "DDP", "2.00 x", "the vocabulary is split over tp", "aten.cumsum.default"):
        assert words in full.js("document.body.innerText"), words
    assert full.errors == []


def test_a_plan_with_little_in_it_opens_too(show):
    plan = sample_plan(collectives=(), fallbacks=(), copies=(), layouts=(), notes=(), timings={}, ops={}, bound_s=0.0, gap=math.inf)
    shown = show(page(plan)).open()
    assert "no rank talks to another" in shown.js("document.body.innerText")
    assert shown.errors == []


def played(plan: Plan) -> Simulation:
    """A step of one second on two ranks."""
    spans = tuple(Span(stream, name, begin, end, what, {"window": "forward"}) for stream, name, begin, end, what in (
        ("compute", "mm_0", 0.0, 0.4, "op"), ("compute", "mm_1", 0.4, 0.5, "op"), ("tp", f"all_reduce {NASTY}", 0.5, 0.8, "communication"),
        ("compute", f"wait for all_reduce {NASTY}", 0.5, 0.8, "idle"), ("compute", NASTY, 0.8, 1.0, "update")))
    return Simulation(plan, Conditions(), False, 1.0, 0.7, 0.0, 0, 1.0, (Idle("exposed", "all_reduce", NASTY, 0.3, 0.3),), (Share("compute", "", NASTY, 0.7, 2),),
                      (LinkUse(NASTY, 1e6, 0.2, 0.2),), (Size("all_reduce", "tp", "forward", 1 << 19, 1, 1 << 20),), (), 0.5, 0.5,
                      lambda: (Track(0, f"rank 0 {NASTY}", spans, 2),), traffic=(LinkTime(NASTY, 0.25, (0.0, 0.0, 1e6, 0.0), (0.0, 0.0, 0.8, 0.0)),))


def test_a_simulated_step_is_drawn(show):
    plan = timed_plan()
    shown = show(page(plan, simulated=played(plan))).open()
    drawn = "[...document.querySelectorAll('#simulated svg title')].map(t => t.textContent)"
    assert shown.js(drawn) == ["2 x compute, forward: 500 ms from 0", "optimizer, forward: 200 ms from 800 ms", "all_reduce, forward: 300 ms from 500 ms",
                               f"{NASTY}, 500 ms: 3.81 MiB/s, 80.0 %"]
    words = shown.js("document.querySelector('#simulated').innerText")
    assert all(word in words for word in ("the machine is as its profile says", "AllReduce", "Critical path", "Links, per rank", NASTY))
    assert shown.js("window.hacked === undefined") and shown.errors == []


def test_names_stay_text(show):
    shown = show(page(nasty_plan(), comparison(nasty_plan()))).open()
    shown.js("document.querySelectorAll('details').forEach(d => { d.open = true })")
    shown.js("document.querySelectorAll('td.more button').forEach(b => b.click())")
    time.sleep(0.2)  # an image that fails to load would report it by now
    assert shown.js("[window.hacked === undefined, document.images.length, document.scripts.length]") == [True, 0, 2]
    assert NASTY in shown.js("document.title") and NASTY in shown.js("document.querySelector('h1').textContent")
    assert shown.js("document.querySelector('#notes li').textContent") == NASTY
    assert shown.errors == []


def test_columns_sort_by_value_with_the_keyboard(full):
    full.open()
    seconds = [row[7] for row in document(timed_plan())["tables"]["collectives"]["rows"]]
    head = "#collectives th:nth-child(9)"
    assert full.js("document.querySelector(arguments[0]).textContent", head) == "time"
    for key, order, wanted in (("\ue007", "descending", sorted(seconds, reverse=True)), (" ", "ascending", sorted(seconds))):
        full.press(f"{head} button", key)
        assert full.js("document.querySelector(arguments[0]).getAttribute('aria-sort')", head) == order
        assert full.column("collectives", 9) == [quantities.seconds(s) for s in wanted]
    assert full.js("document.querySelectorAll('#collectives th[aria-sort=none]').length") == 9


def test_a_row_opens_its_calls_and_closes(full):
    full.open()
    full.press("#collectives td.more button", "\ue007")
    assert full.js("document.querySelector('#collectives td.more button').getAttribute('aria-expanded')") == "true"
    assert full.js("document.querySelectorAll('#collectives tr.inner tbody tr').length") == LAYERS
    full.press("#collectives td.more button", "\ue007")
    assert full.js("document.querySelectorAll('#collectives tr.inner').length") == 0


def test_modules_open_with_the_keyboard_and_all_at_once(full):
    full.open()
    closed = "document.querySelectorAll('.tree details:not([open])').length"
    before = full.js(closed)
    full.press(".tree details:not([open]) > summary", "\ue007")
    assert full.js(closed) == before - 1
    full.js("[...document.querySelectorAll('#layers button')].find(b => b.textContent === 'Expand all').click()")
    assert full.js(closed) == 0


def test_drawings_show_the_share_of_the_first_rank(full):
    """[dp, -] with dp=2: half of dim 0 is held, one cut."""
    full.open()
    drawn = "[...document.querySelectorAll('.drawing svg')].find(s => s.getAttribute('aria-label') === '8 x 64, [dp, -]')"
    whole, held = full.js(f"[...({drawn}).querySelectorAll('rect')].map(r => r.getAttribute('height') * r.getAttribute('width'))")
    assert held == pytest.approx(whole / 2)
    assert full.js(f"({drawn}).querySelectorAll('line').length") == 1


def test_the_slider_tells_moments_and_starts_at_the_peak(full):
    full.open()
    told = "document.querySelector('.moment').innerText"
    assert "Peak: 14.0 GiB" in full.js(told) and "op_2" in full.js(told)
    full.press("#memory input[type=range]", "\ue012")  # left
    assert "op_1" in full.js(told) and "12.5 GiB" in full.js(told)
    full.js("document.querySelector('#memory button').click()")
    assert "op_2" in full.js(told)


def test_dark_follows_the_system_and_the_button(full):
    light = "getComputedStyle(document.body).backgroundColor"
    day = full.open().js(light)
    night = full.open(scheme="dark").js(light)
    assert day != night
    full.press("#theme", "\ue007")
    assert full.js(light) == day


def test_nothing_is_wider_than_a_phone(full):
    full.open(390, 844)
    full.js("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert full.js("document.documentElement.scrollWidth") == 390


def test_filter_leaves_matching_rows(show):
    first = timed_plan().collectives[0]
    many = tuple(replace(first, module=f"part_{chr(97 + i)}", nbytes=i + 1) for i in range(20))
    shown = show(page(timed_plan(collectives=many))).open()
    assert len(shown.column("collectives", 4)) == 20
    shown.press("#collectives input[type=search]", "part_c")
    assert shown.column("collectives", 4) == ["part_c"]


def test_numbers_read_as_in_the_terminal(full):
    full.open()
    values = [0, 1, 3e-9, 4.2e-5, 0.00123, 0.9999, 1.005, 2.675, 2.5, 1.125, 12.25, 120.0, 1023, 1536, 1152, 1.375 * GIB, 70 * GIB, 2**41, None]
    for name, same in (("seconds", quantities.seconds), ("size", quantities.size)):
        assert full.js(f"arguments[0].map({name})", values) == [same(v) for v in values]


def test_the_schedule_of_a_pipeline_is_drawn(show):
    shown = show(page(sample_pipeline())).open()
    ids = shown.js("[...document.querySelectorAll('main > section')].map(s => s.id)")
    assert ids[:2] == ["summary", "stages"]
    boxes = "[...document.querySelectorAll('.schedule svg rect.work')]"
    assert shown.js(f"{boxes}.length") == 2 * 4 * 2 + 2  # two ranks, forward and backward of four micro-batches, and the end of each rank's step
    assert shown.js("[...document.querySelectorAll('.schedule svg text.number')].map(t => t.textContent).join('')").count("0") == 4
    widths = shown.js(f"{boxes}.map(r => r.getBoundingClientRect().width)")
    titles = shown.js(f"{boxes}.map(r => r.textContent)")
    assert titles[0] == "stage 0, micro-batch 0: forward, 1.00 s from 0"
    backward = next(w for w, t in zip(widths, titles, strict=True) if t.startswith("stage 1, micro-batch 0: backward"))
    assert backward == pytest.approx(4 * widths[0], rel=0.05)
    assert "[dp, -, -]" in shown.js("document.body.innerText") and shown.column("ranks", 1) is not None
    assert shown.errors == []


def test_the_schedule_of_a_pipeline_fits_a_phone(show):
    shown = show(page(sample_pipeline("zb1p"))).open(390, 844)
    assert shown.js("document.documentElement.scrollWidth") == 390 and shown.errors == []


@pytest.mark.parametrize("width", [390, 1200])
def test_names_of_narrow_windows_do_not_cover_each_other(show, width):
    """The end of a step and the update are a few moments of hundreds."""
    plan = sample_plan()
    (stage,) = plan.stages
    names = ["start"] + ["forward"] * 60 + ["backward"] * 90 + ["weight"] * 2 + ["end"] * 2 + ["update"]
    moments = tuple(Moment(t, name, "compute", "op", "", "", tuple(2**30 for _ in CATEGORIES)) for t, name in enumerate(names))
    shown = show(page(replace(plan, stages=(replace(stage, timeline=moments),)))).open(width, 900)
    boxes = shown.js("[...document.querySelectorAll('.memory .chart .window')].map(e => { const r = e.getBoundingClientRect(); "
                     "return [e.textContent, r.left, r.right, r.top, r.bottom]; })")
    assert [b[0] for b in boxes] == list(dict.fromkeys(names))
    for i, (a, *one) in enumerate(boxes):
        assert one[1] <= width, a
        for b, *other in boxes[i + 1:]:
            apart = one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] + 1 or other[3] <= one[2] + 1
            assert apart, f"{a} covers {b}"
    assert shown.errors == []

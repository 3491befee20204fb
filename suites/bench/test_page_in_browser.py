"""The page in a real browser without a network: drawn whole, no errors, and it can be used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.bench.report.page import ReportInput, write_report
from suites.bench.report.pages import EVIL, given, history, step

RANKS = 3
LACKING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"no browser: {' and '.join(LACKING)} not on PATH")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, offline."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(shutil.which("chromedriver"))))
    driver.set_script_timeout(60)
    driver.execute_cdp_cmd("Network.enable", {})
    cut = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", cut)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The browser on a page that has loaded."""
    folder = tmp_path_factory.mktemp("report")
    plan = f"plans/{EVIL}.toml"
    one = given(RANKS, stored=history(4, plan=plan), plan=plan)
    spans = {"bucketed": one.spans["bucketed"], "unbucketed": step(RANKS, 2_000_000, module=EVIL, buckets=3)}
    paths = write_report(folder, [ReportInput(one.record, one.stored, spans)])
    load(browser, paths[1])
    return browser


def load(browser: Any, path: Path) -> None:
    browser.get(path.as_uri())
    until(browser, "return document.documentElement.dataset.ready === 'yes'")


def until(browser: Any, script: str, *arguments: Any) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 60).until(lambda driver: driver.execute_script(script, *arguments))


def figure_range(page: Any, name: str) -> list[float]:
    script = "return document.querySelector(`[data-figure=${arguments[0]}]`).layout.xaxis.range"
    return [float(end) for end in page.execute_script(script, name)]


def test_it_asks_for_nothing_but_itself_and_has_no_errors(page: Any) -> None:
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert asked
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.get_log("browser") == []


@pytest.mark.parametrize(("name", "spans"), [("step-0", step(RANKS)), ("step-1", step(RANKS, buckets=3))])
def test_every_span_is_drawn(page: Any, name: str, spans: tuple[object, ...]) -> None:
    script = "return document.querySelectorAll(`[data-figure=${arguments[0]}] .bars .point path`).length"
    assert page.execute_script(script, name) == len(spans)


def test_samples_have_a_box_for_each_run_and_variant(page: Any) -> None:
    assert page.execute_script("return document.querySelectorAll('[data-figure=samples-0] path.box').length") == 3 * 5


def test_names_run_no_script_and_are_shown(page: Any) -> None:
    assert page.execute_script("return document.querySelectorAll('img').length") == 0
    assert page.execute_script("return document.querySelector('h1').textContent") == f"plans/{EVIL}.toml"


def test_a_label_at_the_pointer_says_the_entry(page: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    figure = page.find_element(By.CSS_SELECTOR, "[data-figure=step-0]")
    place = page.execute_script(
        "return [...arguments[0].querySelectorAll('.bars .point path')]"
        ".find((bar) => getComputedStyle(bar).fill === 'rgb(228, 50, 43)')",
        figure,
    )
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", place)
    ActionChains(page).move_to_element(place).perform()
    text = until(page, "return document.querySelector('[data-figure=step-0] .hoverlayer .hovertext')?.textContent")
    assert "all_gather layers.0" in text
    assert "wait: exposed, forward" in text
    assert "4.0 KiB" in text


def test_a_variant_is_taken_away_and_the_other_gets_its_room(page: Any) -> None:
    box = "document.querySelector('.switch input[value=unbucketed]')"
    both = figure_range(page, "step-0")
    page.execute_script(f"{box}.click()")
    hidden = "return [...document.querySelectorAll('[data-variant=unbucketed]')].map((part) => part.offsetHeight)"
    assert page.execute_script(hidden) == [0, 0]
    until(page, "return document.querySelector('[data-figure=step-0]').layout.xaxis.range[1] < arguments[0]", both[1])
    page.execute_script(f"{box}.click()")
    until(page, "return document.querySelector('[data-figure=step-0]').layout.xaxis.range[1] === arguments[0]", both[1])
    assert all(height > 100 for height in page.execute_script(hidden))
    assert figure_range(page, "step-1") == both


def test_both_steps_are_zoomed_together(page: Any) -> None:
    page.execute_script("Plotly.relayout(document.querySelector('[data-figure=step-0]'), {'xaxis.range': [2, 5]})")
    until(page, "return document.querySelector('[data-figure=step-1]').layout.xaxis.range[1] === 5")
    assert figure_range(page, "step-1") == [2, 5]


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_text_is_legible_on_a_dark_and_on_a_light_page(page: Any, scheme: str) -> None:
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    until(page, "return matchMedia(`(prefers-color-scheme: ${arguments[0]})`).matches", scheme)
    light_text = (
        "const [text, ground] = [document.querySelector('[data-figure=step-0] .ytick text'), document.body]"
        ".map((one, i) => getComputedStyle(one)[i ? 'backgroundColor' : 'fill'].match(/\\d+/g).slice(0, 3)"
        ".reduce((sum, part) => sum + Number(part), 0));"
        "return text - ground"
    )
    want = "> 300" if scheme == "dark" else "< -300"
    until(page, f"{light_text.replace('return text - ground', f'return text - ground {want}')}")


def test_no_button_hands_the_figure_to_a_server(page: Any) -> None:
    titles = page.execute_script("return [...document.querySelectorAll('.modebar-btn')].map((one) => one.dataset.title)")
    assert set(titles) == {"Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}


def test_the_policy_refuses_what_would_come_from_elsewhere(page: Any) -> None:
    refused = page.execute_async_script(
        "const done = arguments[0];"
        "document.addEventListener('securitypolicyviolation', (event) => done(event.effectiveDirective), {once: true});"
        "fetch('https://elsewhere.invalid/').catch(() => {});"
    )
    assert refused == "connect-src"

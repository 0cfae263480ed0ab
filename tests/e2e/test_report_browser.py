"""The report and the dashboard in a real browser: Debian's Chromium, headless."""

from __future__ import annotations

import json
import shutil
from contextlib import closing

import pytest
from history_kit import disturbed, eventful, line, steps

from elasticdl.cli.commands.look import LiveBoard, LiveServer
from elasticdl.job.facts import Facts
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.report.page import page_data, report
from tests.waiting import wait_until

webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium: apt install chromium chromium-driver")
PATIENCE = 60.0
RANGE = "new Date(document.querySelector('#curves')._fullLayout.xaxis.range[0] + 'Z').getTime()"
OFF = ("gpu", "quic", "background-networking", "component-update", "sync", "dev-shm-usage")
FLAGS = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in OFF)]
NASTY = (
    "</script><script>document.title='hit'</script><img src=x onerror=\"document.title='hit'\">&lt;b&gt;'\u2028`${1}"
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Browser:
    """One page of it, with what it has asked for and complained of."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, url, *, width=1280):
        metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        self.driver.get(url)
        self.until("document.documentElement.dataset.drawn")
        return self

    def ask(self, expression):
        return self.driver.execute_script(f"return {expression}")

    def until(self, expression):
        return wait_until(lambda: self.ask(expression), lambda: f"{expression}; {self.complaints()}", PATIENCE)

    def complaints(self):
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "DEBUG"]

    def requests(self):
        """Addresses that it has asked for, but for what stands in the page itself."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("data:", "blob:", "chrome:"))]

    def drag(self, selector, by):
        element = self.driver.find_element("css selector", selector)
        actions = webdriver.ActionChains(self.driver).scroll_to_element(element).move_to_element(element)
        actions.click_and_hold().move_by_offset(by // 2, 0).move_by_offset(by // 2, 0).release().perform()


@pytest.fixture
def browser(chromium):
    return Browser(chromium)


def write(folder, lines):
    path = folder / "job.html"
    path.write_text(report(page_data(Facts("j").read(lines).conclude())), encoding="utf-8")
    return path.as_uri()


def open_all(browser):
    browser.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    browser.until("document.querySelector('#workers tbody')")


def test_a_report_draws_everything_and_asks_for_nothing(browser, tmp_path):
    url = write(tmp_path, [*eventful(), line(117, "warning", message="long" * 300)])
    browser.open(url)
    assert (browser.requests(), browser.complaints()) == ([url], [])
    assert browser.ask("document.querySelector('#sentence').textContent").startswith("47 %")
    for parts, number in {"#lanes .bars path": 24, "#curves .scatterlayer .trace": 6, "#speedup tbody tr": 2}.items():
        assert browser.ask(f"document.querySelectorAll('{parts}').length") == number
    for place, text in {"pauses": "failure", "troubles": "train.py:31 in load", "warnings": "take care"}.items():
        assert text in browser.ask(f"document.querySelector('#{place}').textContent")
    ground = browser.ask("getComputedStyle(document.body).backgroundColor")
    browser.ask("document.querySelector('#theme').click()")
    assert browser.ask("getComputedStyle(document.body).backgroundColor") != ground
    open_all(browser)
    for table, rows in {"workers": 5, "worlds": 5, "points": 8, "evaluations": 1}.items():
        browser.until(f"document.querySelectorAll('#{table} tbody tr').length === {rows}")
    for width in (390, 1280):
        open_all(browser.open(url, width=width))
        assert browser.ask("document.documentElement.scrollWidth") <= width, "it has to be scrolled sideways"


def test_what_a_job_says_is_text_wherever_it_stands(browser, tmp_path):
    said = json.dumps(NASTY)
    lines = [each.replace('"j"', said).replace('"killed"', said).replace('"h"', said) for each in eventful()]
    browser.open(write(tmp_path, [*lines, line(117, "warning", message=NASTY), line(117, NASTY)]))
    open_all(browser)
    assert browser.ask("document.title") == f"{NASTY} · elasticdl"
    assert browser.ask("document.querySelector('#job').textContent") == NASTY
    assert browser.ask("document.querySelectorAll('img').length") == 0
    browser.ask("Plotly.Fx.hover('lanes', [{curveNumber: 3, pointNumber: 0}])")
    assert browser.complaints() == []


# ---- live ----


class Growing:
    """A job of this machine that somebody writes."""

    namespace = ""

    def __init__(self, path, name):
        self.path, self.name = path, name

    def journal(self):
        yield from self.path.read_text().splitlines()

    def status(self):
        return pb.JobStatus(phase="running", reason="", max_workers=2, elapsed=5)


@pytest.mark.slow
def test_the_list_leads_to_the_page_of_a_job_which_follows_it_and_keeps_zoom_and_focus(browser, tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text("\n".join(disturbed()[:9]) + "\n")
    jobs = [Growing(path, "j"), Growing(path, NASTY)]
    with closing(LiveServer(LiveBoard(lambda warn: list(jobs)))) as server:
        browser.open(server.url())
        assert browser.until("document.querySelectorAll('#jobs tbody a').length") == 2
        assert browser.ask("document.querySelectorAll('img').length") == 0
        browser.ask("document.querySelectorAll('#jobs tbody a')[1].click()")
        browser.until("document.querySelector('#job')?.textContent === 'j'")
        assert browser.ask("document.referrer") == ""
        browser.until("document.querySelectorAll('#pauses tbody tr').length === 0")
        whole = browser.until("document.querySelector('#curves').layout?.xaxis.range")
        browser.drag("#curves .nsewdrag", by=300)
        zoomed = browser.until(f"{RANGE} > {whole[0]} + 100 && {RANGE}")
        browser.ask("document.querySelector('#by-step').focus()")
        with path.open("a") as file:
            file.write("\n".join(disturbed()[9:-1]) + "\n" + steps(95, 750, 49, world=2) + "\n")
        browser.until("document.querySelectorAll('#pauses tbody tr').length === 1")
        browser.until("document.querySelector('#facts').textContent.includes('750')")
        assert (browser.ask(RANGE), browser.ask("document.activeElement.id")) == (zoomed, "by-step")
        assert all(url.startswith(server.url()) for url in browser.requests())
        assert browser.complaints() == []
        # What was shown stays when its job or the dashboard is gone.
        del jobs[1]
        browser.until("document.querySelector('#notice').textContent.includes('not there any more')")
        browser.open(server.url("", "j"))
        server.close()
        browser.until("document.querySelector('#notice').textContent.includes('does not answer')")
        browser.until("document.querySelector('#notice button')")
        assert browser.ask("document.querySelector('#facts').textContent")

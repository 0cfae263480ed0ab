"""The report and the dashboard in a real browser: Debian's Chromium, headless."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import closing

import pytest
from history_kit import disturbed, formed, line, steps, storm

from elasticdl.cli.commands.look import LiveBoard, LiveServer
from elasticdl.job.facts import Facts
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.report.page import page_data, report

webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no Chromium: apt-get install chromium chromium-driver"
)
PATIENCE = 60.0
AXIS = "document.querySelector('#curves')._fullLayout.xaxis"
RANGE = f"new Date({AXIS}.range[0] + 'Z').getTime()"
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
        deadline = time.monotonic() + PATIENCE
        while not (found := self.ask(expression)):
            assert time.monotonic() < deadline, f"{expression} did not become true; {self.complaints()}"
            time.sleep(0.05)
        return found

    def complaints(self):
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "DEBUG"]

    def requests(self):
        """Addresses that it has asked for, but for what stands in the page itself."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("data:", "blob:", "chrome:"))]

    def press(self, key):
        webdriver.ActionChains(self.driver).send_keys(key).perform()

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


def everything():
    """A journal in which all kinds of things happen."""
    *lines, end = disturbed()
    metrics = {"accuracy": 0.5, "loss": 1.5, "auc": None}
    curve = [{"workers": n, "speedup": n, "measured": n == 1} for n in (1, 2)]
    lines += [
        line(91, "evaluation", step=701, epoch=1, seconds=1, metrics=metrics, worker=0),
        line(92, "worker_slow", worker=0, host="h", phase="data", factor=2.5, seconds=0.1),
        line(92, "worker_stuck", worker=0, host="h", seconds=31, where="train.py:31 in load", stack=["a"]),
        line(93, "warning", message="take care"),
        line(93, "advice", text="4 workers would do", curve=curve),
        line(94, "checkpoint", step=701, path="x", seconds=1, held=0.1),
    ]
    return [*lines, end]


def open_all(browser):
    browser.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    browser.until("document.querySelector('#workers tbody')")


def test_a_report_draws_everything_and_asks_for_nothing(browser, tmp_path):
    url = write(tmp_path, [*everything(), line(100, "warning", message="long" * 300)])
    browser.open(url)
    assert browser.requests() == [url]
    assert browser.complaints() == []
    assert browser.ask("document.querySelector('#sentence').textContent").startswith("7")
    assert browser.ask("document.querySelectorAll('#lanes .bars path').length") >= 2
    assert browser.ask("document.querySelectorAll('#curves .scatterlayer .trace').length") == 7
    assert browser.ask("document.querySelector('#pauses tbody').textContent.includes('failure')")
    assert "train.py:31 in load" in browser.ask("document.querySelector('#troubles').textContent")
    assert "take care" in browser.ask("document.querySelector('#warnings').textContent")
    assert browser.ask("document.querySelectorAll('#speedup tbody tr').length") == 2
    ground = browser.ask("getComputedStyle(document.body).backgroundColor")
    browser.ask("document.querySelector('#theme').click()")
    assert browser.ask("getComputedStyle(document.body).backgroundColor") != ground
    open_all(browser)
    for table, rows in {"workers": 2, "worlds": 2, "points": 2, "evaluations": 1}.items():
        browser.until(f"document.querySelectorAll('#{table} tbody tr').length === {rows}")
    assert "checkpoint" in browser.until("document.querySelector('#marks tbody')?.textContent")
    for width in (390, 1280):
        open_all(browser.open(url, width=width))
        assert browser.ask("document.documentElement.scrollWidth") <= width, "it has to be scrolled sideways"


def test_the_keyboard_reaches_every_control_and_shows_where_it_is(browser, tmp_path):
    browser.open(write(tmp_path, everything()))
    controls = "[...document.querySelectorAll('a[href], button, summary, [tabindex=\"0\"]')].filter((each) => each.checkVisibility() && !each.closest('svg'))"
    wanted = browser.ask(f"{controls}.length")
    assert wanted >= 12
    browser.ask(f"{controls}.forEach((each, place) => {{ each.dataset.place = place; }})")
    reached, unseen = set(), []
    for _ in range(wanted):
        browser.press("\ue004")  # Tab
        reached.add(browser.ask("document.activeElement.dataset.place"))
        if browser.ask("getComputedStyle(document.activeElement).outlineStyle") == "none":
            unseen.append(browser.ask("document.activeElement.outerHTML"))
    assert reached == {str(place) for place in range(wanted)}
    assert unseen == []
    browser.ask("document.querySelector('#by-step').focus()")
    browser.press("\ue007")  # Enter
    assert browser.ask("document.querySelector('#by-step').getAttribute('aria-pressed')") == "true"
    browser.until("document.querySelector('#curves').layout.xaxis.title.text === 'step'")


SUMMER = 6_195_600  # the clocks' change in Berlin of March 2027, after STARTED


def test_times_of_day_are_right_before_and_after_clocks_change(browser, tmp_path):
    """What Plotly draws counts, not what it was given: it does with times what it likes."""
    lines = [line(SUMMER - 1200, "job_started", job="j", workers="1"), formed(SUMMER - 1140, 1, [0], 0)]
    lines += [steps(SUMMER + minute * 60, 100 + minute, 1) for minute in (-15, -10, 10, 15)]
    browser.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Europe/Berlin"})
    browser.open(write(tmp_path, [*lines, line(SUMMER + 1200, "job_finished", phase="succeeded", steps=200)]))
    curve = (
        "document.querySelector('#curves').calcdata[0].map((point) => new Date(point.x).toISOString().slice(11, 16))"
    )
    assert browser.ask(curve) == ["01:45", "01:50", "03:10", "03:15"]
    assert [text[11:16] for text in browser.ask(f"{AXIS}.range")] == ["01:40", "03:20"]
    browser.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})


def test_what_a_job_says_is_text_wherever_it_stands(browser, tmp_path):
    said = json.dumps(NASTY)
    lines = [each.replace('"j"', said).replace('"killed"', said).replace('"h"', said) for each in everything()]
    lines += [line(100, "warning", message=NASTY), line(100, NASTY)]
    browser.open(write(tmp_path, lines))
    open_all(browser)
    assert browser.ask("document.title") == f"{NASTY} · elasticdl"
    assert browser.ask("document.querySelector('#job').textContent") == NASTY
    assert browser.ask("document.querySelectorAll('img').length") == 0
    browser.ask("Plotly.Fx.hover('lanes', [{curveNumber: 3, pointNumber: 0}])")
    assert browser.complaints() == []


def test_a_thousand_worlds_of_five_hundred_workers_are_drawn_at_once(browser, tmp_path):
    url = write(tmp_path, storm(worlds=1000, workers=500))
    browser.open(url)
    assert browser.complaints() == []
    assert browser.ask("document.querySelectorAll('#lanes .bars path').length") > 1000
    assert browser.ask("document.querySelectorAll('#pauses tbody tr').length") == 100
    browser.ask("document.querySelector('#pauses').parentElement.nextElementSibling.click()")
    assert browser.ask("document.querySelectorAll('#pauses tbody tr').length") == 999


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


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "journal.jsonl"
    made.write_text("\n".join(disturbed()[:9]) + "\n")
    return made


def serving(jobs):
    """The dashboard of these jobs, also as they change."""
    return closing(LiveServer(LiveBoard(lambda warn: list(jobs))))


def test_the_page_of_a_job_follows_it_and_keeps_zoom_and_focus(browser, path):
    with serving([Growing(path, "j")]) as server:
        browser.open(server.url("", "j"))
        browser.until("document.querySelectorAll('#pauses tbody tr').length === 0")
        whole = browser.ask("document.querySelector('#curves').layout.xaxis.range")
        browser.drag("#curves .nsewdrag", by=300)
        zoomed = browser.until(f"{RANGE} > {whole[0]} + 100 && {RANGE}")
        browser.ask("document.querySelector('#by-step').focus()")
        with path.open("a") as file:
            file.write("\n".join(disturbed()[9:-1]) + "\n" + steps(95, 750, 49, world=2) + "\n")
        browser.until("document.querySelectorAll('#pauses tbody tr').length === 1")
        browser.until("document.querySelector('#facts').textContent.includes('750')")
        assert browser.ask(RANGE) == zoomed
        assert browser.ask("document.activeElement.id") == "by-step"
        assert all(url.startswith(server.url()) for url in browser.requests())
        assert browser.complaints() == []


def test_the_list_leads_to_the_jobs_whatever_they_are_called(browser, path):
    with serving([Growing(path, "j"), Growing(path, NASTY)]) as server:
        browser.open(server.url())
        assert browser.until("document.querySelectorAll('#jobs tbody a').length") == 2
        browser.ask("document.querySelectorAll('#jobs tbody a')[1].click()")
        browser.until("document.querySelector('#job')?.textContent === 'j'")
        assert browser.ask("document.referrer") == ""
        assert browser.ask("document.querySelectorAll('img').length") == 0
        assert browser.complaints() == []


def test_what_was_shown_stays_when_its_job_or_the_dashboard_is_gone(browser, path):
    jobs = [Growing(path, "j"), Growing(path, "k")]
    with serving(jobs) as server:
        browser.open(server.url("", "j"))
        del jobs[0]
        browser.until("document.querySelector('#notice').textContent.includes('not there any more')")
        assert browser.ask("document.querySelector('#facts').textContent")
        browser.open(server.url("", "k"))
        server.close()
        browser.until("document.querySelector('#notice').textContent.includes('does not answer')")
        browser.until("document.querySelector('#notice button')")
        assert browser.ask("document.querySelector('#facts').textContent")

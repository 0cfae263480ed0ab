"""The report: what the page is given, that it holds whatever a job is called, and the commands that make it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time

import pytest
from history_kit import STARTED, disturbed, formed, line, steps, storm

from elasticdl.cli.__main__ import main
from elasticdl.cli.commands.look import LiveServer, with_status
from elasticdl.common.errors import UserError
from elasticdl.job.facts import Facts, TimeUse
from elasticdl.job.jobdir import create_job_dir, write_aside
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.report.page import MARK, NAMES, as_json, duration, live_page, page_data, percent, report, sentence

NASTY = "</script><script>alert(1)</script>&amp;\"'\u2028<!--"
PATIENCE = 20.0


def read(lines):
    history = Facts("j")
    history.read(lines)
    return history.conclude()


# ---- words ----


def test_the_sentence_names_the_greatest_losses():
    said = "79 % of the 1 min 40 s was training; 11 % went to failures; 10 % went to starting."
    assert sentence(read(disturbed())) == said
    assert sentence(read([])) == "Nothing has happened yet."
    assert set(NAMES) == set(TimeUse)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (0.0123, "0.012 s"), (12.3, "12 s"), (60, "1 min"), (3725, "1 h 2 min"), (90_000, "1 d 1 h")],
)
def test_durations_and_shares_are_said_as_people_do(seconds, said):
    assert duration(seconds) == said
    assert [percent(share) for share in (0, 1, 0.001, 0.999, 0.126)] == ["0 %", "100 %", "< 1 %", "> 99 %", "13 %"]


# ---- the page ----


def test_the_page_is_one_file_that_may_load_nothing():
    page = report(page_data(read(disturbed())))
    assert MARK in page[:200]
    assert "default-src 'none'" in page
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", markup)
    assert "url(" not in markup
    json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert len(page.encode()) < 1_200_000, "most of it is the library that draws"
    assert len(as_json(page_data(read(storm(worlds=300, workers=200))))) < 1_000_000


def test_what_a_job_says_is_never_markup():
    told = [*disturbed(), line(100, "warning", message=NASTY)]
    told = [each.replace('"killed"', json.dumps(NASTY)).replace('"j"', json.dumps(NASTY)) for each in told]
    page = report(page_data(read(told)))
    assert NASTY not in page
    assert "<script>alert" not in page
    assert "\u2028" not in re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert "<script>alert" not in live_page(NASTY, "job", "")
    assert json.loads(as_json({"x": NASTY})) == {"x": NASTY}
    report(page_data(read([line(0, "job_started", job="\ud800")]))).encode()


COMPARED = line(40, "epoch_finished", epoch=0, step=1300, loss=0.5, compared=1280, compared_workers=3)


@pytest.mark.parametrize(
    ("lines", "fact", "said"),
    [
        ([*disturbed(), COMPARED], "same state", "on all 3 workers after step 1,280"),
        (disturbed(), "same state", ""),
        (disturbed()[:9], "workers", "2 of 1-2"),
        (disturbed()[:10], "workers", "0 of 1-2"),  # a world that broke has none
    ],
)
def test_a_fact_is_said_if_it_is_known(lines, fact, said):
    assert page_data(read(lines))["facts"][fact] == said


def test_numbers_that_a_browser_can_t_count_with_are_left_out():
    huge = 10**400  # which JSON may have, and is infinite to a browser
    odd = [line(86, "worker_started", worker=huge, host="h"), formed(87, 3, [0, huge, True], 700)]
    # Samples by hardly any time at all are no rate.
    odd += [steps(88, 701, 1, world=3, seconds=5e-324)]
    data = page_data(read([*disturbed()[:-3], *odd]))
    assert [lane[0] for lane in data["lanes"]] == [0, 1]
    assert [world[1] for world in data["worlds"]] == [2, 1, 1]
    assert (data["facts"]["samples/s"], data["points"]["speed"][-1]) == ("", None)
    assert as_json([float("nan"), float("inf")]) == "[null,null]"


# ---- the command report ----


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    job = create_job_dir("j")
    job.journal.write_text("\n".join(disturbed()) + "\n")
    job.status.write_text('{"job_name": "j", "phase": "succeeded", "step": 800}')
    return tmp_path


def test_a_report_is_written_into_the_current_folder_and_over_another_report(home, capsys):
    for _ in range(2):
        assert main(["report", "j"]) == 0
    assert capsys.readouterr().out == "j.html\nj.html\n"
    assert MARK in (home / "j.html").read_text()
    (home / "sent.jsonl").write_text("\n".join(disturbed())[:-10])  # by somebody
    assert main(["report", "sent.jsonl", "--out", "other.html"]) == 0
    assert "damaged lines of the journal" in (home / "other.html").read_text()
    assert sorted(path.name for path in home.iterdir()) == ["home", "j.html", "other.html", "sent.jsonl"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["report", "nobody"], "there is no job nobody"),
        (["report", "./none.jsonl"], "the journal none.jsonl can't be read: No such file or directory"),
        (["report", "j", "--out", "notes.txt"], "notes.txt is there, and is no report of a job"),
        (["report", "./notes.txt"], "notes.txt has no entry of a journal"),
        (["report", "j", "--out", "home"], "--out home is no plain file"),
        (["report", "j", "--out", "no/j.html"], "--out no/j.html can't be written: No such file or directory"),
        (["report", "j", "--out", "x" * 300], "can't be written: File name too long"),
        (["report", "j", "--out", "/dev/null"], "--out /dev/null is no plain file"),
        (["dashboard", "nobody"], "there is no job nobody"),
        (["dashboard", "--port", "70000"], "--port"),
        (["dashboard", "--namespace", "lab"], "no cluster is configured"),
    ],
)
def test_a_mistake_is_one_line(home, capsys, argv, said):
    (home / "notes.txt").write_text("mine\n")
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert (home / "notes.txt").read_text() == "mine\n"


def test_what_is_written_aside_goes_through_no_link_and_leaves_nothing_behind(tmp_path):
    mine, target = tmp_path / "mine", tmp_path / "j.html"
    mine.write_text("mine")
    (tmp_path / f".j.html.{os.getpid()}").symlink_to(mine)
    write_aside(target, "a report")
    assert (mine.read_text(), target.read_text()) == ("mine", "a report")
    with pytest.raises(UnicodeEncodeError):
        write_aside(target, "\ud800")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j.html", "mine"]


def test_a_port_that_is_taken_is_one_line(home, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["dashboard", "--port", str(port)]) == 2
    said = f"elasticdl dashboard: --port {port} is taken; give another, or leave it out for a free one\n"
    assert capsys.readouterr().err == said
    assert not [thread for thread in threading.enumerate() if "board" in thread.name]


def test_ctrl_c_ends_the_dashboard_and_once_more_at_once(home, monkeypatch, capsys):
    """The second, as while a master does not answer."""

    def press_ctrl_c():
        os.kill(os.getpid(), signal.SIGINT)

    class Pressed(LiveServer):
        def url(self, *job):
            threading.Timer(0.3, press_ctrl_c).start()
            return super().url(*job)

    monkeypatch.setattr("elasticdl.cli.commands.look.LiveServer", Pressed)
    assert main(["dashboard", "j"]) == 0
    assert "/job/-/j/\nuntil Ctrl-C" in capsys.readouterr().out
    close = LiveServer.close

    def hang(server):
        close(server)
        press_ctrl_c()
        time.sleep(PATIENCE)

    monkeypatch.setattr(Pressed, "close", hang)
    began = time.monotonic()
    assert main(["dashboard"]) == 130
    assert time.monotonic() - began < PATIENCE / 2


class Ending:
    """A job that ends between two looks."""

    name, namespace = "j", ""

    def status(self):
        self.asked = True
        raise UserError("job j is not running: it has succeeded")

    def journal(self):
        assert self.asked, "else it might tell less than the status"
        yield from disturbed()


def test_a_job_that_ends_meanwhile_is_reported(home, monkeypatch):
    monkeypatch.setattr("elasticdl.cli.commands.look.find", lambda name, given: Ending())
    assert main(["report", "j"]) == 0


def test_what_the_status_knows_of_a_job_that_is_lost_is_told():
    waits = line(95, "phase", phase="waiting", reason="0 of 1 workers")

    def found(*more, now=500, **status):
        return with_status(Facts().read([*disturbed()[:-1], *more]), pb.JobStatus(**status), STARTED + now)

    lost = found(phase="lost", reason="its master is gone without a word", now=1e6)
    assert (lost.phase, lost.until) == ("lost", STARTED + 90)
    assert found(phase="running").until == STARTED + 500
    assert found(phase="failed").over
    assert found(waits, phase="starting").phase == "waiting"
    assert found(waits, phase="waiting", reason="no master").reason == "no master"

"""What others see of a job: metrics, and who may have them."""

import asyncio
import json
import re
import ssl
import time
from datetime import UTC, datetime
from http.client import HTTPSConnection
from pathlib import Path

import pytest
import yaml
from history_kit import SPENT, STARTED, eventful, storm
from prometheus_client import CollectorRegistry, generate_latest

from elasticdl.cli.cluster_run import make_parts
from elasticdl.common.certificates import issue
from elasticdl.common.credentials import Role, TlsFolder
from elasticdl.job.messages import Pace, StepReport
from elasticdl.job.spec import JobSpec
from elasticdl.kube import manifests, names
from elasticdl.master.shell.journal_file import StepLog
from elasticdl.master.shell.metrics import MetricsServer, Prometheus
from elasticdl.master.shell.observers import LiveFacts
from elasticdl.proto import elasticdl_pb2 as pb

DOCS = Path(__file__).resolve().parents[2] / "docs" / "observability"
STATUS = pb.JobStatus(
    phase="running", min_workers=2, max_workers=4, step=7, samples=224, samples_per_second=31.5, loss=0.25, epoch=3,
    workers=[
        pb.WorkerStatus(worker_id=number, state=state, rank=rank)
        for number, state, rank in ((0, "member", 1), (2, "member", 0), (3, "pending", -1))
    ],
)  # fmt: skip
HISTORY = (
    ("worker_launched", {"worker": 0, "reason": "asked for", "replaces": False}),
    ("worker_launched", {"worker": 2, "reason": "worker 1 was preempted", "replaces": True}),
    ("worker_left", {"worker": 1, "cause": "preempted", "reason": "was preempted", "code": 137}),
    ("world_formed", {"world": 2, "members": [2, 0], "step": 5, "reason": "worker 1 was preempted"}),
    ("pause", {"kind": "failure", "notice": 0.0, "drain": 0.1, "rendezvous": 0.2, "init": 0.3, "sync": 0.1,
               "first_step": 0.2, "total": 0.9, "worker": 0}),
    ("master_restarted", {"world": 2, "members": [2, 0], "missing": [], "seconds": 0.5}),
    *(("worker_slow", {"worker": each, "host": "n", "phase": "data", "factor": 2.5}) for each in (1, 2, 3)),
    ("worker_recovered", {"worker": 2}),
    ("worker_left", {"worker": 3, "cause": "killed"}),
)  # fmt: skip


def collected(metrics):
    registry = CollectorRegistry()
    registry.register(metrics)
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


class Metrics(Prometheus):
    """They hear of the journal as a master's do."""

    def __init__(self, past=(), clock=time.time):
        self.facts = LiveFacts(clock)
        self.facts.read(map(json.dumps, past))
        self.recorded = self.facts.recorded
        super().__init__(lambda: STATUS, self.facts, None, clock)

    def collect(self):
        return asyncio.run(self.told())


@pytest.fixture
def metrics():
    made = Metrics()
    for event, fields in HISTORY:
        made.recorded(event, fields)
    log = StepLog(lambda event, fields: None, made.recorded, lambda: 1000.0, 0.0)
    log.trained((StepReport(1, 0, 0.25, 32, 0.125, 0.1, 1, 32, False),), Pace())
    log.flush()
    return made


WANTED = {
    'job_phase{phase="running"}': 1, 'job_phase{phase="waiting"}': 0, 'workers{state="member"}': 2, "world_size": 2,
    'workers{state="pending"}': 1, "workers_wanted_min": 2, "workers_wanted_max": 4, "step": 7, "steps_total": 1,
    "samples_per_second": 31.5, "loss": 0.25, "learning_rate": 0.125, "epoch": 3, "workers_launched_total": 2,
    "worker_restarts_total": 1, 'workers_left_total{cause="preempted"}': 1, "worlds_formed_total": 1,
    "master_restarts_total": 1, 'pause_seconds_sum{kind="failure",phase="total"}': 0.9,
    'pause_seconds_count{kind="failure",phase="rendezvous"}': 1, 'worker_slow{host="n",phase="data",worker="1"}': 2.5,
}  # fmt: skip


def test_what_is_so_at_the_moment_is_that_of_the_status_and_what_has_happened_is_counted(metrics):
    found = collected(metrics)
    assert {name: found[f"elasticdl_{name}"] for name in WANTED} == WANTED
    assert sum(name.startswith("elasticdl_worker_slow") for name in found) == 1
    metrics.recorded("master_restarted", {"world": 2, "members": [1], "missing": [], "seconds": 0.5})
    assert "worker_slow{" not in " ".join(collected(metrics)), "a new master knows of none"


@pytest.mark.parametrize("past", [0, 30])
@pytest.mark.parametrize("lines", [eventful(), storm(worlds=12, workers=4)], ids=["eventful", "storm"])
def test_counters_never_fall_and_tell_where_the_time_went(lines, past):
    """Else Prometheus takes one for one that began anew; nor does another master begin at 0."""
    told, now, before = [*map(json.loads, lines)], [STARTED], {}
    metrics = Metrics(told[:past], clock=lambda: now[0])
    for entry in [*told[past:], {"event": "warning", "time": now[0]}]:  # of a clock that was set back
        now[0] = entry.pop("time")
        metrics.recorded(entry.pop("event"), entry)
        found = collected(metrics)
        counters = {name: found[name] for name in found if re.search("_(total|sum|count)({|$)", name)}
        assert {name for name, value in before.items() if counters[name] < value} == set()
        before = counters
    if lines == eventful():
        left = {cause: before[f'elasticdl_workers_left_total{{cause="{cause}"}}'] for cause in ("drained", "killed")}
        assert (before["elasticdl_steps_total"], left) == (85, {"drained": 1, "killed": 1})
        spent = [value for name, value in before.items() if re.match("elasticdl_(productive|lost)_seconds_total", name)]
        assert sum(SPENT.values()) - 10 < sum(spent) <= sum(SPENT.values()), "of the newest it is not known yet"
        assert before['elasticdl_lost_seconds_total{cause="waiting"}'] == SPENT["waiting"]


# ---- the Grafana dashboard, and who collects ----

DASHBOARD = json.loads((DOCS / "grafana_dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_what_there_is_only_in_promql(metrics):
    there = {name.partition("{")[0] for name in collected(metrics)}
    asked = {name for query in QUERIES for name in re.findall(r"elasticdl_\w+", query)}
    assert len(asked) > 16
    assert asked - {"elasticdl_org_job"} <= there
    parse = pytest.importorskip("promql_parser").parse
    for query in QUERIES:
        assert parse(query.replace("$job", "digits").replace("$namespace", "lab"))


def places(content):
    """Of all fields of a dashboard."""
    if isinstance(content, dict):
        return {f"{key}/{rest}" for key, value in content.items() for rest in places(value)} | set(content)
    return {rest for each in content for rest in places(each)} if isinstance(content, list) else {repr(content)}


def test_the_dashboard_says_nothing_that_grafana_does_not_know():
    """What Grafana's own types do not know is gone when they have read and written it."""
    types = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    kept = json.loads(json.dumps(types.Dashboard.from_json(DASHBOARD), cls=encoder.JSONEncoder))
    assert not places(DASHBOARD) - places(kept)


def test_the_service_monitor_finds_the_service_of_a_job():
    monitor = yaml.safe_load((DOCS / "servicemonitor.yaml").read_text())["spec"]
    spec = JobSpec.model_validate({"image": "team/job:1", "job_name": "digits", "num_workers": "2"})
    made = manifests.companions(make_parts(spec, "lab", datetime.now(UTC)))
    (service,) = [each for each in made if each["kind"] == "Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["tlsConfig"]["serverName"] == "master.digits.elasticdl"
    assert endpoint["tlsConfig"]["keySecret"]["name"] == names.tls_name("digits", Role.METRICS)


@pytest.fixture
def papers(tmp_path):
    folders = {}
    for job in ("digits", "other"):
        for role, files in issue(job, datetime.now(UTC)).items():
            folders[job, role] = TlsFolder(tmp_path / job / role)
            files.write(folders[job, role].path)
    return folders


def test_every_certificate_of_the_job_that_may_call_gets_metrics_and_strangers_not_even_an_answer(papers, metrics):
    server = MetricsServer(("127.0.0.1", 0), papers["digits", Role.MASTER], metrics)

    def get(own):
        context = ssl.create_default_context(cafile=papers["digits", Role.METRICS].ca)
        context.check_hostname = False
        if own:
            context.load_cert_chain(papers[own].certificate, papers[own].key)
        connection = HTTPSConnection("127.0.0.1", server.server_port, timeout=10, context=context)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read()
        finally:
            connection.close()

    try:
        for role in (Role.METRICS, Role.OWNER, Role.WORKER):
            assert b"elasticdl_world_size 2.0\n" in get(("digits", role))
        for stranger in (None, ("other", Role.METRICS), ("digits", Role.MASTER)):
            with pytest.raises(OSError):  # noqa: PT011 - reset, closed or an alert of TLS, as it happens
                get(stranger)
    finally:
        server.close()

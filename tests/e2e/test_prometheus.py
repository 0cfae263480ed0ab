"""A real Prometheus collects a job's metrics as `docs/observability` has it, and tells of the job what its report tells."""

from __future__ import annotations

import base64
import json
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_kit import STEPS_PER_EPOCH, WatchedJob, wait_for

from elasticdl.common.process_group import tethered
from elasticdl.job.facts import Facts, TimeUse
from tests.cluster.build import PROMETHEUS, require
from tests.cluster.recipes import Unavailable

pytest_plugins = ["tests.cluster.fixtures"]
pytestmark = pytest.mark.slow

OBSERVABILITY = Path(__file__).resolve().parents[2] / "docs" / "observability"
NAME, NAMESPACE = "seen", "lab"
METRICS_PORT = 50002
# More steps than are made before the test lets the job go.
EPOCHS = 10_000
# An entry may be in the journal a moment before or after it is counted, and a survivor's word comes late.
TOLERANCE = 2.0
# Nothing of the job was so: no worker was slow. The loss and the learning rate are those of a worker that tells them.
EMPTY = {"elasticdl_worker_slow"}


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        require([PROMETHEUS])
    except Unavailable as error:
        pytest.skip(f"no Prometheus: {error}")
    return PROMETHEUS.folder() / "prometheus"


class Collector:
    """Prometheus, collecting from one master."""

    def __init__(self, program: Path, folder: Path, target: str, keys: Path) -> None:
        self._log = folder / "prometheus.log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        configuration = folder / "prometheus.yml"
        configuration.write_text(yaml.safe_dump(scrape_configuration(target, keys)))
        command = [str(program), f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                tethered([*command, f"--web.listen-address=127.0.0.1:{port}"]), stdout=log, stderr=subprocess.STDOUT
            )

    def describe(self) -> str:
        return self._log.read_text()[-3000:]

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The samples of an instant query; empty while Prometheus gets ready."""
        url = f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                said = json.load(answer)
        except OSError:
            assert self.process.poll() is None, self.describe()
            return []
        assert said["status"] == "success", said
        return said["data"]["result"]

    def number(self, query: str) -> float:
        (sample,) = self.ask(query)
        return float(sample["value"][1])


def scrape_configuration(target: str, keys: Path) -> dict[str, Any]:
    """What the Prometheus operator makes of the ServiceMonitor of the documents, as far as it concerns one master."""
    monitor = yaml.safe_load((OBSERVABILITY / "servicemonitor.yaml").read_text().replace("digits", NAME))["spec"]
    (endpoint,) = monitor["endpoints"]
    tls = endpoint["tlsConfig"]
    files = {"ca_file": tls["ca"]["secret"], "cert_file": tls["cert"]["secret"], "key_file": tls["keySecret"]}
    labels = {label.replace(".", "_").replace("/", "_"): NAME for label in monitor["targetLabels"]}
    job = {
        "job_name": NAME,
        "scheme": endpoint["scheme"],
        "metrics_path": endpoint["path"],
        "scrape_interval": "1s",  # a test has not as long as a person
        "tls_config": {
            "server_name": tls["serverName"],
            **{option: str(keys / secret["name"] / secret["key"]) for option, secret in files.items()},
        },
        # The namespace is what the operator adds by itself.
        "static_configs": [{"targets": [target], "labels": {"namespace": NAMESPACE, **labels}}],
    }
    return {"scrape_configs": [job]}


@pytest.fixture
def job(cluster, namespace, tmp_path) -> Iterator[WatchedJob]:
    folder = tmp_path / "job"
    folder.mkdir()
    watched = WatchedJob(cluster, namespace, NAME, folder, EPOCHS)
    watched.submit("--num_workers", "1-2", seconds_per_step=0.1)
    yield watched
    watched.elasticdl.delete(NAME)


@pytest.fixture
def prometheus(job, program, tmp_path) -> Iterator[Collector]:
    job.wait_for_step(1)
    (master,) = job.running("master")
    keys = tmp_path / "keys"
    secret: Any = job.core.read_namespaced_secret(f"{NAME}-metrics-tls", job.namespace)
    (keys / secret.metadata.name).mkdir(parents=True)
    for key, value in secret.data.items():
        (keys / secret.metadata.name / key).write_bytes(base64.b64decode(value))
    collector = Collector(program, tmp_path, f"{master.status.pod_ip}:{METRICS_PORT}", keys)
    yield collector
    collector.process.kill()
    collector.process.wait()


def test_prometheus_tells_what_the_report_tells(job, prometheus):
    """Of a job that has lost a worker, and while it trains on."""
    of_job = f'{{elasticdl_org_job="{NAME}"}}'
    both = f"elasticdl_world_size{of_job} == 2"
    wait_for("metrics of both workers", lambda: prometheus.ask(both), prometheus.describe)
    process = job.process(job.workers()[0])
    process.send_signal(signal.SIGKILL)
    lost = f'elasticdl_lost_seconds_total{{cause="failure",elasticdl_org_job="{NAME}"}} > 0'
    wait_for("a failure that was paid for", lambda: prometheus.ask(lost), job.describe)
    back = f"{both} and elasticdl_worker_restarts_total{of_job} >= 1"
    wait_for("the world with a replacement", lambda: prometheus.ask(back), job.describe)
    step = job.step()
    job.wait_for_step(step + 2 * STEPS_PER_EPOCH)
    wait_for("those steps", lambda: prometheus.ask(f"elasticdl_steps_total{of_job} > {step}"), prometheus.describe)

    at, collected = spent(prometheus, of_job)
    time.sleep(TOLERANCE)  # what was so then is in the journal now
    history = Facts()
    history.read(json.dumps(entry) for entry in job.elasticdl.journal(NAME) if entry["time"] <= at)
    history.advance(at)
    told = history.spent.wall
    assert collected.keys() == {str(doing) for doing in TimeUse}
    for doing, seconds in told.items():
        assert collected[str(doing)] == pytest.approx(seconds, abs=TOLERANCE), (doing, collected, told)
    assert collected["productive"] > 0
    assert collected["failure"] > 0

    dashboard = json.loads((OBSERVABILITY / "grafana_dashboard.json").read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries = [each.replace("$job", NAME).replace("$namespace", NAMESPACE) for each in targets]
    empty = {query.partition("{")[0] for query in queries if not prometheus.ask(query)}
    assert empty == EMPTY


def spent(prometheus: Collector, of_job: str) -> tuple[float, dict[str, float]]:
    """Where the time went, by what, and when that was collected."""
    query = f'{{__name__=~"elasticdl_(productive|lost)_seconds_total",elasticdl_org_job="{NAME}"}}'
    while True:
        before = prometheus.number(f"timestamp(elasticdl_productive_seconds_total{of_job})")
        found = prometheus.ask(query)
        if prometheus.number(f"timestamp(elasticdl_productive_seconds_total{of_job})") == before:
            return before, {each["metric"].get("cause", "productive"): float(each["value"][1]) for each in found}

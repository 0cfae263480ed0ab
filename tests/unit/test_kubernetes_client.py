"""What is asked of an API server, without one: a path, a query, a body, and what becomes of a refusal."""

from __future__ import annotations

import io
import socket

import pytest
import urllib3
from kubernetes.client import ApiClient, Configuration

from elasticdl.kube import job_pods
from elasticdl.kube.client import Client, NoAnswerError, NotDoneError, path_of
from elasticdl.kube.kubeconfig import ClusterTarget, load


@pytest.fixture
def server(monkeypatch):
    """Its answers, one after the other."""
    answers = []

    def request(*_, **__):
        status, body = answers.pop(0)
        return urllib3.HTTPResponse(io.BytesIO(body), status=status, preload_content=False)

    monkeypatch.setattr(urllib3.PoolManager, "request", request)
    return answers


@pytest.fixture
def lab():
    return Client(ApiClient(Configuration(host="https://cluster")), "lab")


def test_what_somebody_typed_is_one_name_and_no_other_path():
    assert path_of("Pod", "lab", "w-0", "log") == "/api/v1/namespaces/lab/pods/w-0/log"
    assert path_of("Job", "a/b", "../x?y=1") == "/apis/batch/v1/namespaces/a%2Fb/jobs/..%2Fx%3Fy%3D1"


@pytest.mark.parametrize(
    ("status", "body", "error", "line"),
    [
        (403, b'{"message": "exceeded quota"}', NotDoneError, "exceeded quota"),
        (401, b"", NotDoneError, "the cluster at https://cluster does not know you: log in anew"),
        (403, b'{"message": "User x cannot patch resource jobs"}', NotDoneError, "you may not patch jobs in "),
        (429, b'{"message": "busy"}', NoAnswerError, "the cluster at https://cluster failed: busy"),
        (500, b"oh\nno", NoAnswerError, "the cluster at https://cluster failed: 500 "),
        (200, b"<html>", NoAnswerError, "the cluster at https://cluster does not answer: "),
    ],
)
def test_a_refusal_is_one_line_and_says_what_to_do(server, lab, status, body, error, line):
    server.append((status, body))
    with pytest.raises(error) as refused:
        lab.patch("Job", "x", {"spec": {}})
    assert str(refused.value).startswith(line)
    assert status == 200 or refused.value.status == status
    assert "\n" not in str(refused.value)


def test_what_is_not_there_is_no_failure(server, lab):
    server += [(404, b'{"message": "no"}')] * 2
    assert (lab.find("Job", "x"), lab.delete("Job", "x")) == (None, False)


def test_a_port_leads_at_first_to_the_master_that_is_known_and_from_then_on_to_whichever_there_is(lab, monkeypatch):
    reached, first, second = [], *({"metadata": {"name": name}} for name in ("first", "second"))

    def connect(_, pod):
        reached.append(pod)
        raise OSError

    monkeypatch.setattr(job_pods, "is_running", lambda _: True)
    monkeypatch.setattr(job_pods, "find_master", lambda *_: second)
    monkeypatch.setattr(job_pods._Forward, "_connect", connect)
    with job_pods.forwarded(lab, "j", first) as address:
        for _ in range(2):
            host, _, port = address.partition(":")
            with socket.create_connection((host, int(port)), 10) as connection:
                assert connection.recv(1) == b""
    assert reached == ["first", "second"]


KUBECONFIG = """
clusters: [{name: c, cluster: {server: "https://cluster"}}]
users: [{name: u, user: {token: t}}]
contexts:
- {name: lab, context: {cluster: c, user: u, namespace: mine}}
- {name: plain, context: {cluster: c, user: u}}
current-context: lab
"""


@pytest.mark.parametrize(("context", "namespace"), [("", "mine"), ("lab", "mine"), ("plain", "default")])
def test_a_context_brings_its_namespace(tmp_path, context, namespace):
    (tmp_path / "config").write_text(KUBECONFIG)
    place, configuration = ClusterTarget(context=context, file=str(tmp_path / "config")), Configuration()
    assert load(configuration, place, own_account=False) == namespace
    assert configuration.host == "https://cluster"

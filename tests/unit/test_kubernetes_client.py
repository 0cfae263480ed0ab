"""What is asked of an API server, without one: a path, a query, a body, and what becomes of a refusal."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import urllib3
from kubernetes.client import ApiClient, Configuration

from elasticdl.kube.client import MERGE, Client, NoAnswerError, NotDoneError, path_of


@pytest.fixture
def server(monkeypatch):
    """What reaches the connection pool is in ``calls``; ``answers`` come back one after the other."""
    found = SimpleNamespace(calls=[], answers=[])

    def request(_, method, url, **options):
        found.calls.append((method, url, options))
        status, body = found.answers.pop(0)
        return urllib3.HTTPResponse(io.BytesIO(body), status=status, preload_content=False)

    monkeypatch.setattr(urllib3.PoolManager, "request", request)
    return found


@pytest.fixture
def lab():
    configuration = Configuration(host="https://cluster")
    configuration.api_key["BearerToken"] = "Bearer secret"
    return Client(ApiClient(configuration), "lab")


def test_what_somebody_typed_is_one_name_and_no_other_path():
    assert path_of("Pod", "lab", "w-0", "log") == "/api/v1/namespaces/lab/pods/w-0/log"
    assert path_of("Job", "a/b", "../x?y=1") == "/apis/batch/v1/namespaces/a%2Fb/jobs/..%2Fx%3Fy%3D1"


def test_a_query_has_the_servers_names_and_the_token_goes_along(server, lab):
    server.answers.append((200, b'{"items": []}'))
    query = {"label_selector": "a=b,c", "watch": True, "timeout_seconds": 5}
    assert lab.open("GET", "/x", "look", query).data == b'{"items": []}'
    ((method, url, options),) = server.calls
    assert (method, url) == ("GET", "https://cluster/x?labelSelector=a%3Db%2Cc&watch=true&timeoutSeconds=5")
    assert options["headers"]["authorization"] == "Bearer secret"
    assert (options["timeout"].connect_timeout, options["timeout"].read_timeout) == (5.0, 30.0)


def test_a_patch_is_merged_and_nothing_in_it_is_left_out(server, lab):
    server.answers.append((200, b"{}"))
    lab.patch("ConfigMap", "x", {"data": {"gone": None}})
    ((_, _, options),) = server.calls
    assert (options["body"], options["headers"]["Content-Type"]) == ('{"data": {"gone": null}}', MERGE)


@pytest.mark.parametrize(
    ("status", "body", "error", "line"),
    [
        (403, b'{"message": "exceeded quota"}', NotDoneError, "exceeded quota"),
        (401, b"", NotDoneError, "the cluster at https://cluster does not know you: log in anew"),
        (
            403,
            b'{"message": "User x cannot patch resource jobs"}',
            NotDoneError,
            "you may not patch jobs in namespace lab: ",
        ),
        (429, b'{"message": "busy"}', NoAnswerError, "the cluster at https://cluster failed: busy"),
        (500, b"oh\nno", NoAnswerError, "the cluster at https://cluster failed: 500 "),
        (200, b"<html>", NoAnswerError, "the cluster at https://cluster does not answer: "),
    ],
)
def test_a_refusal_is_one_line_and_says_what_to_do(server, lab, status, body, error, line):
    server.answers.append((status, body))
    with pytest.raises(error) as refused:
        lab.patch("Job", "x", {"spec": {}})
    assert str(refused.value).startswith(line)
    assert status == 200 or refused.value.status == status
    assert "\n" not in str(refused.value)


def test_what_is_not_there_is_no_failure(server, lab):
    server.answers += [(404, b'{"message": "no"}')] * 2
    assert (lab.find("Job", "x"), lab.delete("Job", "x")) == (None, False)

"""What is asked of an API server, without one: a path, a query, a body, and what becomes of a refusal."""

from __future__ import annotations

import io

import pytest
import urllib3
from kubernetes import client

from elasticdl.common.kubernetes_requests import MERGE, Request, namespace_path, path_of, send

LIMITS = (1.0, 2.0)


@pytest.fixture
def asked(monkeypatch):
    """What reaches the connection pool; ``answers`` come back one after the other."""
    calls, answers = [], []

    def request(_, method, url, **options):
        calls.append((method, url, options))
        status, body = answers.pop(0)
        return urllib3.HTTPResponse(io.BytesIO(body), status=status, preload_content=False)

    monkeypatch.setattr(urllib3.PoolManager, "request", request)
    return calls, answers


@pytest.fixture
def api():
    configuration = client.Configuration(host="https://cluster")
    configuration.api_key["BearerToken"] = "Bearer secret"
    return client.ApiClient(configuration)


def test_paths():
    assert path_of("Pod", "lab") == "/api/v1/namespaces/lab/pods"
    assert path_of("Job", "lab", "digits-master") == "/apis/batch/v1/namespaces/lab/jobs/digits-master"
    assert path_of("Pod", "lab", "w-0", "log") == "/api/v1/namespaces/lab/pods/w-0/log"
    assert namespace_path("lab") == "/api/v1/namespaces/lab"


def test_what_somebody_typed_is_one_name_and_no_other_path():
    assert path_of("Job", "a/b", "../x?y=1") == "/apis/batch/v1/namespaces/a%2Fb/jobs/..%2Fx%3Fy%3D1"
    assert namespace_path("../nodes") == "/api/v1/namespaces/..%2Fnodes"


def test_a_query_has_the_servers_names_and_the_token_goes_along(asked, api):
    calls, answers = asked
    answers.append((200, b'{"items": []}'))
    query = {"label_selector": "a=b,c", "watch": True, "timeout_seconds": 5}
    assert send(api, Request("GET", "/x", LIMITS, query)).data == b'{"items": []}'
    ((method, url, options),) = calls
    assert (method, url) == ("GET", "https://cluster/x?labelSelector=a%3Db%2Cc&watch=true&timeoutSeconds=5")
    assert options["headers"]["authorization"] == "Bearer secret"
    assert (options["timeout"].connect_timeout, options["timeout"].read_timeout) == LIMITS


def test_a_patch_is_merged_and_nothing_in_it_is_left_out(asked, api):
    calls, answers = asked
    answers.append((200, b"{}"))
    send(api, Request("PATCH", "/x", LIMITS, {}, {"data": {"gone": None}}, MERGE))
    ((_, _, options),) = calls
    assert (options["body"], options["headers"]["Content-Type"]) == ('{"data": {"gone": null}}', MERGE)


def test_a_refusal_is_raised_with_what_the_server_says(asked, api):
    _, answers = asked
    answers.append((403, b'{"message": "not you"}'))
    with pytest.raises(client.ApiException) as refused:
        send(api, Request("DELETE", "/x", LIMITS, {}))
    assert (refused.value.status, refused.value.body) == (403, '{"message": "not you"}')

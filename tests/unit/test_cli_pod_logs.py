"""Whose lines they are in the log of a pod in which several workers ran."""

import pytest
from test_cli_printed import OUT, Pods, shown_of

from elasticdl.cli.cluster import pod_logs
from elasticdl.common.errors import UserError


def said(second, text):
    return f"1970-01-01T00:00:{second:02}Z 1970-01-01 00:00:{second:02},000 w-0 INFO elasticdl.places.agent: {text}\n"


# One pod, in which worker 2 has followed worker 0, which was cut short in the middle of a line.
SHARED = (
    said(1, "starting worker 0")
    + "1970-01-01T00:00:02Z a\n"
    + f"1970-01-01T00:00:04Z half{said(4, 'worker 0 has ended')[21:]}"
)
SHARED += said(5, "starting worker 2") + "1970-01-01T00:00:06Z b\n"


def test_workers_that_ran_in_one_pod_one_after_another_are_told_apart():
    assert list(pod_logs.read_logs(Pods(SHARED), "job", 0)) == ["a"]
    assert list(pod_logs.read_logs(Pods(SHARED), "job", 2)) == ["b"]
    every = list(pod_logs.read_logs(Pods(SHARED), "job", None))
    assert [line.partition(" ")[0] for line in every] == ["place-0", "worker-0", "place-0", "place-0", "worker-2"]
    with pytest.raises(UserError, match="job job has no logs of worker 7; it has logs of place-0, worker-0, worker-2"):
        list(pod_logs.read_logs(Pods(SHARED), "job", 7))
    shown = shown_of(Pods(SHARED), "0", (1.0, [0]), (5.5, [2]))
    assert shown.texts[OUT] == "a\nb\n"

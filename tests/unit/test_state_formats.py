"""A job's state is read by later versions: the one kept here was written by the first version with this format."""

import asyncio
import json
from functools import partial
from pathlib import Path

from refusal_kit import refused
from test_kubernetes_state import FakeApi, Holder

from elasticdl.job.messages import Member
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.values import Crashes, Outcome, Phase, WorkerState, World
from elasticdl.master.core.worker_record import JobSnapshot, Snapshot, TrainingSnapshot, UnwrittenSteps, WorkerSnapshot
from elasticdl.master.shell.state_config_map import MEMORY, pack

KEPT = Path(__file__).with_name("job_state_format_1.json")
TRAINING = TrainingSnapshot(
    epochs_done=1, begun=True, epoch=1, epoch_steps=4, total_epochs=3, step=24, total_steps=60, samples=384, loss=0.5,
    metrics={"accuracy": 0.75}, collective="horovod", counted=24, epoch_loss=(32.0, 64), newest=(3, 24), compared_step=20,
    compared_workers=2,
)  # fmt: skip
JOB = JobSnapshot(
    limits=WorkerRange(minimum=1, maximum=4),
    next_id=5,
    finished=(1,),
    together=True,
    world=World(3, (Member(2, "10.0.0.2", 20, True, 1, 3), Member(3, "10.0.0.3", 0, False)), "worker 3 came"),
    phase=Phase.STOPPING,
    outcome=Outcome(Phase.STOPPED, "elasticdl stop", checkpoint=True),
    training=TRAINING,
    workers=(
        WorkerSnapshot(2, WorkerState.MEMBER, "wanted", world_version=3, ready=True),
        WorkerSnapshot(4, WorkerState.PENDING, "0/2 nodes are available", failure="its node was lost"),
    ),
    crashes=Crashes(at_start=1, in_training=2, steps_since=7),
    target=2,
)
WRITTEN = Snapshot(JOB, 1.7e9, 2, {2: 17, 4: 1}, UnwrittenSteps({"step": 24, "steps": 4}, 0.25), journal_bytes=3830)


def kept():
    api = FakeApi()
    api.there = json.loads(KEPT.read_text())["digits-state"]
    return api


def test_the_state_of_the_first_version_is_taken_over(tmp_path):
    api = kept()
    bench = Holder(api, tmp_path, "next")
    assert asyncio.run(bench.store.load()) == WRITTEN
    newest = bench.journal.read_text()  # the rest is in an object that is not read any more
    assert [json.loads(line)["message"] for line in newest.splitlines()][-12:] == [f"no. {n}" for n in range(48, 60)]
    assert api.state.status == '{"phase": "running"}'


def test_what_is_written_is_read_and_fields_that_are_missing_have_their_defaults():
    assert Snapshot.from_json(WRITTEN.to_json()) == WRITTEN
    least = {"format": 2, "job": {"limits": {"minimum": 1, "maximum": 4}}, "started": 5.0}
    assert Snapshot.from_json(json.dumps(least)) == Snapshot(JobSnapshot(WorkerRange(minimum=1, maximum=4)), 5.0)


def test_what_is_no_snapshot_or_of_another_format_is_refused_in_one_line():
    other = [json.dumps({**json.loads(kept().state.memory), "format": written}) for written in (3, 1, None, "2")]
    for text in ("", "[]", '{"format": 2, "job": 1}', '{"format": 2}', "no", *other):
        words = "not .*: another version of elasticdl wrote it" if text in other else "snapshot|Expecting value"
        refused(words, partial(Snapshot.from_json, text), ValueError)


def _everywhere(content):
    """With a field that nobody knows wherever there are fields."""
    if isinstance(content, list):
        return [_everywhere(each) for each in content]
    if not isinstance(content, dict):
        return content
    numbered = all(key.isdigit() for key in content)  # a mapping by worker has no fields
    free = numbered or content.keys() <= {"accuracy"} or ("steps" in content and "step" in content)
    return {**{key: _everywhere(value) for key, value in content.items()}, **({} if free else {"new": {"a": [1]}})}


def test_fields_of_later_versions_are_ignored():
    content = _everywhere(json.loads(kept().state.memory))
    assert Snapshot.from_json(json.dumps(content)) == WRITTEN


def test_a_state_without_a_journal_of_its_own_is_taken_over(tmp_path):
    api = FakeApi()
    api.there["binaryData"] = {MEMORY: pack(kept().state.memory.encode())}
    bench = Holder(api, tmp_path, "next")
    assert asyncio.run(bench.store.load()) == WRITTEN
    assert bench.journal.read_text() == ""

"""The job's books: journal, running numbers, summary, TensorBoard."""

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from elasticdl.job.facts import Facts
from elasticdl.job.journal import dump_entry, read_journal
from elasticdl.job.shared_values import Pace
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.job_core import Job
from elasticdl.master.shell.convert import to_event, to_status
from elasticdl.master.shell.journal_file import Journal
from elasticdl.master.shell.sessions import Sessions
from elasticdl.master.shell.summary import summarize
from elasticdl.master.shell.tensorboard import TensorBoard
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.instructions import EndJob, Phase
from elasticdl.master.state.training import Training
from elasticdl.master.state.values import Settings
from elasticdl.proto import elasticdl_pb2 as pb


def progress(*steps, epoch=0, total=100):
    reports = tuple(e.StepReport(step, epoch, 1 / step, 32, 0.1, 0.05, 1, 32 * step, False) for step in steps)
    return e.ProgressReported(0, reports, total, 2)


def test_steps_that_are_trained_again_or_were_never_reported_count_once():
    training = Training()
    training.report(progress(1, 2, 3), 1.0)
    training.report(progress(2, 3, 6), 2.0)
    assert (training.step, training.samples, training.loss) == (6, 192, 1 / 6)
    (record,) = training.report(progress(7, epoch=1), 3.0)[1]
    assert record.fields["loss"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 6) / 4)


def test_a_new_rank_0_may_tell_again_what_its_predecessor_has_told():
    def told(steps, world):
        reports = tuple(e.StepReport(step, 0, 1.0, 32, 0.1, 0.05, world, 0, False) for step in steps)
        return [step.step for step in training.report(e.ProgressReported(0, reports, 100, 2), 0.0)[0]]

    training = Training()
    assert told([1, 2, 3], world=1) == [1, 2, 3]
    assert told([1, 2, 3, 4, 5], world=1) == [4, 5], "what rank 0 of world 1 had not told before it was killed"
    assert told([6, 7], world=2) == [6, 7]
    assert told([3, 4], world=2) == []
    assert told([3, 4], world=3) == [3, 4], "the state was lost and the steps are trained again"


def test_the_loss_of_an_epoch_is_the_mean_over_its_samples_and_told_with_its_last_step():
    training = Training()

    def report(step, epoch, loss, samples, ends_epoch):
        one = e.StepReport(step, epoch, loss, samples, 0.1, 0.05, 1, 0, ends_epoch)
        return [r.fields for r in training.report(e.ProgressReported(0, (one,), 4, 2), 0.0)[1]]

    assert report(1, 0, 4.0, 30, False) == []
    assert report(2, 0, 2.0, 10, True) == [{"epoch": 0, "step": 2, "loss": 3.5}]
    assert report(3, 1, 1.0, 30, False) == []
    assert report(4, 1, 0.0, 10, True) == [{"epoch": 1, "step": 4, "loss": 0.75}]
    assert training.finish(e.WorkerFinished(0, 4, 2, {})) == []


def test_an_epochs_end_tells_when_the_states_were_last_compared():
    training = Training()
    given = [(1, 3, False), (2, 0, False), (3, 2, False), (4, 0, True)]  # step, compared, ends the epoch
    steps = [e.StepReport(n, 0, 1.0, 8, 0.1, 0.05, 1, 8 * n, ends, compared=workers) for n, workers, ends in given]
    assert training.report(e.ProgressReported(0, tuple(steps[:1]), 4, 1), 0.0)[1] == []
    assert (training.compared_step, training.compared_workers) == (0, 3)
    (record,) = training.report(e.ProgressReported(0, tuple(steps), 4, 1), 1.0)[1]
    assert record.fields == {"epoch": 0, "step": 4, "loss": 1.0, "compared": 2, "compared_workers": 2}
    assert Training.restore(training.snapshot()).compared_workers == 2


def test_epochs_of_which_this_job_has_made_no_step_were_finished_by_another():
    training = Training()
    steps = [
        e.StepReport(31, 1, 2.0, 8, 0.1, 0.05, 1, 248, True)
    ]  # a script that has loaded its own checkpoint of epoch 1
    _, records = training.report(e.ProgressReported(0, tuple(steps), 0, 0), 0.0)
    assert [record.fields for record in records] == [{"epoch": 1, "step": 31, "loss": 2.0}]


def test_a_training_that_ends_without_a_loss_is_complete_and_has_diverged():
    training = Training(loss=1.0, samples=8)
    assert training.completion == "training is complete"
    training.loss = math.nan
    assert training.completion == "training is complete, but has diverged: its last loss is nan"
    assert Training(loss=math.nan).completion == "training is complete"  # the script tells of no loss


def test_a_training_that_has_diverged_is_reported_once_and_stays_valid_json():
    training = Training()
    steps = [
        e.StepReport(n, 0, loss, 8, 0.1, 0.05, 1, 8 * n, n == 3) for n, loss in ((1, 2.0), (2, math.nan), (3, math.inf))
    ]
    _, records = training.report(e.ProgressReported(0, tuple(steps), 3, 1), 0.0)
    assert [record.event for record in records] == ["warning", "epoch_finished"]
    assert "step 2 is nan" in records[0].fields["message"]
    line = dump_entry({"event": "epoch_finished", **records[1].fields, "metrics": {"a": [math.inf, 1.5]}})
    assert json.loads(line, parse_constant=pytest.fail)["metrics"] == {"a": [None, 1.5]}


def test_the_rate_is_of_the_last_seconds_only():
    training = Training()
    assert training.samples_per_second(0.0) == 0.0
    assert training.time_left(0.0) < 0
    for second in range(20):
        training.report(progress(2 * second + 1, 2 * second + 2), float(second))
    assert training.samples_per_second(19.0) == pytest.approx(64.0)
    assert training.time_left(19.0) == pytest.approx(30.0)
    assert training.samples_per_second(60.0) == 0.0


@pytest.mark.parametrize("seconds", [0.1, 2.0, 3.0, 6.0, 30.0, 600.0])
def test_slow_steps_have_a_rate_too(seconds):
    training = Training()
    for step in range(1, 21):
        training.report(progress(step), step * seconds)
        if step > 1:
            assert training.samples_per_second(step * seconds) == pytest.approx(32 / seconds)
            assert training.time_left((step + 0.9) * seconds) == pytest.approx((100 - step) * seconds)
    assert training.samples_per_second(26 * seconds + 60) == 0.0  # it stands still


def test_the_rate_after_a_long_pause_is_that_after_it():
    training = Training()
    for tenth in range(100):
        training.report(progress(tenth + 1), tenth / 10)
    for tenth in range(3):
        training.report(progress(tenth + 101), 100 + tenth / 10)
    assert training.samples_per_second(100.2) == pytest.approx(320)


def test_the_end_of_an_epoch_is_noted_once():
    training = Training()
    assert training.report(progress(1, 2), 0.0)[1] == []
    (record,) = training.report(progress(3, epoch=1), 1.0)[1]
    assert record.fields == {"epoch": 0, "step": 2, "loss": 0.75}
    assert training.report(progress(3, epoch=1), 1.0)[1] == []
    done = e.WorkerFinished(1, 3, 2, {"accuracy": 0.5})
    assert [r.fields["epoch"] for r in training.finish(done)] == [1]
    assert training.finish(done) == []
    assert training.metrics == {"accuracy": 0.5}


def test_a_resumed_job_does_not_claim_the_epochs_before():
    training = Training()
    training.notice(e.NoticeReported(0, "resumed", {"step": 50, "epoch": 3, "samples": 1600}))
    assert (training.step, training.samples) == (50, 1600)
    assert training.report(progress(51, epoch=3), 1.0)[1] == []
    assert (training.step, training.samples, training.epochs_done) == (51, 51 * 32, 3)


def test_a_follower_of_the_journal_sees_all_of_it_once(tmp_path):
    async def run():
        journal = Journal(tmp_path / "journal.jsonl")
        journal.append("worker_ready", {"worker": 0})
        follower = journal.entries(follow=True)
        seen = [json.loads(await anext(follower))]
        journal.append("worker_ready", {"worker": 1})
        journal.close()
        seen += [json.loads(line) async for line in follower]
        assert [entry["worker"] for entry in seen] == [0, 1]
        assert [entry async for entry in journal.entries(follow=True)] == [json.dumps(entry) for entry in seen]

    asyncio.run(run())


def test_a_journal_that_cannot_be_written_is_reported_once_and_stops_nothing(caplog):
    async def run():
        journal = Journal(Path("/dev/full"))
        journal.append("worker_ready", {"worker": 0})
        journal.append("worker_ready", {"worker": 1})

    asyncio.run(run())
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1


def test_the_summary_tells_the_whole_story(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append("world_formed", {"world": 1, "members": [0, 1], "step": 0, "reason": "start", "seconds": 0.1})
    journal.append("world_formed", {"world": 2, "members": [0], "step": 1, "reason": "1 leaves", "seconds": 0.1})
    journal.append("pause", {"world": 2, "worker": 0, "kind": "shrink", "total": 0.2})
    journal.append("world_broken", {"world": 2, "reason": "worker 0 killed"})
    journal.append(
        "advice",
        {"text": "1 worker: a 2nd would ...", "curve": [{"workers": 1, "speedup": 1.0, "low": 0.9, "high": 1.1}]},
    )
    journal.append("decision", {"workers": 1, "reason": "stays at 1"})
    journal.append("job_finished", {"phase": "stopped"})
    journal.close()
    training = Training()
    training.report(progress(1, 2), 11.0)
    training.compared_step, training.compared_workers = 1, 2
    summary = summarize(
        EndJob(Phase.STOPPED, "enough"),
        training,
        Facts.of((tmp_path / "journal.jsonl").read_text().splitlines()).result(),
        5.0,
    )
    first, second, paused, broken, *_ = (entry["time"] for entry in read_journal(tmp_path / "journal.jsonl"))
    of_second = {"version": 2, "members": [0], "reason": "1 leaves", "step": 1, "formed_at": second, "ended_at": broken}
    assert set(summary.pop("time")) == {"wall", "workers"}
    (remark,) = summary.pop("remarks")
    assert remark.startswith("the beginning of the journal is missing")
    assert summary == {
        "status": "stopped",
        "reason": "enough",
        "epochs": 0,
        "steps": 2,
        "samples": 64,
        "metrics": {},
        "collective": "",
        "compared": {"step": 1, "workers": 2},
        "worlds": [
            {"version": 1, "members": [0, 1], "reason": "start", "step": 0, "formed_at": first, "ended_at": second},
            of_second,
        ],
        "pauses": [
            {
                "time": paused, "world": 2, "kind": "shrink", "workers": 1, "total": 0.2, "steps_torn": 0,
                "notice": 0, "drain": 0, "rendezvous": 0, "init": 0, "sync": 0, "first_step": 0,
            }
        ],
        "scaling": {
            "advice": "1 worker: a 2nd would ...",
            "curve": [{"workers": 1, "speedup": 1.0, "low": 0.9, "high": 1.1}],
            "workers": 1,
            "decision": "stays at 1",
        },
        "wall_time": 5.0,
    }  # fmt: skip


def test_scalars_need_no_package():
    heavy = {"torch", "tensorflow", "tensorboardX", "numpy"}
    program = f"import sys, elasticdl.master.shell.tensorboard; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"set()\n"


def test_scalars_reach_tensorboard(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoard(str(tmp_path))
    board.recorded("world_formed", {"members": [0, 1, 2]})
    board.trained(progress(1, 2).steps, Pace())
    board.recorded("pause", {"world": 2, "kind": "grow", "total": 0.25})
    board.recorded("evaluation", {"step": 2, "metrics": {"accuracy": 0.5}})
    board.recorded("evaluation", {"step": 1 << 40, "metrics": {"huge": 1e300, "none": float("nan")}})
    board.close()
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    found = {tag: [(s.step, s.value) for s in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found["loss"] == [(1, 1.0), (2, 0.5)]
    assert found["world_size"] == [(1, 3.0), (2, 3.0)]
    assert found["pause/total"] == [(2, 0.25)]
    assert found["evaluation/accuracy"] == [(2, 0.5)]
    assert found["evaluation/huge"] == [(1 << 40, float("inf"))]
    assert math.isnan(found["evaluation/none"][0][1])


def test_of_a_step_without_samples_no_loss_is_drawn(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoard(str(tmp_path))
    step = e.StepReport(1, 0, 0.0, 0, 0.0, 0.05, 1, 0, False)
    board.trained((step,), Pace())
    board.close()
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["world_size"]


def test_a_tensorboard_folder_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    board = TensorBoard(str(tmp_path / "file" / "below"))
    board.trained(progress(1, 2).steps, Pace())
    board.trained(progress(3).steps, Pace())
    board.close()
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1


def test_entries_of_an_earlier_world_are_never_seen_in_a_later_one():
    sessions = Sessions()
    outboxes = {worker_id: sessions.open(worker_id) for worker_id in (0, 1, 2)}

    def received(worker_id):
        messages = [outboxes[worker_id].waiting.get_nowait() for _ in range(outboxes[worker_id].waiting.qsize())]
        return [m.kv_entry.key for m in messages]

    sessions.begin_world(1, (0, 1))
    sessions.put(0, pb.KvPut(world_version=1, key="a"))
    sessions.put(2, pb.KvPut(world_version=1, key="stranger"))
    sessions.put(1, pb.KvPut(world_version=0, key="old"))
    assert [received(n) for n in range(3)] == [[], ["a"], []]
    sessions.replay(0)
    assert received(0) == ["a"]
    sessions.begin_world(2, (0, 2))
    sessions.put(1, pb.KvPut(world_version=1, key="late"))
    sessions.replay(0)
    sessions.replay(1)
    assert [received(n) for n in range(3)] == [[], [], []]


def notice(event, /, **fields):
    return pb.WorkerMessage(notice=pb.Notice(event=event, fields_json=json.dumps(fields)))


@pytest.mark.parametrize(
    "message",
    [
        pb.WorkerMessage(),
        pb.WorkerMessage(hello=pb.Hello()),
        pb.WorkerMessage(notice=pb.Notice(event="warning", fields_json="[1]")),
        pb.WorkerMessage(notice=pb.Notice(event="warning", fields_json="{")),
        pb.WorkerMessage(pause=pb.Pause(kind="of another kind")),
        notice("job_finished", phase="succeeded"),
        notice("worker_left", worker=1, cause="crashed", reason="so I say"),
        notice("nothing known"),
        notice("exported", path="x", worker=1),
        notice("exported", path="x", time=0),
        notice("exported", path="x", event="job_finished"),
        notice("exported", path=5),
        notice("evaluation", step="many"),
        notice("evaluation", metrics=5),
        notice("evaluation", metrics={"accuracy": "good"}),
        notice("evaluation", metrics={"accuracy": 10**400}),
        notice("resumed", step=2**63),
        notice("evaluation", step=-1, metrics={"loss": 0.5}),  # TensorBoard's file has no way to write it
        notice("resumed", epoch=2**31),
        notice("worker_stuck", where="x", worker=2),
        notice("worker_stuck", stack=["x"] * 101),
        notice("worker_stuck", stack=["x" * 1001]),
        notice("worker_stuck", last_collectives=[5]),
    ],
)
def test_messages_without_meaning_are_refused(message):
    with pytest.raises(ValueError, match=r".+"):
        to_event(0, message)


def test_names_of_files_that_are_no_utf8_can_be_told_on():
    place = b"/home/caf\xe9/train.py:31 in load".decode(errors="surrogateescape")
    told = to_event(3, notice("worker_stuck", where=place, stack=[place], moves=False, collectives=1))
    assert told.fields["where"] == "/home/caf?/train.py:31 in load"
    assert told.fields["stack"] == [told.fields["where"]]


def test_a_notice_is_in_the_journal_as_that_of_the_worker_in_whose_session_it_came():
    told = to_event(3, notice("evaluation", step=2, epoch=0, samples=9, metrics={"loss": math.nan, "accuracy": 1}))
    (record,) = Job(Settings(WorkerRange(minimum=1, maximum=2))).step(told, 0.0)
    assert record == i.Record("evaluation", {**told.fields, "worker": 3})


def test_the_largest_numbers_that_a_worker_may_give_fit_into_the_status():
    job = Job(Settings(WorkerRange(minimum=1, maximum=2)))
    told = notice("resumed", step=2**63 - 1, epoch=2**31 - 1, samples=2**63 - 1)
    job.step(to_event(0, told), 0.0)
    status = to_status("job", job, 0.0, 1.0)
    assert (status.step, status.epoch) == (2**63 - 1, 2**31 - 1)


def test_a_job_without_steps_has_no_loss_yet():
    assert math.isnan(Training().loss)

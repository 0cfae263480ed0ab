"""Journals that nobody has lived through."""

from __future__ import annotations

import json
import random

STARTED = 1_800_000_000.0


def line(time, event, **fields):
    return json.dumps({"time": STARTED + time, "event": event, **fields})


def launched(worker, time, ready=2.0):
    yield line(time, "worker_launched", worker=worker, reason="asked for", replaces=False)
    yield line(time + 0.1, "worker_started", worker=worker, host=f"node-{worker % 40}", pid=1000 + worker)
    yield line(time + ready, "worker_ready", worker=worker)


def formed(time, version, members, step, reason="the first workers are ready", seconds=0.0):
    return line(time, "world_formed", world=version, members=list(members), step=step, reason=reason, seconds=seconds)


def steps(time, step, made, *, world=1, seconds=1.0, again=0, slowest=0.0, loss=1.0):
    return line(time, "steps", step=step, world=world, steps=made, samples=256 * made, loss=loss, learning_rate=0.1,
                seconds=seconds, again=again, slowest=slowest)  # fmt: skip


def pause(time, world, kind, total, worker=0):
    parts = dict.fromkeys(("notice", "drain", "rendezvous", "init", "sync", "first_step"), round(total / 6, 6))
    return line(
        time, "pause", world=world, worker=worker, kind=kind, **parts, total=total, steps_torn=int(kind == "failure")
    )


def disturbed(job="j"):
    """Lines of a short job that lost one of its two workers; it is over."""
    members = [text for worker in (0, 1) for text in launched(worker, 0, 9)]
    return [
        line(0, "job_started", job=job, workers="1-2"),
        *sorted(members, key=lambda text: json.loads(text)["time"]),
        formed(10, 1, [0, 1], 0),
        steps(10, 1, 1, seconds=0),
        line(80, "world_broken", world=1, reason="killed"),
        line(80, "worker_left", worker=1, cause="killed", reason="killed", code=-9),
        formed(85, 2, [0], 700),
        pause(90, 2, "failure", 11),
        steps(90, 701, 1, world=2, seconds=1),
        line(100, "job_finished", phase="succeeded", reason="done", steps=800),
    ]


def eventful():
    """Lines of a short job to which everything happens, and which is stopped and goes on 30 s later; whole seconds, so that one can count."""
    lines = [
        line(0, "job_started", job="j", workers="1-4"), *launched(0, 0), *launched(1, 0),
        formed(4, 1, [0, 1], 0), steps(5, 1, 1, seconds=0),
        steps(15, 51, 50, seconds=10, slowest=0.02),
        line(17, "evaluation", step=51, seconds=2, metrics={"accuracy": 0.5, "odd": None}),
        line(18, "checkpoint", step=51, path="x", seconds=9, held=1),
        *launched(2, 20), formed(25, 2, [0, 1, 2], 51, seconds=3),
        pause(26, 2, "grow", 4, 0), pause(26, 2, "grow", 3, 1), steps(26, 52, 1, world=2, seconds=0),
        line(27, "worker_slow", worker=0, host="h", phase="data", factor=2.5, seconds=0.1),
        line(27, "worker_stuck", worker=0, host="h", seconds=31, where="train.py:31 in load", stack=["a"]),
        line(28, "warning", message="take care"),
        line(29, "advice", text="4 would do", curve=[{"workers": n, "speedup": n, "measured": n == 1} for n in (1, 2)]),
        line(30, "worker_draining", worker=0, reason="told to"), line(31, "worker_left", worker=0, cause="drained", code=0),
        formed(32, 3, [1, 2], 52, seconds=2), steps(34, 53, 1, world=3, seconds=1),
        line(40, "world_broken", world=3, reason="killed"), line(40, "worker_left", worker=1, cause="killed", code=-9),
        line(42, "phase", phase="waiting", reason="too few"), *launched(3, 42),
        formed(48, 4, [2, 3], 43, seconds=2), line(48, "phase", phase="running", reason=""),
        pause(50, 4, "failure", 10, 2), steps(50, 44, 1, world=4, seconds=1),
        steps(60, 64, 20, world=4, seconds=10, again=10),
        line(61, "master_restarted", world=4, members=[2, 3], missing=[], seconds=5),
        steps(61, 64, 20, world=4, seconds=10),  # told once more
        line(65, "phase", phase="stopping", reason="elasticdl stop"), line(70, "job_finished", phase="stopped", steps=64),
        line(100, "job_started", job="j", workers="2"), *launched(4, 100),
        formed(104, 1, [4], 64), steps(105, 65, 1, seconds=0), steps(110, 75, 10, seconds=5),
        line(115, "steps_over", step=75, seconds=3), line(116, "job_finished", phase="succeeded", steps=75),
    ]  # fmt: skip
    return sorted(lines, key=lambda text: json.loads(text)["time"])


# What it did in which seconds of `eventful`, and for how many workers each.
SPENT = {"productive": 41, "slow": 1, "again": 5, "evaluation": 2, "checkpoint": 1, "grow": 4, "shrink": 3, "failure": 4,
         "waiting": 6, "starting": 10, "ending": 9}  # fmt: skip


def storm(worlds=1000, workers=500, job="storm"):
    """Lines of a job whose workers come and go; it is over."""
    rng = random.Random(1)
    entries = [line(0, "job_started", job=job, workers=f"2-{workers}", specification="job.json")]
    for worker in range(workers):
        entries += launched(worker, rng.random(), rng.uniform(8, 20))
    members, next_id, now, step, last = list(range(workers)), workers, 22.0, 0, 0
    entries += [formed(now, 1, members, 0), line(now, "phase", phase="running", reason="")]
    for world in range(2, worlds + 1):
        for _ in range(4):
            took = rng.uniform(2, 8)
            now, made = now + took, int(took / 0.12)
            step += made
            again, loss, slowest = max(0, min(made, last - step + made)), rng.random(), rng.choice((0, 0.004))
            told = {"world": world - 1, "seconds": took, "again": again, "slowest": slowest, "loss": loss}
            entries.append(steps(now, step, made, **told))
            last = max(last, step)
        if world % 10 == 0:
            about = {"epoch": world // 10, "samples": 10_000, "seconds": 1.5, "worker": members[0]}
            entries.append(line(now, "evaluation", step=step, metrics={"accuracy": rng.random()}, **about))
            entries.append(line(now + 1.5, "checkpoint", step=step, path=f"{step:010d}.pt", seconds=2.0, held=0.2))
            now += 1.6
        kind = rng.choice(("grow", "shrink", "failure"))
        if kind != "grow" and len(members) > 10:
            if kind == "failure":
                step -= rng.randint(0, 1)
                entries.append(line(now, "world_broken", world=world - 1, reason="killed"))
            for worker in rng.sample(members, rng.randint(1, 3)):
                members.remove(worker)
                cause = "preempted" if kind == "failure" else "drained"
                entries.append(line(now + 0.05, "worker_left", worker=worker, cause=cause, reason=cause, code=-9))
        elif len(members) < workers:
            for worker in range(next_id, next_id + 4):
                entries += launched(worker, now - 25, rng.uniform(8, 20))
                members.append(worker)
            next_id += 4
        total = rng.uniform(0.3, 4.0)
        now += total
        entries.append(formed(now - 0.2, world, members, step, "new workers are ready", 0.1))
        entries += [pause(now, world, kind, total * rng.uniform(0.9, 1), worker) for worker in rng.sample(members, 3)]
        if world % 97 == 0:
            entries.append(line(now, "worker_slow", worker=members[1], host="h", phase="data", factor=2, seconds=0.05))
            entries.append(line(now, "warning", message=f"worker {members[0]} has been silent for 12 s"))
    entries.append(line(now + 3, "job_finished", phase="succeeded", reason="training is complete", steps=step))
    return sorted(entries, key=lambda text: json.loads(text)["time"])

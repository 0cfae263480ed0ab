"""A job whose surroundings are played: a story says what happens, line by line, and what its master then wants, in words.

    a killed worker breaks the world and is replaced (2-3, stop_grace=5)
      0 1 2 train
      1 killed -> broken 1 for 0 2: worker 1 killed: SIGKILL
      0 2 ask broken; tick -> world 2: 0 2; launch 3; reason =; worker_left cause = killed

The title has the range of workers and other settings. An instruction without its reason stands for any reason. The rest of the form
is in `tests.stories`; what can happen in `Play`, and what is a fact in `Play.fact`.
"""

from __future__ import annotations

import re

from elasticdl.elastic.core.reporting import WINDOW
from elasticdl.job import messages as m
from elasticdl.job.journal import KINDS, standing
from elasticdl.job.spec import WorkerRange, parse_worker_range
from elasticdl.master.core import events as e
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.values import Settings, World
from elasticdl.master.core.worker_record import Snapshot
from tests.simulation.job_invariants import check_job
from tests.stories import check, parts_of, settings_of

NEVER = 10**9
LONG = 10.0**9
PATIENT = {"progress_timeout": LONG, "heartbeat_timeout": LONG, "join_window": 0.1}  # nobody is silent or stuck
DUMP = 'Timeout (0:00:04)!\nThread 0x1 (most recent call first):\n  File "/job/train.py", line {} in load\n'
BOOKS = (e.Record, e.NewSteps, e.SaveState, e.AdoptWorld)
# What may stand after a verb, alone or before a value.
FLAGS = {"broken", "lingering", "trained", "itself", "stateless", "moving", "session", "ending", "blank", "over"}
NAMED = {"on", "in", "world", "left", "step", "synced", "code", "of", "begun", "after"}


def step(job, event, now):
    """One step, after which all invariants hold."""
    instructions, recorded = job.step(event, now), False
    check_job(job)
    for instruction in instructions:
        if isinstance(instruction, e.Record):
            assert set(instruction.fields) <= set(KINDS[instruction.event].fields), f"not declared: {instruction}"
            recorded = True
        elif isinstance(instruction, e.Tell) and isinstance(instruction.message, m.Broken):
            assert not recorded, "to record may take long, as on a slow disk: of a break members hear first"
    return instructions


# ---- what the master wants, in words ----


def _words(instruction) -> tuple[str, tuple[int, ...], str]:
    """What, of whom, and why."""
    match instruction:
        case e.Tell(to, World(version, _, _) as world):
            again = "" if to == world.worker_ids else f" again for {_ids(to)}"
            return f"world {version}: {_ids(world.worker_ids)}{again}", (), ""
        case e.Tell(to, m.Change(version, reason) | m.Broken(version, reason) as told):
            return f"{type(told).__name__.lower()} {version} for", to, reason
        case e.Tell(to, m.Drain(reason)):
            return "drain", to, reason
        case e.Tell(to, m.StopWork(reason, checkpoint)):
            return "stop with checkpoint" if checkpoint else "stop", to, reason
        case e.Tell(to, m.DumpStacks()):
            return "dump", to, ""
        case e.ReadStacks(worker):
            return "read", (worker,), ""
        case e.LaunchWorker(worker, reason, away):
            return f"launch away from {' '.join(away)}" if away else "launch", (worker,), reason
        case e.TerminateWorker(worker, reason) | e.KillWorker(worker, reason):
            return type(instruction).__name__.removesuffix("Worker").lower(), (worker,), reason
        case e.EndJob(phase, reason, traceback):
            return f"end {phase}", (), f"{reason} | {traceback}" if traceback else reason
    raise ValueError(instruction)


def _ids(ids) -> str:
    return " ".join(map(str, ids))


def in_words(instructions) -> list[str]:
    """Those in a row that differ only in their worker are one."""
    out, last, ids = [], None, []
    for what, to, why in (_words(each) for each in instructions if not isinstance(each, BOOKS)):
        if (what, why) != last or not to or not set(ids).isdisjoint(to):
            ids, last = [], (what, why)
            out.append("")
        ids += to
        out[-1] = " ".join([what, *map(str, ids)]) + (f": {why}" if why else "")
    return out


def launched(told) -> list[int]:
    """Of what is told in words: who is launched."""
    found = (re.fullmatch(r"launch(?: away from .*?)?((?: \d+)+)(?:: .*)?", each) for each in told)
    return [int(worker) for each in found if each for worker in each[1].split()]


# ---- a job, and what happens to it ----


class Play:
    """The hearts of workers that are connected beat, and each makes progress unless it waits, stands still or is silent."""

    def __init__(self, minimum=2, maximum=3, *, obedient=False, work=(), **settings):
        """``obedient``: its workers do by themselves, at each tick, what they are told to. ``work``: what they tell of a
        step: seconds of data, compute and update, and samples; each is on a node of its own.
        """
        self.settings = Settings(WorkerRange(minimum=minimum, maximum=maximum), **settings)
        self.job, self.now, self.out = Job(self.settings), 0.0, []
        self.obedient = obedient
        self.there, self.connected, self.asked = set(), set(), set()
        self.inside, self.worlds = {}, {}  # the world in which each believes to be; the members of each
        self.steps, self.beats = {}, {}
        self.waiting, self.standing, self.silent = set(), set(), set()  # (in a collective)
        self.orders, self.away = {}, {}
        self.answers, self.due = {}, []
        self.usual, self.work = work, {}
        self.saved, self.missed, self.newest = None, [], -1

    # ---- events ----

    def do(self, events: str) -> list[str]:
        """What comes of them, but for how a first world comes up."""
        before = len(self.out)
        for each in parts_of(events):
            if self._play(each):
                before = len(self.out)
        return in_words(self.out[before:])

    def post(self, *events):
        for event in events:
            if self.job is None:
                self.missed.append(event)
                continue
            new = step(self.job, event, self.now)
            self.out += new
            for instruction in new:
                self._note(instruction)

    def _note(self, instruction):
        match instruction:
            case e.LaunchWorker(worker):
                assert worker > self.newest, "an id is used again"
                self.newest = worker
                self.there.add(worker)
            case e.KillWorker(worker):
                self.orders[worker] = instruction
            case e.Tell(to, World() as world):
                self.worlds[world.version] = world.worker_ids
                for worker in to:
                    self.inside[worker] = world.version
                    self.asked.discard(worker)
                    self.orders.pop(worker, None)
                    self.steps[worker] = max(member.step for member in world.members)
            case e.Tell(to, m.DumpStacks()):
                self.due += [(self.now + self.answers[worker][0], worker) for worker in to if worker in self.answers]
            case e.Tell(to, m.Change() | m.Broken() | m.Drain() | m.StopWork() as order):
                last = m.Drain | m.StopWork | e.KillWorker  # nothing comes after these
                for worker in self.connected.intersection(to):
                    if not isinstance(self.orders.get(worker), last):
                        self.orders[worker] = order

    def say(self, worker, said):
        self.post(e.FromWorker(worker, said))

    def _play(self, event):
        words, _, text = event.partition(": ")
        ids, verb, more = re.fullmatch(r"((?:[\d-]+ )*)([a-z_]+) ?(.*)", words).groups()
        verb = {"finishes": "finish", "goes": "go"}.get(verb, verb.removesuffix("s"))
        workers = [n for each in ids.split() for n in _range(each)]
        given, numbers, rest = {}, [], iter(more.split())
        for word in rest:
            if re.fullmatch(r"[\d.]+", word):
                numbers.append(float(word))
            else:
                given[word] = word in FLAGS or next(rest, "")
        if workers:
            assert given.keys() <= FLAGS | NAMED, f"{event}: what is this?"
            if verb in ("train", "learn"):
                self._train(workers, learn=verb == "learn")
                return True
            for worker in workers:
                self._of_worker(worker, verb, given, numbers, text)
        else:
            self._of_job(verb, more, given, numbers, text)
        return False

    def _of_job(self, verb, more, given, numbers, text):
        match verb:
            case "tick":
                self.post(e.Tick())
            case "wait":
                self.wait(numbers[0])
            case "take" | "learn":  # steps of so many seconds, or so that each member does that part of one's work
                members = self.worlds[max(self.worlds)]
                seconds = numbers[0] if verb == "take" else 1.0 / (len(members) * numbers[0])
                first = self.job.training.step + 1
                steps = range(first, first + int(given.get("count", 30)))
                world = int(given["of"]) if "of" in given else None
                self.train_steps(members[0], steps, seconds=seconds, samples=64, total=0, world=world)
                self.wait(10.0 if verb == "learn" else 0.0)
            case "leap":  # in two ticks, without heartbeats
                for _ in range(2):
                    self.now += numbers[0] / 2
                    self.post(e.Tick())
            case "jump":  # as a master that was held up
                self.now += numbers[0]
            case "scale":
                self.post(e.ScaleRequested(parse_worker_range(more)))
            case "stop":
                self.post(e.StopRequested(text, checkpoint=more != "now", now=more == "now"))
            case "launcher":
                self.post(e.LauncherFailed(text))
            case "stalled" | "saved":
                self.post(e.StateSaveStalled(text))
            case "found":
                self.post(e.WorkersFound(tuple(e.FoundWorker(int(each), "h", 1) for each in numbers)))
            case "die":
                self.saved = self.job.snapshot()
                self.job, self.missed, self.connected = None, [], set()
            case "rise":
                self._rise(remember="blank" not in given, over="over" in given, numbers=numbers)
            case _:
                raise ValueError(verb)

    def _of_worker(self, worker, verb, given, numbers, text):
        node = given.get("on", "")
        match verb:
            case "placed":
                self.post(e.WorkerPlaced(worker, "h", 1, node, given.get("in", "")))
            case "pend" | "nowhere":
                if verb == "nowhere":  # and stays so
                    self.there.discard(worker)
                self.post(e.WorkerPending(worker, text))
            case "connect":
                self._connect(worker, int(given.get("world", -1)))
            case "come":
                self._connect(worker, 0)
                self._ask(worker, {}, "")
            case "ask":
                self._ask(worker, given, text)
            case "cut":
                self.connected.discard(worker)
                self.post(e.WorkerDisconnected(worker))
            case "drain":
                self.say(worker, m.Draining(text or "SIGTERM", "lingering" in given))
            case "finish":
                self.say(worker, m.Finished(9, 1, {}))
            case "fail":
                self.say(worker, m.Failed("itself" not in given, text, "Why", trained="trained" in given))
            case "step":  # it tells of these
                self.train_steps(worker, map(int, numbers), total=int(given.get("of", 1000)))
            case "epoch":  # it tells of this one's only step
                self.train_steps(worker, map(int, numbers), total=0, epoch=int(numbers[0]))
            case "work":
                self.work[worker] = tuple(numbers) or self.usual
            case "at":
                self.steps[worker] = int(numbers[0])
                self.beat(worker)
            case "beat":
                self.beat(worker, ending="ending" in given)
            case "wait" | "stand" | "go" | "silent":
                for kind, whose in (("wait", self.waiting), ("stand", self.standing), ("silent", self.silent)):
                    (whose.add if verb == kind else whose.discard)(worker)
            case "away":
                self.away[worker] = int(numbers[0]) if numbers else NEVER
            case "show":  # where it stands
                fields = {"where": text, "moves": "moving" in given, "collectives": int(given.get("begun", 0))}
                self.say(worker, m.Notice("worker_stuck", {**fields, "stack": [text], "last_collectives": []}))
            case "answer":  # likewise, a moment after it is asked
                self.answers[worker] = float(given.get("after", 0.3)), given, text
            case "wait_at":
                self.say(worker, m.Notice("worker_waits", {"where": text, "seconds": numbers[0]}))
            case "seen":  # by its launcher
                dump = DUMP.format(int(numbers[0])) if numbers else ""
                self.post(e.StacksFound(worker, dump, text, "session" in given))
            case "leave":
                self.say(worker, m.Draining("told to"))
                self._exit(worker, e.ExitCause.CLEAN)
            case cause:
                code = int(given["code"]) if "code" in given else None
                self._exit(worker, e.ExitCause(cause), code, text, node)

    def _connect(self, worker, version=-1):
        """``version``: of the world in which it says to be; -1: in which it is."""
        known = 0 if worker in self.asked else self.inside.get(worker, 0)
        self.there.add(worker)
        self.connected.add(worker)
        self.beats.setdefault(worker, 0)
        self.post(e.WorkerPlaced(worker, "h", 1, f"node-{worker}" if self.usual else ""))
        self.say(worker, m.Hello("h", 1, known if version < 0 else version))

    def _ask(self, worker, given, reason):
        left = int(given.get("left", self.inside.get(worker, 0)))
        self.steps[worker] = int(given.get("step", self.steps.get(worker, 0)))
        self.asked.add(worker)
        state, synced = left > 0 and "stateless" not in given, int(given.get("synced", 0))
        self.say(worker, m.Ask(left, self.steps[worker], state, "broken" in given, reason, synced_in=synced))

    def _exit(self, worker, cause, code=None, detail="", node=""):
        for those in (self.there, self.connected, self.asked, self.silent, self.waiting, self.standing):
            those.discard(worker)
        self.orders.pop(worker, None)
        usual = {e.ExitCause.KILLED: (-9, "SIGKILL"), e.ExitCause.CLEAN: (0, "")}.get(cause, (1, ""))
        code = usual[0] if code is None else code
        self.post(e.WorkerExited(worker, cause, code, detail or usual[1], "the last lines", node))

    def _train(self, workers, *, learn):
        """Bring up the first world, of these. ``learn``: they come through an epoch, with steps of a moment."""
        self.post(e.Tick())
        for worker in workers:
            self._connect(worker)
        for worker in workers:
            self._ask(worker, {}, "")
        self.wait(0.0 if self.job.rendezvous.world else self.settings.join_window + 0.1)
        assert self.fact("members") == _ids(workers)
        if learn:
            everybody = f"{_ids(workers)} at"
            self.do(f"0 epoch 0; 0 epoch 1; {everybody} 1; {everybody} 2; {everybody} 3; wait 0.1")

    def train_steps(self, worker, steps, *, seconds=0.05, samples=8, total=1000, epoch=0, world=None):
        version = self.job.rendezvous.version if world is None else world
        told = (m.StepReport(n, epoch, 0.5, samples, 0.1, seconds, version, samples * n, False) for n in steps)
        self.say(worker, m.Progress(tuple(told), total, epoch + 1))

    # ---- time ----

    def beat(self, worker, **more):
        if worker not in self.connected:
            return
        waits = worker in self.waiting or (self.obedient and self._hangs(worker))
        self.beats[worker] += not (waits or worker in self.standing)
        version = 0 if worker in self.asked else self.inside.get(worker, 0)
        if self.usual and version:
            work = {each: self.work.get(each, self.usual) for each in self.worlds[version]}
            data, compute, update, samples = work[worker]
            wait = max(sum(each[:3]) for each in work.values()) - sum(work[worker][:3]) + 0.01
            more["times"] = m.StepTimes(WINDOW, data, compute, wait, update, samples)
        self.say(worker, m.Heartbeat(version, self.steps.get(worker, 0), self.beats[worker], waits, **more))

    def wait(self, seconds):
        tick = 0.5 if self.obedient or seconds > 30 else 0.1
        tick, end = 5 * tick if seconds > 900 else tick, self.now + seconds
        while self.now < end - 1e-9 and not (self.job and self.job.phase.final):
            self.now += min(tick, end - self.now)
            for worker in [worker for at, worker in self.due if at <= self.now]:
                _, given, text = self.answers[worker]
                self._of_worker(worker, "show", given, [], text)
            self.due = [each for each in self.due if each[0] > self.now]
            for worker in sorted(self.there - self.silent):
                if self.obedient:
                    self._obey(worker)
                self.beat(worker)
            if self.obedient:
                for worker in [each for each, order in self.orders.items() if isinstance(order, e.KillWorker)]:
                    self._exit(worker, e.ExitCause.KILLED)
            self.post(*[e.Tick()] * (self.job is not None))

    def _hangs(self, worker):
        """It waits in a collective for one that will never come there."""
        version = self.inside.get(worker, 0)
        if worker in self.asked or not version:
            return False
        return any(
            other not in self.there or other in self.silent or other in self.asked or self.inside.get(other) != version
            for other in self.worlds[version]
        )

    def _obey(self, worker):
        if self.job and worker not in self.connected:
            self.away[worker] = self.away.get(worker, 0) - 1
            if self.away[worker] < 0:
                self._connect(worker)
                if worker in self.asked:
                    self._ask(worker, {}, "")
        order, version = self.orders.pop(worker, None), self.inside.get(worker, 0)
        match order:
            case e.KillWorker():
                self._exit(worker, e.ExitCause.KILLED)
            case m.Drain() | m.StopWork():
                self._of_worker(worker, "leave", {}, [], "")
            case m.Change() | m.Broken() if order.world_version == version and worker not in self.asked:
                self._ask(worker, {"broken": True} if isinstance(order, m.Broken) else {}, "")
            case _ if not version and worker not in self.asked and worker in self.connected:
                self._ask(worker, {}, "")
            case _ if version and worker not in self.asked and not self._hangs(worker):
                self.steps[worker] = self.steps.get(worker, 0) + 1

    def _rise(self, *, remember, over, numbers):
        """Another master, from what was saved and what there is. ``numbers``: workers that have ended, of which nothing is left, or
        (``over``) of which something is, though the last master has dealt with them.
        """
        memory = Snapshot.from_json(Snapshot(self.saved, 0.0).to_json()).job if remember else None
        exits = [each for each in self.missed if isinstance(each, e.WorkerExited) and each.worker_id not in numbers]
        exits += [e.WorkerExited(int(each), e.ExitCause.CRASHED, 1) for each in numbers if over]
        self.job = Job(self.settings, memory)
        there = sorted({*self.there, *(each.worker_id for each in exits)})
        found = (e.FoundWorker(each, "h", 1, over=over and each in numbers) for each in there)
        self.post(e.WorkersFound(tuple(found)), *exits)

    # ---- facts ----

    def records(self, event):
        return [each.fields for each in self.out if isinstance(each, e.Record) and each.event == event]

    def fact(self, name):
        match name.split():
            case ["members"]:
                inside = sorted((each.rank, each.worker_id) for each in self.job.workers if each.rank >= 0)
                return _ids(worker for _, worker in inside)
            case ["workers"]:
                return _ids(each.worker_id for each in self.job.workers)
            case ["state", worker]:
                return str(self.job.records[int(worker)].state)
            case ["remark" | "shown" as what, worker]:
                view = self.job.records[int(worker)].view()
                return view.remark if what == "remark" else view.state
            case ["version" | "why_changed" as what]:
                return str(getattr(self.job.rendezvous, what))
            case ["step" | "total_steps" as what]:
                return str(getattr(self.job.training, what))
            case ["longest"]:
                return f"{self.job.progress_limits.longest:.0f}"
            case ["phase" | "reason" | "limits" as what]:
                return str(getattr(self.job, what))
            case ["worker_stuck", "standing"]:
                return ", ".join(map(standing, self.records("worker_stuck")))
            case ["size", what]:
                return str(getattr(self.job.size, what))
            case ["sizes"]:
                return _ids(len(self.worlds[version]) for version in sorted(self.worlds))
            case [event] if event in KINDS:
                return str(len(self.records(event)))
            case [event, field] if event in KINDS:
                return ", ".join(str(fields.get(field, "-")) for fields in self.records(event))
        raise ValueError(name)


def _range(text):
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


# ---- stories ----


def _settings(title):
    for name, value in settings_of(title).items():
        if found := re.fullmatch(r"(\d+)-(\d+)", name):
            yield from zip(("minimum", "maximum"), map(int, found.groups()), strict=True)
        else:
            number = re.fullmatch(r"[\d.]+", value)
            yield name, (int(value) if name == "first_worker" else float(value)) if number else value or True


def tell(story, hides="", **settings):
    """Play it. ``hides``: kinds of instructions that are none of its business, by their first word."""
    title, *lines = story
    play = Play(**settings | dict(_settings(title)))
    for line in lines:
        told = play.do(line.partition("->")[0].strip())
        check(line, [each for each in told if each.split()[0] not in hides.split()], play.fact)
    return play

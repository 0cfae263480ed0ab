"""What the scripts of all workers ask each other: one answer for all."""

from types import SimpleNamespace

from session_kit import JobStub

from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.torch_kit.agreements import Agreements, Answers


class Others:
    """A collective of two workers: rank 0 says what this one would, or the other is lost."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def _answer(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def broadcast_bytes(self, value, name):
        self.asked.append(name)
        self._answer()
        return value


def asking(*answers, **values):
    """With open batches what workers say is part of the step; see `Agreements.ask`."""
    said, warnings = [], []
    job = JobStub(
        size=2,
        world=SimpleNamespace(version=3),
        advance=said.append,
        warn=warnings.append,
        collective=Others(*answers),
        is_told_to_leave=False,
    )
    of_nothing = {"open_batches": [], "is_catching_up": False, "is_reduced": False, "is_torn": False}
    state = SimpleNamespace(reducer=SimpleNamespace(begin_launched=lambda: None))
    participant = SimpleNamespace(**{"job": job, "state": state, **of_nothing, **values})
    answers = Answers()
    return Agreements(participant, answers), answers, job, said, warnings


def test_who_comes_in_the_middle_of_a_torn_step_does_not_ask_what_the_others_have_decided():
    """They wait for its gradients, and not for another decision."""
    agreements, answers, job, said, _ = asking(0, 0, open_batches=["a batch"])
    for known in ("first", None):
        answers.add(known)
    assert [agreements.of_first(number, "a decision") for number in range(3)] == ["first", None, 2]
    assert len(job.collective.asked) == 1
    agreements.asking.open_batches.clear()
    agreements.of_first("between two steps", "a decision")
    assert len(job.collective.asked) == 2
    assert said == [Activity.WAIT, Activity.UPDATE] * 2  # who goes on to write a checkpoint does not wait


def test_a_world_that_breaks_while_something_is_said_is_warned_of_once():
    agreements, _, job, _, warnings = asking(*[WorldBroken("a worker is lost")] * 4)
    assert [agreements.of_first(number, "a decision") for number in range(3)] == [0, 1, 2]
    assert warnings == ["a decision is each worker's own: a worker is lost"]
    job.world.version = 4
    agreements.of_first(0, "a decision")
    assert len(warnings) == 2

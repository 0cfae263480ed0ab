"""What workers of Lightning's trainer decide together, load and write."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from elastic_lightning_kit import Module, changed, lightning, loader_of, trainer_with
from lightning.pytorch.loggers import CSVLogger
from session_kit import JobStub
from torch.utils.data import DataLoader
from trainers_kit import process_is_kept  # noqa: F401

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.lightning.fit_host import Decisions, FitHost
from elasticdl.elastic.lightning.strategy import TrainLoader
from elasticdl.elastic.lightning.trainer_state import Writing
from elasticdl.elastic.torch_kit.agreements import Agreements
from elasticdl.elastic.torch_kit.participant import Participant, ScriptPosition

pytestmark = pytest.mark.filterwarnings("ignore")


class Others:
    """A collective of two workers: of wishes the other has these, and rank 0 says what this one would."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def _answer(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sum_asked(self, tensor, what):
        tensor += self._answer()

    def broadcast_bytes(self, value, name):
        self.asked.append(name)
        self._answer()
        return value


def deciding(*answers, **values):
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
    participant = Participant.__new__(Participant)
    of_nothing = {"open_batches": [], "is_catching_up": False, "is_reduced": False, "is_torn": False}
    state = SimpleNamespace(begin_launched=lambda: None)
    vars(participant).update({"job": job, "position": ScriptPosition(), "state": state, **of_nothing, **values})
    participant.agreements = Agreements(participant, participant.position.answers)
    decisions = Decisions(job)
    decisions.participant = participant
    return decisions, job, said, warnings


def test_who_comes_in_the_middle_of_a_torn_step_does_not_ask_what_the_others_have_decided():
    """They wait for its gradients, and not for another decision."""
    decisions, job, said, _ = deciding(0, 0, open_batches=["a batch"])
    for known in ("first", None):
        decisions.participant.position.answers.add(known)
    assert [decisions.of_first(number) for number in range(3)] == ["first", None, 2]
    assert len(job.collective.asked) == 1
    decisions.participant.open_batches.clear()
    decisions.of_first("between two steps")
    assert len(job.collective.asked) == 2
    assert said == [Activity.WAIT, Activity.UPDATE] * 2  # who goes on to write a checkpoint does not wait


def test_what_any_worker_wishes_all_do_and_who_is_on_its_way_wishes_nothing():
    decisions, job, *_ = deciding(0, 1, 0, WorldBroken("a worker is gone"))
    assert [decisions.anybody(wish) for wish in (False, False, True, True, True)] == [False, True, True, None, None]
    job.world.version = 4
    job.collective.answers = [0, 0]
    assert decisions.anybody(True) is True
    job.is_told_to_leave = True
    assert decisions.anybody(True) is False
    assert deciding(is_catching_up=True)[0].anybody(True) is False
    later, *_ = deciding(0, open_batches=["a batch"])
    later.participant.position.answers.add([False])
    assert [later.anybody(True), later.anybody(True)] == [False, True]  # the others have gone on there


def test_a_world_that_breaks_while_something_is_said_is_warned_of_once():
    decisions, job, _, warnings = deciding(*[WorldBroken("a worker is lost")] * 4)
    assert [decisions.of_first(number) for number in range(3)] == [0, 1, 2]
    assert warnings == ["a decision is each worker's own: a worker is lost"]
    job.world.version = 4
    decisions.of_first(0)
    assert len(warnings) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_that_is_not_used_draws_what_torchs_draws(workers):
    """Lightning 2.5.0 asks for one and then for another where it resumes."""

    class FirstEpoch:
        def begin_epoch(self, batches):
            self.batches = batches
            return 0

        @property
        def participant(self):
            (batch,) = self.batches.order_of(0)
            return SimpleNamespace(batches=lambda number: self.batches.load([batch.plan(1).whole_run(0)], 0))

    seen = []
    for wrap in (lambda loader: loader, lambda loader: TrainLoader(loader, FirstEpoch(), "test")):
        torch.manual_seed(3)
        loader = wrap(DataLoader(range(30), batch_size=30, shuffle=True, num_workers=workers))
        iter(loader)
        seen += [next(iter(loader)).tolist()]
    assert seen[0] == seen[1]


def test_a_closure_that_is_evaluated_again_is_refused_where_there_are_others():
    """As sharpness-aware minimization does: the second gradients would be each worker's own."""
    taking_part = FitHost.__new__(FitHost)
    taking_part._given, taking_part._manual = object(), None
    taking_part._joined, taking_part.job = SimpleNamespace(is_reduced=True), SimpleNamespace(size=2)
    with pytest.raises(UserError, match="sharpness-aware minimization"):
        taking_part.backward(torch.ones(()), torch.ones(()), lambda loss: None)


def test_a_csv_logger_of_another_rank_0_keeps_what_the_last_one_has_written(tmp_path):
    trainer = SimpleNamespace(progress_bar_callback=None)
    for loss in (1.0, 2.0, 3.0):
        logger = CSVLogger(tmp_path, name="", version="log")
        trainer.loggers = [logger]
        Writing(trainer, SimpleNamespace(rank=None)).take_rank(0, is_first=False)
        logger.log_metrics({"loss": loss}, step=1)
        logger.save()
    names = ("metrics_0.csv", "metrics_1.csv", "metrics.csv")
    assert [(tmp_path / "log" / name).read_text().split()[1] for name in names] == ["1.0,1", "2.0,1", "3.0,1"]


@pytest.mark.parametrize(("answers", "stops_after"), [([False, True], 2), ([None, None, True], 3)])
def test_a_wish_to_stop_is_everybodys_before_the_next_batch(monkeypatch, answers, stops_after):
    asked = []

    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 0  # which the others have not heard when the answer is None

    def anybody(self, wish):
        asked.append(wish)
        return answers[len(asked) - 1] if len(asked) <= len(answers) else wish

    monkeypatch.setattr(Decisions, "anybody", anybody)
    trainer = trainer_with(max_epochs=2, callbacks=[Stop()], enable_progress_bar=True)
    trainer.fit(Module(), loader_of())
    assert trainer.global_step == stops_after
    assert asked[:stops_after] == [True, *([answers[0] is None] * (stops_after - 1))]
    assert "on_advance_end" not in vars(trainer.fit_loop) | vars(trainer.fit_loop.epoch_loop)


@pytest.mark.parametrize(("own", "others", "steps"), [(True, False, 4), (False, True, 4), (False, False, 14)])
def test_any_workers_hook_leaves_out_the_rest_of_an_epoch_for_all(monkeypatch, own, others, steps):
    def anybody(self, wish):
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        return wish or (others and (progress.ready, progress.processed) == (3, 2))

    monkeypatch.setattr(Decisions, "anybody", anybody)
    trainer = trainer_with(max_epochs=2)
    module = changed(on_train_batch_start=lambda self, batch, batch_idx: -1 if own and batch_idx == 2 else None)
    trainer.fit(module, loader_of(), loader_of(20))
    assert trainer.global_step == steps
    assert "on_train_batch_start" not in vars(module)


def test_hooks_of_a_batch_draw_the_scripts_random_numbers(monkeypatch):
    """And neither what loads the batch nor the training step does, if there are several workers."""
    drawn = {0: [], 1: []}

    class Drawing(Module):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            batch[0].add_(torch.rand(()))
            return batch

        def on_train_batch_start(self, batch, batch_idx):
            drawn[rank].append(torch.rand(()).item())
            return -1 if batch_idx == 3 else None

        def training_step(self, batch, batch_idx):
            torch.rand(5)
            return super().training_step(batch, batch_idx)

    def loading(self, batch):
        self.window.open(lambda: torch.manual_seed(5 + rank))
        return nullcontext()

    monkeypatch.setattr(FitHost, "loading", loading)
    for rank in drawn:  # noqa: B007 - which the functions above read
        lightning.seed_everything(3)
        trainer_with(max_epochs=2).fit(Drawing(), loader_of(shuffle=True))
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 8

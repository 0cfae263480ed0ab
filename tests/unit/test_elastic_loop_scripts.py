"""What scripts do in a plain loop is done as on one device: by several workers, and once where a step is torn."""

import functools
import re
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from elastic_kit import Board, SumOfThreads, in_threads
from plain_kit import BATCH, BATCHES, TORN, Script, compare, run
from refusal_kit import refused
from torch.nn.functional import cross_entropy, kl_div
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

from elasticdl.elastic.torch.loop_host import ASKED_IN_TORN
from elasticdl.elastic.torch_kit.agreements import ScriptPosition

pytestmark = pytest.mark.filterwarnings("ignore")
HERE = r"test_elastic_loop_scripts.py:\d+"

# -- what is done once, also where a step is torn: scripts, each from the top of its loop --


def counts(script):
    """An annealing by an attribute of the model, and by a number of the loop's."""
    for number, (x, y) in enumerate(script.loader):
        script.model.alpha = 1 + number / 10
        script.values.steps += 1
        (script.loss(x, y) * min(script.values.steps / 30, 1)).backward()
        script.step()


def sums_up_after_the_pass(script):
    """As for a log, before the step."""
    for x, y in script.loader:
        script.loss(x, y).backward()
        script.counter += 1
        script.table[0].add_(2)
        script.step()


def looks_at_sizes(script):
    """As people write it between a loader and a loss."""
    for x, y in script.loader:
        images = x.view(x.shape[0], 2, 4)
        images = images.view(images.size(0), -1)
        both = script.model(torch.cat([images, images.flip(1)]))
        logits = both[: x.size(0)] + 0.1 * both[x.size(0) :]
        targets = torch.zeros(*logits.shape).scatter_(1, y[:, None], 1.0)
        loss = cross_entropy(logits.view(-1, logits.size(-1)), targets.argmax(1))
        (loss + 0.1 * both.square().sum() / x.size(0)).backward()
        script.step()


def asks_after_the_sum(script):
    for x, y in script.loader:
        out = script.model(x)
        hits, loss = (out.argmax(1) == y).float().mean(), cross_entropy(out, y)
        loss.backward()
        script.lose()
        torch.nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
        mean = script.elastic.mean if script.elastic else torch.Tensor.item
        script.counter += mean(hits) + mean(loss)
        script.step()


def accumulates(script):
    """The step is made of three batches, each in two passes, by a scaler."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for number, (x, y) in enumerate(script.loader):
        script.model.alpha = 1.0 + number
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number > 100):
            loss = script.loss(x, y)
        scaler.scale(loss / 3).backward()
        (script.loss(x, y) / 6).backward()
        if number % 3 == 2:
            script.step()


def loads_beside(script):
    """Samples without labels, of a loader that begins anew within the epoch."""
    unlabelled = TensorDataset(torch.arange(12 * 8.0).view(12, 8) / 50)
    beside = DataLoader(unlabelled, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))
    given = (more for _ in range(9) for (more,) in beside)
    for x, y in script.loader:
        more = next(given)
        (script.loss(x, y) + script.model(more).square().mean()).backward()
        script.step()


def penalises_slopes(script):
    """Gradients that `torch.autograd.grad` returns are no parameter's."""
    for x, y in script.loader:
        x.requires_grad_(True)
        out = script.model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (cross_entropy(out, y) + 0.1 * (slope.norm(2, dim=1) - 1).pow(2).mean()).backward()
        script.step()


def mask(model):
    """Called as with DistributedDataParallel, in each pass: right on each part, as the hook is linear."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * (torch.arange(gradient.numel()) % 2).view_as(gradient))


def halve(parameter):
    parameter.grad.mul_(0.5)


def has_hooks(script):
    mask(script.model)
    for x, y in script.loader:
        script.loss(x, y).backward()
        script.step()


def has_hooks_in_place(script):
    """Once the gradient of a pass is accumulated."""
    script.model.body[0].weight.register_post_accumulate_grad_hook(halve)
    has_hooks(script)


ONCE = [
    *(counts, sums_up_after_the_pass, looks_at_sizes, asks_after_the_sum),
    *(accumulates, loads_beside, penalises_slopes, has_hooks),
]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("loop", [*ONCE, has_hooks_in_place])
def test_it_is_as_on_one_device(loop, workers):
    assert not compare(loop, workers)[0].job.warnings


@pytest.mark.parametrize("loop", ONCE)
def test_a_step_that_is_torn_is_made_once(loop):
    (survivor,) = compare(loop, loses=True, kind=Observed)
    assert not survivor.job.warnings
    assert survivor.sent == [{}]


class Observed(Script):
    """``sent``: what others are told of passes made once more, in each world that is entered after a break."""

    def begun(self):
        self.sent, context = [], self.job.contexts[self.worker]
        change_world = context.change_world

        def change(state, why):
            change_world(state, why)
            self.changed(state)

        context.change_world = change

    def changed(self, state):
        self.sent.append(state.sent()["values"]["place"]["repeats"])


# -- several optimizers, and batches of which nothing is made --


class TwoOptimizers(Script):
    """A body that steps on each batch, and a head that steps more rarely."""

    def make_optimizers(self):
        head = torch.optim.SGD([*self.model.body[2].parameters(), *self.head.parameters()], lr=0.1, momentum=0.5)
        return [torch.optim.AdamW(self.model.body[0].parameters(), lr=0.02), head]


def steps_rarely(script):
    """What a head that does not step is given is thrown away."""
    body, head = script.optimizers
    for number, (x, y) in enumerate(script.loader):
        script.loss(x, y).backward()
        torch.nn.utils.clip_grad_norm_(script.model.body[2].parameters(), 0.5)
        body.step()
        if number % 3 == 2:
            head.step()
        body.zero_grad()
        head.zero_grad(set_to_none=bool(number % 2))


def never_uses_one(script):
    for x, y in script.loader:
        script.loss(x, y).backward()
        script.optimizers[0].step()
        script.model.zero_grad()


def looks_first(script):
    x, _ = next(iter(script.loader))
    assert x.shape[1] == 8
    for number, (x, y) in enumerate(script.loader):
        if number == 0:
            assert len(x)
        script.loss(x, y).backward()
        script.step()


def evaluates_first(script):
    with torch.no_grad():
        for x, _ in script.loader:
            script.model(x)
    for x, y in script.loader:
        script.loss(x, y).backward()
        script.step()


def leaves_some_out(script):
    kept = None
    for number, (x, y) in enumerate(script.loader):
        if number % 2 == 0:
            kept = x
            continue
        with torch.no_grad():
            assert (x - kept).shape == x.shape  # of both
        script.loss(x, y).backward()
        script.step()


def averages_statistics(script):
    """By the recipe of `torch.optim.swa_utils`, and an evaluation before all steps, between them and after them: passes with gradients off,
    which are given whole batches."""
    averaged = torch.nn.Sequential(torch.nn.BatchNorm1d(8))

    @torch.no_grad()
    def evaluate():
        script.seen.append([len(x) for x, _ in script.loader])

    evaluate()
    for number, (x, y) in enumerate(script.loader):
        script.loss(x, y).backward()
        script.step()
        if number == 2:
            evaluate()
    update_bn(script.loader, averaged)
    evaluate()
    script.table = torch.stack([averaged[0].running_mean, averaged[0].running_var])


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("loop", "kind", "steps"),
    [
        (steps_rarely, TwoOptimizers, BATCHES),
        (never_uses_one, TwoOptimizers, BATCHES),
        (looks_first, Script, BATCHES),
        (evaluates_first, Script, BATCHES),
        (averages_statistics, Script, BATCHES),
        (leaves_some_out, Script, BATCHES // 2),
    ],
)
def test_a_batch_without_a_step_is_no_part_of_the_next_one(loop, kind, steps, workers):
    for each in compare(loop, workers, kind=kind):
        assert each.host.participant.state.step == steps
        assert each.job.warnings == []


def test_one_worker_may_leave_out_what_is_not_full():
    def skips(script):
        for x, y in script.loader:
            if len(x) == BATCH:
                script.loss(x, y).backward()
                script.step()

    compare(skips, 1, samples=BATCH * BATCHES + 3)


# -- what can't be made again of what was noted: the script makes another pass --


def asks_before_the_step(script):
    """It goes on in another world than it has begun in."""
    for x, y in script.loader:
        out = script.model(x)
        scale = script.mean(out.square().mean())
        (cross_entropy(out, y) * scale / 20).backward()
        script.step()


def looks_at_each_sample(script, x, y):
    out = script.model(x)
    torch.stack([cross_entropy(out[i], y[i]) for i in range(x.shape[0])]).mean().backward()


def goes_through_a_batch(script, x, y):
    sizes = [each.square().mean() for each in script.model(x)]
    (script.loss(x, y) + torch.stack(sizes).mean()).backward()


def cuts_a_batch(script, x, y):
    sizes = [each.square().mean() for each in script.model(x).split(4)]
    (script.loss(x, y) + 0 * torch.stack(sizes).mean()).backward()


def computes_with_a_size(script, x, y):
    with torch.no_grad():
        script.model.temperature.mul_(1.1)
    (cross_entropy(script.model(x), y, reduction="sum") / (2 * x.size(0))).backward()


def fills_a_table(script, x, y):
    script.values.steps += 1
    script.table[script.values.steps % 4] = script.values.steps
    (script.loss(x, y) + (script.model(x) - script.table.mean(0) / 10).square().mean()).backward()


def counts_in_each_pass(script, x, y):
    """What it counts in values is undone with the torn step."""
    script.values.steps += 1
    (cross_entropy(script.model(x), y, reduction="sum") / int(x.size(0))).backward()
    script.counter.fill_(script.values.steps)


def labels_itself(script, x, y, *, freezes=True):
    script.model.eval()
    if freezes:
        script.model.body[2].bias.requires_grad = False
    with torch.no_grad():
        soft = script.model(x).softmax(1)
    script.model.train()
    out = script.model(x)
    (cross_entropy(out, y) + kl_div(out.log_softmax(1), soft, reduction="batchmean")).backward()
    if freezes:
        script.model.body[2].bias.requires_grad = True


calls_in_other_modes = functools.partial(labels_itself, freezes=False)


def changes_what_it_has_used(script, x, y):
    (script.loss(x, y) + 0 * script.counter).backward()
    script.counter.fill_(1)


def calls_with_other_parameters(script, x, y):
    others = {name: each * 2 for name, each in script.model.named_parameters()}
    cross_entropy(torch.func.functional_call(script.model, others, (x,)), y).backward()


def changes_what_is_not_known(script, x, y):
    torch.nn.functional.relu(script.counter, True)
    script.loss(x, y).backward()


def drops_a_part(script, x, y):
    (script.loss(x, y) + script.head(script.model(x)).square().mean()).backward()
    for parameter in script.model.body[0].parameters():
        parameter.grad = None
    script.head.bias.grad = torch.zeros(3)
    del script.head.weight.grad


def perturbs_its_samples(script, x, y):
    x.requires_grad_()
    script.loss(x, y).backward()
    script.loss(x.detach() + x.grad.sign(), y).backward()
    x.grad = None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return -gradient


def has_a_function_of_its_own(script, x, y):
    out = script.model(x)
    (cross_entropy(out, y) + 0.01 * Reversed.apply(out).square().mean()).backward(retain_graph=True)


def has_a_loss_that_nobody_has_seen(script, x, y):
    """As of a scripted function."""
    out = script.model(x)
    with torch._C.DisableTorchFunction():
        loss = cross_entropy(out, y)
    loss.backward(retain_graph=True)


def each_batch(use):
    """The loop that does this with each batch, and then steps."""

    def loop(script):
        for x, y in script.loader:
            use(script, x, y)
            script.step()

    return loop


AGAIN = {
    asks_before_the_step: (re.escape(ASKED_IN_TORN), True),
    looks_at_each_sample: ("__getitem__ takes the samples of a batch apart", False),
    goes_through_a_batch: ("unbind takes the samples of a batch apart", False),
    cuts_a_batch: ("split takes the samples of a batch apart", False),
    computes_with_a_size: ("size looks at a number before", False),
    counts_in_each_pass: ("size looks at a number before", False),
    fills_a_table: (f"{HERE}: __setitem__ changes a tensor that was there before the batch", False),
    labels_itself: ("changes a tensor that was there before the batch", False),
    changes_what_it_has_used: ("since it was used, a tensor was changed that was there before the batch", True),
    calls_in_other_modes: ("since it was called, the model has been set to another mode", True),
    drops_a_part: (f"{HERE}: gradients are dropped before the step", False),
    perturbs_its_samples: ("looks at the gradient of what comes of the batch", False),
    has_a_function_of_its_own: ("takes what a torch.autograd.Function has made", False),
    has_a_loss_that_nobody_has_seen: ("backward takes a tensor that was not made of this batch", False),
    calls_with_other_parameters: (".* or it was called with other parameters than its own, as by torch.func", True),
    changes_what_is_not_known: ("relu changes a tensor that was there before the batch", False),
}


@pytest.mark.parametrize("use", AGAIN)
def test_what_can_not_be_made_again_is_done_by_the_script_once_more(use):
    """And the journal says why. Others are told of the pass before it is tried, if it is known by then that it takes one."""
    words, is_tried = AGAIN[use]
    (survivor,) = compare(use if use is asks_before_the_step else each_batch(use), loses=True, kind=Observed)
    (warning,) = survivor.job.warnings
    was_made = r"was made by another pass through the script's loop"
    assert re.search(rf"{was_made} \((/.*)?{words}.*\): what the loop counts", warning), warning
    assert survivor.host.participant.position.repeats == {0: 1}
    assert survivor.sent == [{} if is_tried else {0: 1}]


@pytest.mark.parametrize(("use", "more"), [(looks_at_sizes, 1), (computes_with_a_size, 1), (computes_with_a_size, 2)])
def test_all_make_as_many_passes_as_who_has_made_the_most(use, more):
    """Of the workers that are left one can't make the step again, or has made another pass before another worker was lost."""
    seen = []

    class Repeating(Observed):
        def begun(self):
            super().begun()
            self.model.register_forward_pre_hook(lambda *_: seen.append(self.worker))

        def changed(self, state):
            state.values["place"].repeats = {0: more}

    (survivor,) = compare(use if use is looks_at_sizes else each_batch(use), loses=True, kind=Repeating)
    assert seen.count(0) == BATCHES + more
    assert len(survivor.job.warnings) == 1


def test_members_of_a_world_agree_on_repetitions():
    board, places = Board(3), [ScriptPosition() for _ in range(3)]
    places[1].repeats, places[2].repeats = {0: 1, 1: 2}, {0: 1}
    in_threads(lambda rank: places[rank].agree(SumOfThreads(rank, board)), range(3))
    assert [each.repeats for each in places] == [{0: 1, 1: 2}] * 3
    assert (places[0].passes_more(0), places[0].passes_more(1)) == (3, 2)


# -- what else goes with a step that is torn, or is not --


@pytest.mark.parametrize("workers", [1, 2])
def test_the_step_of_one_worker_is_not_torn_and_none_but_its_first_is_noted(workers):
    rests = []

    def loop(script):
        for x, y in script.loader:
            script.loss(x, y).backward()
            rests.append(script.host.open_batches[0].tape.rests)
            script.step()

    run(loop, workers)
    assert rests == ([False, *[True] * (BATCHES - 1)] if workers == 1 else [False] * 2 * BATCHES)


def test_nothing_that_was_computed_of_a_batch_outlives_its_backward_pass():
    """Who accumulates has no memory for the outputs of several batches."""
    alive = []

    def accumulate(script):
        outputs = []
        for x, y in script.loader:
            out = script.model(x)
            outputs.append(weakref.ref(out))
            cross_entropy(out, y).backward()
            del x, y, out
        alive.append(sum(each() is not None for each in outputs))
        script.step()

    run(accumulate)
    assert alive == [0, 0]


def test_what_a_model_counts_is_sent_as_before_the_step_that_is_torn_twice():
    sent = []

    class TornTwice(Observed):
        def changed(self, state):
            sent.append(state.sent()["attributes"]["changed"]["0:"]["calls"])
            if len(sent) == 1:
                self.job.events[0, TORN + 1] = "torn"

    (survivor,) = compare(counts, loses=True, kind=TornTwice)
    assert sent in ([TORN - 1] * 2, [TORN] * 2)
    assert survivor.model.calls == BATCHES


@pytest.mark.parametrize(
    ("dies", "twice"), [((TORN, "before"), 0), ((TORN, "after"), 1), ((8, "before"), 0), ((8, "after"), 1)]
)
def test_what_rank_0_may_not_have_done_its_heir_does(dies, twice):
    """From the parameters of that step, which by then may be another one's for the script."""
    rows, done = [], threading.Event()

    def loop(script):
        def note(step):
            rows.append((step, script.worker, weight.clone()))

        for step, (x, y) in enumerate(script.loader):
            script.loss(x, y).backward()
            script.optimizer.step()
            with torch.no_grad():
                script.model.body[0].weight.mul_(0.9)
            script.optimizer.zero_grad()
            weight = script.model.body[0].weight.detach()
            for when in ("before", "after"):
                if script.worker == 0 and (step, when) == dies:
                    with script.job.turns.others():
                        assert done.wait(30)
                    script.job.lose()
                if when == "before":
                    script.elastic.on_one(note, step) if script.elastic else note(step)
            if script.worker == 1 and step == dies[0]:
                done.set()

    Script(loop).alone()
    expected, rows[:] = [*rows], []
    run(loop)
    first = dies[0] + (dies[1] == "after")
    by = [(step, 0) for step in range(first)] + [(step, 1) for step in range(dies[0], BATCHES)]
    assert sorted((step, worker) for step, worker, _ in rows) == sorted(by)
    assert len(rows) == BATCHES + twice
    for step, _, weight in rows:
        torch.testing.assert_close(weight, expected[step][2], rtol=1e-4, atol=1e-5)


# -- what is told of a loop at its end --


def test_a_loop_that_has_made_no_step_of_its_batches_does_not_succeed():
    def loop(script):
        for _ in script.loader:
            pass
        state = script.host.participant.state
        refused("training has ended without a step, though its loop was given batches", state.require_steps)
        for x, y in script.loader:
            script.loss(x, y).backward()
            script.step()
        state.require_steps()

    assert run(loop, 1)[1] == (None,)


LEFT_OPEN = """
import torch
from torch.utils.data import DataLoader
import elasticdl.elastic.torch as elastic
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(torch.ones(8, 1), batch_size=2))
batches = iter(loader)
model(next(batches)).mean().backward()
optimizer.step()
"""


def test_a_loop_that_is_left_open_says_nothing_at_exit():
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stderr) == (0, "")

"""What scripts do in a plain loop is done as on one device: by several workers, and once where a step is torn."""

import re
import threading
import weakref

import pytest
import torch
from elastic_kit import Board, SumOfThreads, in_threads
from loop_benches import BATCHES, TORN, PlainScript, TwoOptimizers, compare, each_batch, run
from refusal_kit import refused
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn

from elasticdl.elastic.torch_kit.agreements import ScriptPosition

pytestmark = pytest.mark.filterwarnings("ignore")
HERE = r"loop_benches.py:\d+"  # whose are the scripts that are text

# -- what is done once, also where a step is torn: scripts, each from the top of its loop --


COUNTS = (
    "model.alpha = 1 + number / 10; script.values.steps += 1; (loss() * min(script.values.steps / 30, 1)).backward()"
)
SIZES = """
images = x.view(x.shape[0], 2, 4)
images = images.view(images.size(0), -1)
both = model(torch.cat([images, images.flip(1)]))
logits = both[: x.size(0)] + 0.1 * both[x.size(0) :]
targets = zeros(*logits.shape).scatter_(1, y[:, None], 1.0)
own = cross_entropy(logits.view(-1, logits.size(-1)), targets.argmax(1))
(own + 0.1 * both.square().sum() / x.size(0)).backward()
"""
PENALISES = """
x.requires_grad_(True)
out = model(x)
(slope,) = autograd.grad(out.sum(), x, create_graph=True)
(cross_entropy(out, y) + 0.1 * (slope.norm(2, dim=1) - 1).pow(2).mean()).backward()
"""
counts, looks_at_sizes = each_batch(COUNTS), each_batch(SIZES)


def asks_after_the_sum(script):
    for x, y in script.loader:
        out = script.model(x)
        hits, loss = (out.argmax(1) == y).float().mean(), cross_entropy(out, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
        script.counter += script.mean(hits) + script.mean(loss)
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


def has_hooks(script):
    """Called as with DistributedDataParallel, in each pass: right on each part, as the hook is linear."""
    for parameter in script.model.parameters():
        parameter.register_hook(lambda gradient: gradient * (torch.arange(gradient.numel()) % 2).view_as(gradient))
    for x, y in script.loader:
        script.loss(x, y).backward()
        script.step()


ONCE = {
    "an annealing by an attribute of the model, and by a number of the loop's": counts,
    "sums up behind the pass": each_batch("loss().backward(); script.counter += 1; script.table[0].add_(2)"),
    "looks at sizes, as people write it between a loader and a loss": looks_at_sizes,
    "penalises slopes by gradients that are no parameter's": each_batch(PENALISES),
    **{each.__name__: each for each in (asks_after_the_sum, accumulates, has_hooks)},
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("loop", ONCE.values(), ids=ONCE)
def test_it_is_as_on_one_device(loop, workers):
    assert not compare(loop, workers)[0].job.warnings


@pytest.mark.parametrize("loop", ONCE.values(), ids=ONCE)
def test_a_step_that_is_torn_is_made_once(loop):
    (survivor,) = compare(loop, loses=True, kind=Observed)
    assert not survivor.job.warnings
    assert survivor.sent == [{}]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return -gradient


class Observed(PlainScript):
    """``sent``: what others are told of passes made once more, in each world that is entered after a break."""

    function = staticmethod(Reversed.apply)

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
        (averages_statistics, PlainScript, BATCHES),
        (leaves_some_out, PlainScript, BATCHES // 2),
    ],
)
def test_a_batch_without_a_step_is_no_part_of_the_next_one(loop, kind, steps, workers):
    for each in compare(loop, workers, kind=kind):
        assert each.host.participant.state.step == steps
        assert each.job.warnings == []


# -- what can't be made again of what was noted: the script makes another pass --


LABELS = """
model.eval()
with torch.no_grad():
    soft = model(x).softmax(1)
model.train()
out = model(x)
(cross_entropy(out, y) + kl_div(out.log_softmax(1), soft, reduction="batchmean")).backward()
"""
FREEZES = "model.body[2].bias.requires_grad = False", LABELS, "model.body[2].bias.requires_grad = True"
COMPUTES = (
    "model.temperature.data.mul_(1.1); (cross_entropy(model(x), y, reduction='sum') / (2 * x.size(0))).backward()"
)

# What is done with each batch, and why that is not made again.
AGAIN = {
    "out = model(x); stack([cross_entropy(out[i], y[i]) for i in range(x.shape[0])]).mean().backward()": (
        "__getitem__ takes the samples of a batch apart"
    ),
    "own = loss()\nif own > 0: own = own * 2\nown.backward()": f"{HERE}: __bool__ looks at a number before",
    COMPUTES: "size looks at a number before",
    "script.values.steps += 1; (cross_entropy(model(x), y, reduction='sum') / x.size(0).__int__()).backward();"
    "script.counter.fill_(script.values.steps)": "size looks at a number before",
    "script.values.steps += 1; script.table[script.values.steps % 4] = script.values.steps;"
    "(loss() + (model(x) - script.table.mean(0) / 10).square().mean()).backward()": f"{HERE}: __setitem__ changes",
    "\n".join(FREEZES): "changes a tensor that was there before the batch",
    "(loss() + script.head(model(x)).square().mean()).backward(); model.body[0].bias.grad = None;"
    "script.head.bias.grad = zeros(3); del script.head.weight.grad": f"{HERE}: gradients are dropped before the step",
    "x.requires_grad_(); loss().backward(); script.loss(x.detach() + x.grad.sign(), y).backward(); x.grad = None": (
        "looks at the gradient of what comes of the batch"
    ),
    "out = model(x); own = script.function(out);"
    "(cross_entropy(out, y) + own.square().mean() / 100).backward(retain_graph=True)": "takes what a .*Function has made",
    # A loss that nobody has seen, as of a scripted function.
    "out = model(x)\nwith torch._C.DisableTorchFunction(): own = cross_entropy(out, y)\n"
    "own.backward(retain_graph=True)": "backward takes a tensor that was not made of this batch",
    "relu(script.counter, True); loss().backward()": "relu changes a tensor that was there before the batch",
}
TRIED = {
    "(loss() + 0 * script.counter).backward(); script.counter.fill_(1)": "since it was used, a tensor was changed",
    LABELS: "since it was called, the model has been set to another mode",
    "others = {name: each * 2 for name, each in model.named_parameters()};"
    "cross_entropy(torch.func.functional_call(model, others, (x,)), y).backward()": ".* it was called with other",
}


def require_another_pass(survivor, words, is_tried=False):
    """The journal says why. Others are told of it before, if it is known by then that the step takes one."""
    (warning,) = survivor.job.warnings
    was_made = r"was made by another pass through the script's loop"
    assert re.search(rf"{was_made} \((/.*)?{words}.*\): what the loop counts", warning), warning
    assert survivor.host.participant.position.repeats == {0: 1}
    assert survivor.sent == [{} if is_tried else {0: 1}]


@pytest.mark.parametrize("text", [*AGAIN, *TRIED])
def test_what_can_not_be_made_again_is_done_by_the_script_once_more(text):
    (survivor,) = compare(each_batch(text), loses=True, kind=Observed)
    require_another_pass(survivor, (AGAIN | TRIED)[text], text in TRIED)


@pytest.mark.parametrize(("loop", "more"), [(looks_at_sizes, 1), (each_batch(COMPUTES), 1), (each_batch(COMPUTES), 2)])
def test_all_make_as_many_passes_as_who_has_made_the_most(loop, more):
    """Of the workers that are left one can't make the step again, or has made another pass before another worker was lost."""
    seen = []

    class Repeating(Observed):
        def begun(self):
            super().begun()
            self.model.register_forward_pre_hook(lambda *_: seen.append(self.worker))

        def changed(self, state):
            state.values["place"].repeats = {0: more}

    (survivor,) = compare(loop, loses=True, kind=Repeating)
    assert seen.count(0) == BATCHES + more
    assert len(survivor.job.warnings) == 1


@pytest.mark.parametrize("more", [{}, {"name": ["a"]}])
def test_batches_may_be_dicts_and_what_they_hold_beside_tensors_is_not_made_again(more):
    class OfDicts(Observed):
        def __init__(self, loop):
            super().__init__(loop)
            collate = self.loader.collate_fn
            self.loader.collate_fn = lambda samples: dict(zip("xy", collate(samples), strict=True)) | more

    def loop(script):
        for batch in script.loader:
            script.loss(batch["x"], batch["y"]).backward()
            script.step()

    (survivor,) = compare(loop, loses=True, kind=OfDicts)
    if more:
        require_another_pass(survivor, "the batches hold a str beside tensors")
    else:
        assert not survivor.job.warnings


def test_members_of_a_world_agree_on_repetitions():
    board, places = Board(3), [ScriptPosition() for _ in range(3)]
    places[1].repeats, places[2].repeats = {0: 1, 1: 2}, {0: 1}
    in_threads(lambda rank: places[rank].agree(SumOfThreads(rank, board)), range(3))
    assert [each.repeats for each in places] == [{0: 1, 1: 2}] * 3
    assert (places[0].passes_more(0), places[0].passes_more(1)) == (3, 2)


# -- what else goes with a step that is torn, or is not --


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


@pytest.mark.parametrize(("when", "twice"), [("before", 0), ("after", 1)])
def test_what_rank_0_may_not_have_done_its_heir_does(when, twice):
    """From the parameters of that step, which by then may be another one's for the script."""
    rows, done = [], threading.Event()

    def loop(script):
        def note(step):
            rows.append((step, script.worker, script.model.body[0].weight.detach().clone()))

        def die(now):
            if script.worker == 0 and (script.made, now) == (TORN, when):
                with script.job.turns.others():
                    assert done.wait(30)
                script.job.lose()

        for x, y in script.loader:
            script.loss(x, y).backward()
            script.step()
            die("before")
            script.elastic.on_one(note, script.made) if script.elastic else note(script.made)
            die("after")
            if script.worker == 1 and script.made == TORN:
                done.set()

    PlainScript(loop).alone()
    expected, rows[:] = [*rows], []
    run(loop)
    by = [(step, 0) for step in range(1, TORN + twice)] + [(step, 1) for step in range(TORN, BATCHES + 1)]
    assert sorted((step, worker) for step, worker, _ in rows) == sorted(by)
    for step, _, weight in rows:
        torch.testing.assert_close(weight, expected[step - 1][2], rtol=1e-4, atol=1e-5)


def test_a_loop_that_has_made_no_step_of_its_batches_does_not_succeed():
    def loop(script):
        list(script.loader)
        state = script.host.participant.state
        refused("training has ended without a step, though its loop was given batches", state.require_steps)

    run(loop, 1)

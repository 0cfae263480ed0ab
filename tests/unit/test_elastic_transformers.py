"""Hugging Face's Trainer in a world of one: it is transformers' own to the bit, and goes on from its checkpoints."""

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from trainer_benches import OwnJob, arguments
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from elasticdl.elastic.transformers import Trainer, elastic_trainer, patch
from elasticdl.elastic.transformers.elastic_trainer import _to_resume_from
from elasticdl.elastic.transformers.trainer_host import FLAGS, STOPS, TrainerHost


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(elastic_trainer, "runtime", OwnJob())
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def make_texts(samples=37):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 12, (samples,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 32, (length,), generator=generator).tolist()} for length in lengths]


def pad(texts):
    longest = max(len(text["input_ids"]) for text in texts)
    labels = torch.full((len(texts), longest), -100)
    for row, text in zip(labels, texts, strict=True):
        row[: len(text["input_ids"])] = torch.tensor(text["input_ids"])
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels != -100).long(), "labels": labels}


def make_model():
    transformers.set_seed(3)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def make(kind, folder, options=None, **given):
    chosen = {"num_train_epochs": 3, "warmup_steps": 3, "lr_scheduler_type": "linear", "max_grad_norm": 1.0}
    data = {"train_dataset": make_texts(), "eval_dataset": make_texts(11), "data_collator": pad, **given}
    return kind(**{"model": make_model(), "args": arguments(folder, **{**chosen, **(options or {})}), **data})


def assert_same_weights(one, other):
    for mine, its in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, its)


def numbers_of(trainer):
    times = ("_runtime", "_second")
    return [{k: v for k, v in row.items() if not k.endswith(times)} for row in trainer.state.log_history]


@pytest.mark.parametrize(
    "options",
    [
        {"eval_strategy": "epoch"},
        {"gradient_accumulation_steps": 3, "max_grad_norm": 0.3},  # of which the last step of an epoch has two
        {"dataloader_drop_last": True, "max_steps": 7, "lr_scheduler_type": "cosine"},
        {"accelerator_config": {"use_seedable_sampler": False}, "eval_strategy": "epoch", "eval_on_start": True},
        {"include_num_input_tokens_seen": "all", "label_smoothing_factor": 0.1},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss", "eval_strategy": "epoch"},
    ],
)
def test_alone_it_is_transformers_own_to_the_bit(tmp_path, options):
    theirs = make(transformers.Trainer, tmp_path, options)
    theirs.train()
    ours = make(Trainer, tmp_path, options)
    ours.train()
    assert numbers_of(ours) == numbers_of(theirs)
    assert_same_weights(ours, theirs)


def test_a_trainer_of_ones_own_is_patched(tmp_path):
    class Own(transformers.Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            loss = super().compute_loss(model, inputs, **kwargs)
            return (loss[0] * 2, loss[1]) if isinstance(loss, tuple) else loss * 2

    theirs = make(Own, tmp_path)
    theirs.train()
    ours = patch(make(Own, tmp_path))
    assert isinstance(ours, Own)
    assert patch(ours) is ours
    ours.train()
    assert numbers_of(ours) == numbers_of(theirs)


@pytest.mark.parametrize("step", [4, 5, 10])
def test_it_resumes_from_a_checkpoint_of_transformers(tmp_path, step):
    """Within an epoch, or at its end."""
    save = {"save_strategy": "epoch"} if step % 5 == 0 else {"save_strategy": "steps", "save_steps": 2}
    whole = make(transformers.Trainer, tmp_path / "whole", save)
    whole.train()
    resumed = make(Trainer, tmp_path / "resumed", save)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert numbers_of(resumed)[-3:-1] == numbers_of(whole)[-3:-1]
    assert_same_weights(resumed, whole)


def test_a_checkpoint_that_is_being_written_is_not_resumed(tmp_path):
    save = {"save_strategy": "steps", "save_steps": 2}
    whole = make(Trainer, tmp_path, save)
    whole.train()
    latest = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    torn = tmp_path / "checkpoint-1000"
    torn.mkdir()
    (torn / "config.json").write_text("{}")
    resumed = make(Trainer, tmp_path, save)
    resumed.train(resume_from_checkpoint=True)
    assert_same_weights(resumed, whole)
    resumed._elastic.job.session.jobs_place = lambda: (1, 0)
    assert _to_resume_from(resumed, str(latest)) is None, "who comes later is sent the job's state"


def test_what_is_saved_needs_no_elasticdl(tmp_path):
    ours = make(Trainer, tmp_path, {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 1})
    ours.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-15"]
    saved = torch.load(tmp_path / "checkpoint-15" / "training_args.bin", weights_only=False)
    assert type(saved) is TrainingArguments


def test_what_a_worker_that_leaves_would_stop_goes_on_for_the_others():
    control = SimpleNamespace(**dict.fromkeys(FLAGS, True))
    agreements = SimpleNamespace(of_first=lambda own: own)
    of_job = {"job": SimpleNamespace(is_told_to_leave=True), "participant": SimpleNamespace(agreements=agreements)}
    TrainerHost.decide_alike(SimpleNamespace(_trainer=SimpleNamespace(control=control), **of_job))
    assert [name for name in FLAGS if not getattr(control, name)] == [*STOPS]

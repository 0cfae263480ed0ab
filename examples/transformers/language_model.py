"""A causal language model in the manner of Hugging Face's documentation, made elastic by one import.

    python examples/transformers/language_model.py
    elasticdl run --num_workers 2-4 -- python examples/transformers/language_model.py

Texts have unequal lengths, and two batches make one step. Nothing is downloaded: the model is a small GPT-2 from a
configuration, and the texts are made up of numbers.
"""

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from elasticdl.elastic.transformers import Trainer

TOKENS = 48


def make_texts(samples, seed):
    """Each token follows from the one before, most of the time."""
    random = np.random.default_rng(seed)
    texts = []
    for length in random.integers(6, 33, samples):
        text = [int(random.integers(1, TOKENS))]
        while len(text) < length:
            text.append((text[-1] * 5 + 3) % TOKENS if random.random() < 0.8 else int(random.integers(1, TOKENS)))
        texts.append(text)
    return [{"input_ids": text} for text in texts]


def pad(texts):
    longest = max(len(text["input_ids"]) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.long)
    labels = torch.full_like(tokens, -100)
    for row, text in enumerate(texts):
        tokens[row, : len(text["input_ids"])] = labels[row, : len(text["input_ids"])] = torch.tensor(text["input_ids"])
    return {"input_ids": tokens, "attention_mask": (labels != -100).long(), "labels": labels}


def main():
    set_seed(0)
    config = GPT2Config(
        vocab_size=TOKENS,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    args = TrainingArguments(
        output_dir="language_model",
        per_device_train_batch_size=16,  # the global batch, of which two make one step
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        num_train_epochs=4,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=40,
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=make_texts(790, seed=1),
        eval_dataset=make_texts(120, seed=2),
        data_collator=pad,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"perplexity {np.exp(metrics['eval_loss']):.3f}")


if __name__ == "__main__":
    main()

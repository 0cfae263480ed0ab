"""A text classifier in the manner of the Hugging Face course, made elastic by one import.

    python examples/transformers/classify.py                                       # alone
    elasticdl run --num_workers 2-4 -- python examples/transformers/classify.py    # elastically; the same numbers

Nothing is downloaded: the model is a small BERT from a configuration, and the texts are made up of numbers.
"""

import numpy as np
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, set_seed

from elasticdl.elastic.transformers import Trainer

CLASSES = 4


def make_texts(samples, seed):
    """Tokens of which those of one class are more frequent than the others."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, samples)
    lengths = random.integers(12, 25, samples)
    tokens = [
        np.where(random.random(length) < 0.25, 2 + label, random.integers(2, 64, length)).tolist()
        for label, length in zip(labels, lengths, strict=True)
    ]
    return [
        {
            "input_ids": each + [0] * (24 - len(each)),
            "attention_mask": [1] * len(each) + [0] * (24 - len(each)),
            "labels": int(label),
        }
        for each, label in zip(tokens, labels, strict=True)
    ]


def compute_metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    args = TrainingArguments(
        output_dir="classifier",
        per_device_train_batch_size=32,  # the global batch, whatever the number of workers
        per_device_eval_batch_size=128,
        num_train_epochs=6,
        learning_rate=2e-3,
        lr_scheduler_type="linear",
        warmup_steps=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=make_texts(800, seed=1),
        eval_dataset=make_texts(200, seed=2),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"accuracy {metrics['eval_accuracy']:.3f}, loss {metrics['eval_loss']:.4f}")
    trainer.save_model(f"{trainer.args.output_dir}/best")


if __name__ == "__main__":
    main()

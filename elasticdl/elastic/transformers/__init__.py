"""Elastic training for Hugging Face's ``transformers.Trainer``.

    from elasticdl.elastic.transformers import Trainer

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    trainer.train()

The arguments are those of ``transformers.Trainer``. Started by ``elasticdl run --num_workers 2-4 -- python train.py`` it trains
while workers come and go; started by ``python train.py`` it runs alone. See docs/transformers.md.
"""

from __future__ import annotations

from elasticdl.triton_first import require_triton_first

require_triton_first("elasticdl.elastic.transformers")

from elasticdl.elastic.transformers.elastic_trainer import Seq2SeqTrainer, Trainer, patch

__all__ = ["Seq2SeqTrainer", "Trainer", "patch"]

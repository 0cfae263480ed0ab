"""Losses that are no mean over samples, by what autograd knows of them."""

from functools import partial

import pytest
import torch
from refusal_kit import refused
from torch.nn import functional as f

from elasticdl.elastic.torch_kit.passes import require_mean

SAMPLES = 6
OUT = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
LIKE = torch.rand(SAMPLES, 4, generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])
OF_LAYER = torch.nn.Parameter(torch.ones(SAMPLES, 4))
IGNORING = torch.tensor([0, 1, -100, 3, -100, 1])


def looked_at(*losses, **options):
    for loss in losses:
        require_mean(loss, SAMPLES, **options)


OF_TORCH = {
    "cross entropy": lambda reduction: f.cross_entropy(OUT, LABELS, reduction=reduction),
    "of pixels": lambda reduction: f.cross_entropy(OUT.view(2, 4, 3), LABELS.view(2, 3), reduction=reduction),
    "square": lambda reduction: f.mse_loss(OUT, LIKE, reduction=reduction),
    "absolute": lambda reduction: f.l1_loss(OUT, LIKE, reduction=reduction),
    "smooth": lambda reduction: f.smooth_l1_loss(OUT, LIKE, reduction=reduction),
    "binary": lambda reduction: f.binary_cross_entropy(OUT.sigmoid(), LIKE, reduction=reduction),
    "of logits": lambda reduction: f.binary_cross_entropy_with_logits(OUT, LIKE, reduction=reduction),
    "triplets": lambda reduction: f.triplet_margin_loss(OUT, LIKE, LIKE.flip(0), reduction=reduction),
    "by hand": lambda reduction: getattr((OUT - LIKE) ** 2, reduction)(),
    "of samples": lambda reduction: getattr(f.cross_entropy(OUT, LABELS, reduction="none"), reduction)(),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_sum_over_samples_is_refused_and_a_mean_is_not(name):
    loss = OF_TORCH[name]
    penalty = 0.1 * OF_LAYER.abs().sum() + OF_LAYER.pow(2).sum()
    looked_at(loss("mean"), loss("mean") + penalty, loss("sum") / SAMPLES + penalty)
    for whole in (loss("sum"), penalty + loss("sum"), -(-loss("sum")).squeeze()):
        refused("the loss is a sum over the samples", partial(looked_at, whole))
    refused("the loss is a sum", partial(looked_at, loss("sum") * 1024, is_scaled=True))


def test_what_may_be_a_mean_is_not_refused():
    by_weights_that_may_add_up_to_1 = (LIKE[:, 0] * (OUT - LIKE).pow(2).mean(1)).sum()
    divided = (f.cross_entropy(OUT, LABELS, reduction="none") / SAMPLES).sum()
    means = [torch.stack([OUT.mean(), LIKE.mean()]).sum(), OUT.pow(2).sum(1).mean(), OUT[:3].pow(2).sum()]
    by_class = f.cross_entropy(OUT, IGNORING, weight=torch.tensor([1.0, 2.0, 1.0, 1.0]))
    looked_at(by_weights_that_may_add_up_to_1, divided, *means, by_class, LIKE.sum(), None, {"loss": OUT})

"""The callback that multiplies by the number of workers runs as printed in the benchmark report, on Horovod."""

import pytest

hvd = pytest.importorskip("horovod.torch")

from elasticdl.callbacks import LearningRateScheduler  # noqa: E402
from elasticdl.elastic.core.learning_rate import RateControl  # noqa: E402
from elasticdl.job.spec import JobSpec  # noqa: E402
from elasticdl.worker.batch_sizes import rate_rules  # noqa: E402


def callbacks():
    def _schedule(epoch):
        LR = 0.001
        if epoch > 80:
            lr = LR * 0.01
        elif epoch > 60:
            lr = LR * 0.1
        elif epoch > 40:
            lr = LR * 0.2
        elif epoch > 35:
            lr = LR * 0.5
        else:
            lr = LR
        return lr * hvd.size()

    return [LearningRateScheduler(_schedule)]


@pytest.mark.parametrize(("epoch", "rate"), [(0, 0.001), (36, 0.0005), (41, 0.0002), (61, 0.0001), (81, 0.00001)])
def test_the_rate_follows_epoch_and_number_of_workers(monkeypatch, epoch, rate):
    control = RateControl(rate_rules(JobSpec(minibatch_size=8), callbacks()), 0.1, fixed_batch=False)
    for workers in (1, 2, 4):
        monkeypatch.setattr(hvd, "size", lambda workers=workers: workers)
        assert control.target(epoch, workers) == pytest.approx(rate * workers)

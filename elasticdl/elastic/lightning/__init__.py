"""Elastic training for scripts that use Lightning: ``import elasticdl.elastic.lightning``, and ``Trainer(strategy="elastic")``.

Started by ``elasticdl run --num_workers 2-4 -- python train.py`` training goes on while workers come and go; started by
``python train.py`` the script runs alone, as without the strategy. See docs/lightning.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from elasticdl.triton_first import require_triton_first

require_triton_first("elasticdl.elastic.lightning")

from elasticdl.common.errors import UserError, how_to_install
from elasticdl.elastic.lightning.strategy import make_shared_strategy, make_strategy
from elasticdl.elastic.torch_kit.tensors import ElasticContext, own
from elasticdl.elastic.training.runtime import ScriptRuntime

__all__ = ["ElasticModelParallelStrategy", "ElasticStrategy"]

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _register(runtime: ScriptRuntime[ElasticContext]) -> tuple[type[Any], type[Any]]:
    """With the packages that the script has imported; before it has, with those that are installed."""
    packages = [each for each in PACKAGES if each in sys.modules]
    packages = packages or [each for each in PACKAGES if importlib.util.find_spec(each.partition(".")[0])]
    if not packages:
        raise UserError(f"elasticdl.elastic.lightning needs Lightning: {how_to_install('lightning')}")
    made = []
    for package in packages:
        made.append(make_strategy(package, runtime))
        made[-1].register_strategies(importlib.import_module(f"{package}.strategies").StrategyRegistry)
    return made[0], make_shared_strategy(packages[0], runtime)


_single, _shared = _register(own)
ElasticStrategy = _single
"""The class behind ``strategy="elastic"``, for ``Trainer(strategy=ElasticStrategy())``; it takes no arguments.

It is made with the package that the script has imported, ``lightning.pytorch`` or ``pytorch_lightning``. What of a
Trainer can't be had is a `UserError` of one line, raised by ``Trainer(...)`` or ``fit``.
"""
ElasticModelParallelStrategy = _shared
"""As `ElasticStrategy`, for workers of several processes, which share one model: Lightning's ModelParallelStrategy, whose arguments it takes.

See docs/sharded_models.md.
"""

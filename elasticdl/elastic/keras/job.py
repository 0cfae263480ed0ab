"""The job that a script of one's own takes part in with Keras."""

from __future__ import annotations

from elasticdl.elastic.keras.backend import seed_keras
from elasticdl.elastic.keras.context import connect
from elasticdl.elastic.keras.device import count_gpus
from elasticdl.elastic.keras.fit_stages import Stages
from elasticdl.elastic.script.runtime import ScriptRuntime

own = ScriptRuntime(connect, seed_keras, count_gpus)
stages = Stages()

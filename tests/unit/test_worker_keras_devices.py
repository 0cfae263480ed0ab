"""TensorFlow is told of its devices before it uses them, wherever the module imports it."""

import pytest
import tensorflow as tf
from worker_keras_kit import spec_maker
from worker_kit import function

from elasticdl.common.errors import UserError
from elasticdl.elastic.keras.backend import prepare_devices
from elasticdl.worker import check
from elasticdl.worker.frameworks import build_model, set_defaults
from elasticdl.worker.zoo import load_module

GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


class Devices:
    """A listing of two GPUs, which can be set up until one has been used."""

    def __init__(self):
        self.growth = dict.fromkeys(("GPU:0", "GPU:1"))
        self.used = False
        self.happened = []

    def set_growth(self, gpu, enable):
        if self.used:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        self.growth[gpu] = enable
        self.happened.append(f"growth of {gpu}")


@pytest.fixture
def devices(monkeypatch):
    made = Devices()
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: list(made.growth))
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", made.growth.get)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", made.set_growth)
    return made


@pytest.fixture
def make_spec(tmp_path, monkeypatch):
    return spec_maker(tmp_path, monkeypatch)


def test_before_a_module_that_imports_it_builds_its_model(devices, make_spec):
    module = load_module(make_spec(function("custom_model()", "return happened.append('model')")))
    module.custom_model.__globals__["happened"] = devices.happened
    build_model(module, 0)
    assert devices.happened == ["growth of GPU:0", "growth of GPU:1", "model"]


@pytest.mark.parametrize("told_before", [True, False])
def test_devices_that_are_used_already_are_left_alone(devices, told_before):
    if told_before:
        prepare_devices()
    devices.used = True
    prepare_devices()
    assert devices.happened == ["growth of GPU:0", "growth of GPU:1"] * told_before


def test_the_environment_says_so_before_anything_of_the_module_is_imported(make_spec, monkeypatch):
    monkeypatch.delenv(GROWTH, raising=False)
    tell = f"\nimport os\ntold = os.environ.get('{GROWTH}')\n"
    with pytest.raises(UserError, match="told: true"):
        check.check(make_spec(tell + function("custom_model()", "raise ValueError(f'told: {told}')")))


def test_what_the_user_has_set_stays():
    environ = {GROWTH: "false"}
    set_defaults(environ)
    assert (environ[GROWTH], environ["KERAS_BACKEND"]) == ("false", "tensorflow")

"""TensorFlow is told of its devices before it uses them, wherever the module imports it."""

import sys
import uuid

import pytest
import tensorflow as tf
from worker_keras_kit import MODULE
from worker_kit import write_zoo

from elasticdl.common.errors import UserError
from elasticdl.elastic.keras.backend import prepare_devices
from elasticdl.job.spec import JobSpec
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


def module_with(tmp_path, monkeypatch, extra):
    monkeypatch.setattr("sys.path", list(sys.path))
    name = f"zoo_{uuid.uuid4().hex}"
    write_zoo(tmp_path / "zoo", extra, MODULE, name)
    return JobSpec(model_zoo=str(tmp_path / "zoo"), model_def=name)


def test_before_a_module_that_imports_it_builds_its_model(devices, tmp_path, monkeypatch):
    spec = module_with(tmp_path, monkeypatch, "\ndef custom_model():\n    return happened.append('model')\n")
    module = load_module(spec)
    module.custom_model.__globals__["happened"] = devices.happened
    build_model(module, 0)
    assert devices.happened == ["growth of GPU:0", "growth of GPU:1", "model"]


def test_devices_that_a_model_is_on_already_are_left_alone(devices):
    devices.used = True
    prepare_devices()
    assert devices.happened == []


def test_once_is_enough(devices):
    prepare_devices()
    devices.used = True
    prepare_devices()
    assert devices.happened == ["growth of GPU:0", "growth of GPU:1"]


def test_the_environment_says_so_before_anything_of_the_module_is_imported(tmp_path, monkeypatch):
    monkeypatch.delenv(GROWTH, raising=False)
    tell = f"\nimport os\ntold = os.environ.get('{GROWTH}')\ndef custom_model():\n    raise ValueError(f'told: {{told}}')\n"
    with pytest.raises(UserError, match="told: true"):
        check.check(module_with(tmp_path, monkeypatch, tell))


def test_what_the_user_has_set_stays(monkeypatch):
    environ = {GROWTH: "false"}
    set_defaults(environ)
    assert environ[GROWTH] == "false"
    assert environ["KERAS_BACKEND"] == "tensorflow"

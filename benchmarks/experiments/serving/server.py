"""One replica of the inference service, as a container runs it.

    POST /predict    3072 bytes, an image of 32 x 32 x 3; the answer is {"class": N}
    GET  /health     200 while it takes requests

A GPU serves one request at a time; others wait. A simulated one computes on the CPU and then sleeps until the time of a request
on a GPU has passed. SIGTERM: it is unhealthy at once, still takes requests for a moment, as whoever sends them may
not know yet, then takes no more, finishes what is under way, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

PIXELS = 3 * 32 * 32
PORT = 8501
PREDICT, HEALTH = "/predict", "/health"
LINGER_SECONDS = 1.0
FINISH_SECONDS = 20.0
Classify = Callable[[bytes], int]  # of one image, 32 x 32 x 3 bytes: its class


class Replica:
    """Made within a running loop. ``seconds``: what a request takes on a simulated GPU; 0: the GPU is real."""

    def __init__(self, classify: Classify, seconds: float) -> None:
        self._classify = classify
        self._seconds = seconds
        self._gpu = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "gpu")
        self.leaving = asyncio.Event()

    async def serve(self, host: str, port: int, linger: float = LINGER_SECONDS) -> None:
        """Until ``leaving`` is set, and what is under way then is done."""
        app = web.Application()
        app.add_routes([web.post(PREDICT, self._predict), web.get(HEALTH, self._health)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=FINISH_SECONDS)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            await self.leaving.wait()
            await asyncio.sleep(linger)
        finally:
            await runner.cleanup()
            self._thread.shutdown()

    async def _predict(self, request: web.Request) -> web.Response:
        image = await request.read()
        if len(image) != PIXELS:
            raise web.HTTPBadRequest(text=f"{len(image)} bytes: an image has {PIXELS}")
        loop = asyncio.get_running_loop()
        async with self._gpu:
            until = loop.time() + self._seconds
            found = await loop.run_in_executor(self._thread, self._classify, image)
            await asyncio.sleep(until - loop.time())
        return web.json_response({"class": found})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.leaving.is_set() else 200)


def ensure_exported(folder: Path, seed: int) -> None:
    """Export a SavedModel unless it is there. The folder appears whole; of several at once one makes it.

    It is the model zoo's ResNet20 with the weights that a seed gives. What it says of an image is of no worth, untrained as it is;
    what it costs is that of any ResNet20.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            _export(scratch, seed)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _export(folder: Path, seed: int) -> None:
    from elasticdl.tensorflow import keras, tf
    from model_zoo.cifar10 import resnet20_keras

    keras.utils.set_random_seed(seed)
    model = resnet20_keras.custom_model()
    signature = [tf.TensorSpec((None, 32, 32, 3), tf.float32)]
    model.export(str(folder), format="tf_saved_model", input_signature=signature, verbose=False)


def load(folder: Path) -> Classify:
    """Ready for the first request: what is made at the first call is made here."""
    import numpy as np

    from elasticdl.tensorflow import tf
    from model_zoo.cifar10.recipe import DEVIATION, MEAN

    loaded: Any = tf.saved_model.load(str(folder))
    mean, deviation = np.array(MEAN, np.float32), np.array(DEVIATION, np.float32)

    def classify(image: bytes) -> int:
        pixels = np.frombuffer(image, np.uint8).reshape(1, 32, 32, 3).astype(np.float32)
        # The signature lives no longer than its model, which this function keeps.
        (scores,) = loaded.signatures["serving_default"](tf.constant((pixels - mean) / deviation)).values()
        return int(np.argmax(scores.numpy()[0]))

    classify(bytes(PIXELS))
    return classify


async def _run(classify: Classify, args: argparse.Namespace) -> None:
    replica = Replica(classify, args.seconds)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, replica.leaving.set)
    await replica.serve(args.host, args.port)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="SavedModel; made there if it is not")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, if it is made")
    parser.add_argument("--seconds", type=float, default=0.0, help="of a request on a simulated GPU (0: a real one)")
    parser.add_argument("--host", default=os.environ.get("POD_IP", "127.0.0.1"), help="address to listen at ($POD_IP)")
    parser.add_argument("--port", type=int, default=PORT)
    args = parser.parse_args()
    ensure_exported(args.model, args.seed)
    asyncio.run(_run(load(args.model), args))
    return 0


if __name__ == "__main__":
    sys.exit(main())

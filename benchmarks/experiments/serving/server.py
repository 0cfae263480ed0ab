"""One replica of the inference service, as a container runs it.

    POST /predict    3072 bytes, an image of 32 x 32 x 3; the answer is {"class": N}
    GET  /health     200 while it takes requests

A GPU serves one request at a time; others wait. A simulated one computes on the CPU and then sleeps until the time of a request
on a GPU has passed. SIGTERM: it is unhealthy at once, still takes requests for a moment, as whoever sends them may
not know yet, then takes no more, finishes what is under way, and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

PIXELS = 3 * 32 * 32
PORT = 8501
PREDICT, HEALTH = "/predict", "/health"
LINGER_SECONDS = 1.0
FINISH_SECONDS = 20.0
Classify = Callable[[bytes], int]  # of one image, 32 x 32 x 3 bytes: its class


class Replica(ThreadingTCPServer):
    """``seconds``: what a request takes on a simulated GPU; 0: the GPU is real."""

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], classify: Classify, seconds: float) -> None:
        super().__init__(address, _Handler)
        self._classify = classify
        self._seconds = seconds
        self._gpu = threading.Lock()
        self.leaving = threading.Event()

    def serve(self, linger: float = LINGER_SECONDS) -> None:
        """Until ``leaving`` is set, and what is under way then is done."""
        threading.Thread(target=self.serve_forever, args=(0.05,)).start()
        self.leaving.wait()
        time.sleep(linger)
        self.shutdown()
        self.server_close()

    def predict(self, image: bytes) -> int:
        with self._gpu:
            until = time.monotonic() + self._seconds
            found = self._classify(image)
            time.sleep(max(0.0, until - time.monotonic()))
        return found


class _Handler(BaseHTTPRequestHandler):
    server: Replica

    def do_POST(self) -> None:
        image = self.rfile.read(int(self.headers["Content-Length"]))
        if len(image) == PIXELS:
            self._answer(200, {"class": self.server.predict(image)})
        else:
            self._answer(400, f"{len(image)} bytes: an image has {PIXELS}")

    def do_GET(self) -> None:
        self._answer(503 if self.server.leaving.is_set() else 200, {})

    def _answer(self, status: int, content: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, format: str, *args: object) -> None:
        """No line for each request."""


def load(seed: int) -> Classify:
    """The model zoo's ResNet20 with the weights that a seed gives, ready for the first request.

    What it says of an image is of no worth, untrained as it is; what it costs is that of any ResNet20.
    """
    import numpy as np

    from elasticdl.tensorflow import keras, tf
    from model_zoo.cifar10 import resnet20_keras
    from model_zoo.cifar10.recipe import DEVIATION, MEAN

    keras.utils.set_random_seed(seed)
    model: Any = resnet20_keras.custom_model()
    compute = tf.function(lambda images: model(images, training=False))
    mean, deviation = np.array(MEAN, np.float32), np.array(DEVIATION, np.float32)

    def classify(image: bytes) -> int:
        pixels = np.frombuffer(image, np.uint8).reshape(1, 32, 32, 3).astype(np.float32)
        return int(np.argmax(compute(tf.constant((pixels - mean) / deviation)).numpy()[0]))

    classify(bytes(PIXELS))  # what is made at the first call
    return classify


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--seconds", type=float, default=0.0, help="of a request on a simulated GPU (0: a real one)")
    parser.add_argument("--host", default=os.environ.get("POD_IP", "127.0.0.1"), help="address to listen at ($POD_IP)")
    parser.add_argument("--port", type=int, default=PORT)
    args = parser.parse_args()
    replica = Replica((args.host, args.port), load(args.seed), args.seconds)
    signal.signal(signal.SIGTERM, lambda *_: replica.leaving.set())
    replica.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())

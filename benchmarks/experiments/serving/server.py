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
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from benchmarks.experiments.serving import model
from benchmarks.experiments.serving.model import PIXELS, Classify

PORT = 8501
PREDICT, HEALTH = "/predict", "/health"
LINGER_SECONDS = 1.0
FINISH_SECONDS = 20.0


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
    model.ensure_exported(args.model, args.seed)
    asyncio.run(_run(model.load(args.model), args))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How long after a SIGKILL anybody else can know of it: until the killed process's connections end.

    python -m benchmarks.noticing [--repetitions 10]

Linux frees a process's memory before it closes the process's sockets. So this is the least that survivors of a worker wait, whatever they do.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import time

from benchmarks.harness import Parser, Results, add_out, show_summaries, summarise
from benchmarks.processes import scratch

CONNECT = (
    "import socket, sys, time; made = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); made.sendall(b'x')"
)
TRAIN = """
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
while True:
    optimizer.zero_grad()
    model(torch.randn(64, 512)).sum().backward()
    optimizer.step()
"""
PROGRAMS = {
    "Python alone": f"{CONNECT}\ntime.sleep(600)",
    "with torch imported": f"import torch\n{CONNECT}\ntime.sleep(600)",
    "training four million parameters": f"import torch\n{CONNECT}\n{TRAIN}",
}
START_SECONDS = 60.0
SETTLE_SECONDS = 0.5  # of the program, before it is killed


def main() -> int:
    args = parse()
    results = Results("noticing", args.out)
    summaries = {}
    for name, program in PROGRAMS.items():
        seconds = [once(program) for _ in range(args.repetitions)]
        summaries[name] = {"ms until its connections end": summarise(1e3 * each for each in seconds)}
        results.add("summary", program=name, seconds=summarise(seconds))
    show_summaries("After a SIGKILL", summaries)
    print(f"results: {results.path}")
    return 0


def parse() -> argparse.Namespace:
    parser = Parser("noticing", __doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    add_out(parser)
    return parser.parse_args()


def once(program: str) -> float:
    """Seconds from the signal until the other end of a connection has read its end."""
    with scratch() as processes, socket.create_server(("127.0.0.1", 0)) as listening:
        process = processes.start("killed", [sys.executable, "-c", program, str(listening.getsockname()[1])])
        listening.settimeout(START_SECONDS)
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(START_SECONDS)
            connection.recv(1)
            time.sleep(SETTLE_SECONDS)
            killed = time.perf_counter()
            process.send_signal(signal.SIGKILL)
            connection.recv(1)
            return time.perf_counter() - killed


if __name__ == "__main__":
    sys.exit(main())

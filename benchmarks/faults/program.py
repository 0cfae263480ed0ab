"""A plain training loop into which a fault is planted.

    program.py FOLDER FAULT VICTIM [--loader_processes N]

The worker VICTIM has the fault once the file FOLDER/begin is there; it then writes FOLDER/began, so that the moment is known.
Each fault is a function of its own, whose name is what should be named.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import elasticdl.elastic.torch as elastic

SAMPLES, BATCH, EPOCHS = 240, 24, 100_000
WIDTH, PRODUCTS = 512, 4  # of matrices, in each forward pass: some 30 ms
FOR_EVER = 100_000
LIBC = ctypes.CDLL(None, use_errno=True)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    with lock, lock:
        pass


def spin() -> None:
    while True:
        pass


def hold_pythons_lock() -> None:
    ctypes.PyDLL(None).sleep(FOR_EVER)


def hang_in_c() -> None:
    ctypes.CDLL(None).sleep(FOR_EVER)


def search_for_ever() -> None:
    re.match(r"(a+)+b", "a" * 60)  # holds Python's lock, as a compiler written in C may


def compile_for_ever() -> None:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(100000)"], check=True)


def read_from_a_dead_mount() -> None:
    """A stand-in for NFS whose server is gone: nobody ever writes into the pipe."""
    path = FOLDER / f"mount-{os.getpid()}"
    os.mkfifo(path)
    path.read_bytes()


def receive_for_ever() -> None:
    """From a storage server that has accepted the request and says nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.recv(1)


def swallow_errors() -> None:
    while True:
        try:
            fetch_what_is_gone()
        except OSError:
            time.sleep(0.01)


def fetch_what_is_gone() -> None:
    (FOLDER / "gone").read_bytes()


def print_into_a_full_pipe() -> None:
    _, writer = os.pipe()  # whoever should read it does not
    os.dup2(writer, 1)
    while True:
        print("x" * 4096, flush=True)


def touch_memory_that_never_comes() -> None:
    """As memory that was swapped out to a disk which does not answer: the kernel waits for somebody to bring the page."""
    uffd = LIBC.syscall(323, os.O_CLOEXEC)  # userfaultfd, on x86-64
    if uffd < 0:
        raise OSError(ctypes.get_errno(), "userfaultfd")
    LIBC.ioctl(uffd, ctypes.c_ulong(0xC018AA3F), ctypes.create_string_buffer(struct.pack("QQQ", 0xAA, 0, 0)))
    area = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    region = ctypes.create_string_buffer(struct.pack("QQQQ", address, 1 << 20, 1, 0))
    if LIBC.ioctl(uffd, ctypes.c_ulong(0xC020AA00), region):
        raise OSError(ctypes.get_errno(), "UFFDIO_REGISTER")
    area[0]


def note_begin(folder: Path) -> None:
    aside = folder / f".began-{os.getpid()}"
    aside.write_text(str(time.time()))
    aside.rename(folder / "began")


class Points(Dataset):  # type: ignore[type-arg]
    """In processes that load data this file is imported anew, and has no arguments."""

    def __init__(self, fault: str, folder: Path) -> None:
        self.fault = fault
        self.folder = folder

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.fault and (self.folder / "begin").exists():
            if not (self.folder / "began").exists():
                note_begin(self.folder)
            if self.fault == "load_behind_a_lock":
                wait_for_a_lock()
            time.sleep(0.01)  # load_slowly
        return torch.linspace(-1, 1, 8) * (index % 13), index % 3


class Work(torch.nn.Module):
    """Takes time, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.eye(WIDTH)  # no parameter, so nobody reduces it

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product = self.matrix
        for _ in range(PRODUCTS):
            product = product @ self.matrix
        return inputs * product[0, 0]


def train(fault: str, is_victim: bool, loader_processes: int) -> None:
    torch.manual_seed(0)
    in_loader = is_victim and fault in ("load_behind_a_lock", "load_slowly")
    loader = DataLoader(
        Points(fault if in_loader else "", FOLDER),
        batch_size=BATCH,
        num_workers=loader_processes,
        persistent_workers=loader_processes > 0,
    )
    model = torch.nn.Sequential(Work(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if not is_victim or in_loader or not (FOLDER / "begin").exists():
                if fault == "skip_a_collective":
                    elastic.mean(inputs.mean())
                continue
            note_begin(FOLDER)
            if own := globals().get(fault):
                own()
            is_victim = fault == "skip_a_collective"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("fault")
    parser.add_argument("victim", type=int)
    parser.add_argument("--loader_processes", type=int, default=0)
    args = parser.parse_args()
    FOLDER = args.folder
    train(args.fault, int(os.environ["ELASTICDL_WORKER_ID"]) == args.victim, args.loader_processes)

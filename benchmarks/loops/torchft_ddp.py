"""The loop that `benchmarks.rescale` runs under torchft: one process per replica group; a failed step is made again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo  # type: ignore[import-not-found]

from benchmarks.loops.peer_common import Batches, parse
from benchmarks.loops.steplog import StepLog
from benchmarks.torch_models import make_model, make_optimizer

TIMEOUT = timedelta(seconds=30)


def main() -> None:
    args = parse(replica=True)
    torch.set_num_threads(1)
    model = make_model(args.model)
    optimizer = make_optimizer(model)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=save,
        use_async_quorum=False,
        timeout=TIMEOUT,
        replica_id=f"replica-{args.replica}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    parallel = DistributedDataParallel(manager, model)
    batches, log = Batches(args.model), StepLog(args.folder)
    while True:
        manager.start_quorum()
        size = manager.num_participants()
        images, labels = batches.of(manager.current_step(), manager.participating_rank() or 0, size)
        optimizer.zero_grad()
        cross_entropy(parallel(images), labels).backward()  # type: ignore[no-untyped-call]
        if manager.should_commit():
            optimizer.step()
            log.step(manager.current_step(), str(size), size)


if __name__ == "__main__":
    main()

"""The train loader: of each of its batches, which are the global ones, this worker loads its part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from elasticdl.elastic.torch_kit.data.own_loader import OwnLoader
from elasticdl.elastic.training.children import require_guard

if TYPE_CHECKING:
    from elasticdl.elastic.lightning.fit_host import FitHost


def start_safely(loader: Any) -> None:
    """A fork would take the session's threads and locks along into the processes that load data."""
    if isinstance(loader, DataLoader) and loader.num_workers and loader.multiprocessing_context is None:
        require_guard(loader.num_workers)
        loader.multiprocessing_context = "forkserver"


class TrainLoader:
    """The script's own loader, as far as Lightning can tell."""

    def __init__(self, loader: DataLoader[Any], host: FitHost, who: str) -> None:
        self.batches = OwnLoader(loader, who)
        self._loader = loader
        self._host = host
        self._is_unused = False  # the last iterator: no batch was asked of it

    def __len__(self) -> int:
        """Batches of an epoch, whatever the number of workers."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # Lightning would keep the state of a loader that has one; this worker's is not the job's.
        if name.startswith("__") or name in ("state_dict", "load_state_dict") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        # The first versions of Lightning 2.5 ask for two iterators where they resume. With processes that load, torch draws the
        # order of samples for the first one, too, and otherwise with the first batch.
        if self._is_unused and self._loader.num_workers:
            self.batches.order_of(0)
        self._is_unused = True
        self.batches.draws.draw_seed()
        return self._epoch()

    def _epoch(self) -> Iterator[Any]:
        self._is_unused = False
        number = self._host.begin_epoch(self.batches)
        yield from self._host.participant.batches(number)

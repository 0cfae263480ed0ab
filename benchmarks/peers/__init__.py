"""Elastic frameworks, measured beside elasticdl: `port` is what each adapter offers, `run` disturbs any of them.

PEERS are the others; SYSTEMS has elasticdl too, as it looks through the same port.

An adapter is left out, with a word about it, where its software is not installed. torchrun and horovodrun come with
elasticdl's own requirements, in the same versions; `setup.sh` makes a virtual environment for torchft.
"""

from collections.abc import Callable

from benchmarks.peers.elasticdl import ElasticDl
from benchmarks.peers.horovodrun import HorovodRun
from benchmarks.peers.port import Peer
from benchmarks.peers.torchft import TorchFt
from benchmarks.peers.torchrun import TorchRun

PEERS: dict[str, Callable[[], Peer]] = {"torchrun": TorchRun, "horovodrun": HorovodRun, "torchft": TorchFt}
SYSTEMS: dict[str, Callable[[], Peer]] = {"elasticdl": ElasticDl, **PEERS}

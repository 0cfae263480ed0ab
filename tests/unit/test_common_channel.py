"""The options of connections are options."""

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from elasticdl.common.channel import CLIENT_OPTIONS, SERVER_OPTIONS


@pytest.mark.parametrize("name", sorted({name for name, _ in (*CLIENT_OPTIONS, *SERVER_OPTIONS)}))
def test_grpc_knows_the_option(name):
    """It takes any name and says nothing: one that is misspelt has no effect, as pings that then count as an attack."""
    assert name.encode() + b"\0" in Path(cygrpc.__file__).read_bytes()

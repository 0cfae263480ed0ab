"""Who may call what, and what a master's port is opened with."""

import pytest

from elasticdl.common.credentials import Role, Token
from elasticdl.master.shell.calls import ALLOWED, TokenAccess
from elasticdl.proto import elasticdl_pb2 as pb


def test_the_table_knows_every_call_and_no_other():
    """A new call is refused to everybody until it is decided here who may make it."""
    assert set(ALLOWED) == {method.name for method in pb.DESCRIPTOR.services_by_name["Master"].methods}


def test_workers_and_their_agents_have_their_session_and_nothing_else_and_owners_all_the_rest():
    assert {name for name, roles in ALLOWED.items() if Role.WORKER in roles} == {"Session", "Attend"}
    assert {name for name, roles in ALLOWED.items() if Role.OWNER in roles} == set(ALLOWED) - {"Session", "Attend"}
    assert not {Role.METRICS, Role.MASTER} & frozenset().union(*ALLOWED.values())


class NoServer:
    """Fails whoever would listen."""


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:50001"])
def test_a_token_is_never_sent_over_a_network(address):
    with pytest.raises(ValueError, match="a token must not travel in the clear"):
        TokenAccess(Token("secret")).add_port(NoServer(), address)

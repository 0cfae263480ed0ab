"""How a connection to a master is opened, by the command line and by workers alike."""

from __future__ import annotations

import grpc

from elasticdl.common.credentials import Credentials, Identity, Role, Token
from elasticdl.common.handshake import identify

TOKEN_KEY = "elasticdl-token"  # under which each call carries the token

# A master whose node is gone sends no farewell: without pings a stream would wait for it for a quarter of an hour.
PING_SECONDS = 20
PING_TIMEOUT_SECONDS = 20

CLIENT_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.enable_http_proxy", 0),  # a master is on this machine or in this cluster, whatever http_proxy says
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", PING_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
    ("grpc.http2.max_pings_without_data", 0),  # any number: a job may be quiet for hours
)
SERVER_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.so_reuseport", 0),  # else a second master could take the same port unnoticed
    ("grpc.http2.min_ping_interval_without_data_ms", PING_SECONDS * 500),  # else pings count as an attack
)


def open_channel(address: str, credentials: Credentials) -> grpc.Channel:
    """A channel to the master at ``host:port``. Certificates are read now: open another to use newer ones.

    Raises:
        UserError: the certificate is unfit to call with, as one that has expired.
    """
    if isinstance(credentials, Token):
        return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
    job = identify(credentials).job
    name = ("grpc.ssl_target_name_override", Identity(Role.MASTER, job).dns_name)
    files = credentials.read()
    tls = grpc.ssl_channel_credentials(files.ca, files.key, files.certificate)
    return grpc.secure_channel(address, tls, options=(*CLIENT_OPTIONS, name))


def metadata(credentials: Credentials) -> tuple[tuple[str, str], ...]:
    """What each call must carry."""
    return ((TOKEN_KEY, credentials.value),) if isinstance(credentials, Token) else ()

"""How a connection to a master is opened; whose a certificate is; and why a master and a caller will never come together.

gRPC itself writes lines about a failed TLS handshake to the terminal, and tries again. The checks here come first. They find
the causes that trying again does not cure, and tell them in a person's words. They use the standard library alone and send no
token. They protect nothing: TLS itself does.
"""

from __future__ import annotations

import json
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from elasticdl.common.credentials import CA, CERTIFICATE, KEY, Credentials, Identity, Role, TlsFolder, Token
from elasticdl.common.errors import UnreachableError, UserError

FILE = "file:"
TOKEN_KEY = "elasticdl-token"  # under which each call carries the token

# A master whose node is gone sends no farewell: without pings a stream would wait for it for a quarter of an hour.
PING_SECONDS = 20
PING_TIMEOUT_SECONDS = 20
# Of calls that are not taken up yet, gRPC may refuse those above 1,000, or after 30 s: all workers of a job may come at once.
MOST_PENDING = 20_000
LONGEST_PENDING_SECONDS = 300

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
    ("grpc.server.max_pending_requests", MOST_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING),
    ("grpc.server_max_unrequested_time_in_server", LONGEST_PENDING_SECONDS),
)
TIMEOUT = 5.0  # seconds

# From OpenSSL's x509_vfy.h; Python names neither.
NOT_YET_VALID, HAS_EXPIRED = 9, 10
FLIGHTS = 2  # of each side, after which a handshake is over
ONE_SECRET = f"take all of {CA}, {CERTIFICATE} and {KEY} from one Secret of the job"


def address_of(master: str) -> str:
    """Where a master is at the moment: ``host:port``, or as a file says whose path comes after ``file:``.

    Masters of a batch system come up on one machine or another, and write there where they are (`elasticdl.job.jobdir`).

    Raises:
        UnreachableError: the file is not there, or says nothing: no master is up.
    """
    if not master.startswith(FILE):
        return master
    path = master.removeprefix(FILE)
    try:
        return str(json.loads(Path(path).read_text())["address"])
    except OSError as error:
        raise UnreachableError(f"no master is up: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UnreachableError(f"no master is up: {path} holds no address") from None


def own_address(master: str) -> str:
    """The address of this machine from which it reaches a master (see `address_of`), and so by which others there reach it.

    Raises:
        UnreachableError: no master is up, or there is no way to it.
    """
    host, _, port = address_of(master).rpartition(":")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:  # connecting a datagram socket sends nothing
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UnreachableError(f"no way to the master at {host}: {error.strerror}") from None


def open_channel(address: str, credentials: Credentials) -> grpc.Channel:
    """A channel to a master (see `address_of`). Certificates are read now: open another to use newer ones.

    Raises:
        UnreachableError: no master is up.
        UserError: the certificate is unfit to call with, as one that has expired.
    """
    address = address_of(address)
    if isinstance(credentials, Token):
        return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
    tls, options = _tls(credentials)
    return grpc.secure_channel(address, tls, options=options)


def open_aio_channel(address: str, credentials: Credentials) -> grpc.aio.Channel:
    """As `open_channel`, for an event loop."""
    address = address_of(address)
    if isinstance(credentials, Token):
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    tls, options = _tls(credentials)
    return grpc.aio.secure_channel(address, tls, options=options)


def _tls(credentials: TlsFolder) -> tuple[grpc.ChannelCredentials, tuple[tuple[str, str | int], ...]]:
    job = identify(credentials).job
    name = ("grpc.ssl_target_name_override", Identity(Role.MASTER, job).dns_name)
    files = credentials.read()
    return grpc.ssl_channel_credentials(files.ca, files.key, files.certificate), (*CLIENT_OPTIONS, name)


def metadata(credentials: Credentials) -> tuple[tuple[str, str], ...]:
    """What each call must carry."""
    return ((TOKEN_KEY, credentials.value),) if isinstance(credentials, Token) else ()


def identify(tls: TlsFolder, *, serves: bool = False) -> Identity:
    """Whose the certificate in a folder is, found by shaking hands with oneself.

    ``serves``: it is to be a master's, and not a caller's.

    Raises:
        UserError: it is unreadable, has expired, or its own authority does not vouch for it.
    """
    client, server = _client_context(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    verifier = client if serves else server
    tls.read()  # its error is the better one
    try:
        for context in (client, server):
            context.load_cert_chain(tls.certificate, tls.key, password="")  # else a locked key asks the terminal
        verifier.load_verify_locations(tls.ca)
        verifier.verify_mode = ssl.CERT_REQUIRED
        (name,) = _shake_hands(client, server, verifier)
        return Identity.from_dns_name(name)
    except ssl.SSLCertVerificationError as error:
        raise UserError(f"{tls.certificate} {_judge(error)}") from None
    except OSError as error:
        reason = str(error.reason if isinstance(error, ssl.SSLError) else error.strerror).lower().replace("_", " ")
        raise UserError(f"{tls.path} does not hold a certificate and its key ({reason}): {ONE_SECRET}") from None
    except ValueError:
        raise UserError(f"{tls.certificate} was not made for a job of elasticdl: {ONE_SECRET}") from None


def refusal(address: str, credentials: Credentials) -> str | None:
    """Why a master (see `address_of`) and a caller with these credentials will never come together.

    None if nothing of the kind was found, as with a master that is not there.
    """
    if isinstance(credentials, Token):
        return None  # a master that refuses it says so itself
    context = _client_context()
    context.check_hostname, context.verify_mode = True, ssl.CERT_REQUIRED
    try:
        host, _, port = address_of(address).rpartition(":")
        job = identify(credentials).job
        context.load_cert_chain(credentials.certificate, credentials.key, password="")
        context.load_verify_locations(credentials.ca)
        with (
            socket.create_connection((host.strip("[]"), int(port)), TIMEOUT) as plain,
            context.wrap_socket(plain, server_hostname=Identity(Role.MASTER, job).dns_name),
        ):
            pass
    except UserError as error:
        return str(error)
    except ssl.SSLCertVerificationError:
        return (
            f"it is not the master of the job {job} that the certificates here were made for: another job of that name, or one "
            "whose Secrets were replaced while it ran"
        )
    except (UnreachableError, OSError):  # no master is up, or TLS fails for a reason that may pass
        pass
    return None


def _client_context() -> ssl.SSLContext:
    """A context that verifies nothing, until it is told to."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _shake_hands(
    client_context: ssl.SSLContext, server_context: ssl.SSLContext, verifier: ssl.SSLContext
) -> tuple[str, ...]:
    """The DNS names in the certificate that the verifier was shown."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(FLIGHTS):
        for side in (client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    shown: dict[str, Any] = (client if verifier is client_context else server).getpeercert() or {}
    return tuple(name for kind, name in shown.get("subjectAltName", ()) if kind == "DNS")


def _judge(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == HAS_EXPIRED:
        return "has expired: submit the job again, which makes new ones"
    if error.verify_code == NOT_YET_VALID:
        return "is not valid yet: set this machine's clock"
    return f"is not one that {CA} vouches for here ({error.verify_message}): {ONE_SECRET}"

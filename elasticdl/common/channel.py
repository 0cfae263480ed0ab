"""How a connection to a master is opened, whose a certificate is, and what is said where no master answers."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import ssl
import threading
from pathlib import Path

from elasticdl.common.backoff import Backoff
from elasticdl.common.credentials import CA, CERTIFICATE, KEY, Credentials, Identity, Role, TlsFolder, Token
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.reason import flat

# As it is imported, gRPC reads how much it may write to the terminal. What a person is to know they are told by those who
# call, in one line. The variable is not for processes that are started later.
_LOUDNESS = "GRPC_VERBOSITY"
_chosen = _LOUDNESS in os.environ
os.environ.setdefault(_LOUDNESS, "NONE")
import grpc as grpc  # noqa: E402

if not _chosen:
    del os.environ[_LOUDNESS]

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

_DNS_NAME = re.compile(rf"({'|'.join(Role)})\.([a-z0-9-]+)\.elasticdl".encode())


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
        UserError: the certificate can't be read, or is of no job.
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


def identify(tls: TlsFolder) -> Identity:
    """Whose the certificate in a folder is: its DNS name stands in it as it is. This protects nothing: TLS itself does.

    Raises:
        UserError: it can't be read, or is of no job.
    """
    try:
        found = _DNS_NAME.search(ssl.PEM_cert_to_DER_cert(tls.read().certificate.decode()))
    except ValueError:  # it is no certificate
        found = None
    if found is None:
        raise UserError(
            f"{tls.certificate} was not made for a job of elasticdl: take all of {CA}, {CERTIFICATE} and {KEY} from one Secret"
        )
    role, job = (part.decode() for part in found.groups())
    return Identity(Role(role), job)


# Whether a worker, or the agent of a place, reaches its master, and what it says of that in its log: a line after ten
# seconds without an answer, further ones at growing intervals, and one when the master has answered after all.


TOLD_SECONDS = 10.0
GROWTH = 2.0  # of the time without an answer, from line to line
# An attempt that has had no answer for so long has none to expect: a master answers from memory.
ATTEMPT_SECONDS = 30.0
FIRST_DELAY, DELAY_GROWTH, LONGEST_DELAY = 0.2, 1.5, 1.0
NO_ANSWER = "no answer"
NO_HANDSHAKE = "the TLS handshake fails"
# What gRPC's details contain, and what it means.
_PLAIN = (
    (r"lookup|DNS|ARES_", "its name can't be resolved"),
    (r"Connection refused", "the connection is refused, as nothing listens there"),
    (r"No route to host|unreachable", "there is no route to it"),
    (r"[Hh]andshake.*Socket closed", "the connection is closed in the TLS handshake"),
    (r"[Hh]andshake|SSL_", NO_HANDSHAKE),
    (r"timed out|timeout|Deadline|cancelled", NO_ANSWER),
    (r"Socket closed|Connection reset|End of TCP|GOAWAY", "the connection is closed at once"),
    (r"HTTP/2|http2", "what answers there is no master"),
)


class Silence:
    """Measures for how long the master at ``address`` has not answered, and says what to log and when to try again.

    ``limit``: seconds without a master after which ``who`` gives up. Any thread may call; time is passed in.
    """

    def __init__(self, address: str, limit: float, who: str = "worker") -> None:
        self._who = who
        self._address = address
        self._limit = limit
        self._lock = threading.Lock()
        self._since = self._attempt = math.inf  # without an answer; when the present attempt has begun
        self._answered = False
        self._problem = NO_ANSWER
        self._due = TOLD_SECONDS  # of silence, at which a line is due
        self._backoff = Backoff(first=FIRST_DELAY, longest=LONGEST_DELAY, factor=DELAY_GROWTH)
        self.met = False  # it has answered once

    def begin(self, now: float) -> None:
        """An attempt begins."""
        with self._lock:
            self._attempt, self._since = now, min(now, self._since)

    def answer(self, now: float) -> str:
        """The master has answered; returns the line to log, if any."""
        with self._lock:
            told, self._due = self._due > TOLD_SECONDS, TOLD_SECONDS
            self._backoff.reset()
            self._problem = NO_ANSWER
            self._answered = self.met = True
            return (
                f"this {self._who} has reached the master at {self._address} after {now - self._since:.0f} s"
                if told
                else ""
            )

    def end(self, now: float) -> None:
        """The attempt, or the conversation, is over. If the master had answered in it, the silence begins now."""
        with self._lock:
            if self._answered:
                self._since, self._answered = now, False

    def fail(self, problem: str) -> float:
        """``problem``: why the attempt is over. Returns the seconds until the next attempt."""
        with self._lock:
            self._problem = problem
            return self._backoff.delay()

    def look(self, now: float) -> str:
        """The line to log now, if any; to be called regularly."""
        with self._lock:
            seconds = self._silence(now)
            if seconds < self._due:
                return ""
            self._due = GROWTH * seconds
            return (
                f"this {self._who} has not reached the master at {self._address} for {seconds:.0f} s: {self._problem}; it goes on "
                f"trying, and gives up after {self._limit:g} s"
            )

    def silence(self, now: float) -> float:
        """For how long there has been no answer."""
        with self._lock:
            return self._silence(now)

    def stalls(self, now: float) -> bool:
        """Whether the present attempt should be ended: gRPC's own end of one may be long after the worker is to give up."""
        with self._lock:
            return not self._answered and (now - self._attempt > ATTEMPT_SECONDS or self._silence(now) > self._limit)

    def _silence(self, now: float) -> float:
        return 0.0 if self._answered else now - self._since


def in_words(details: str) -> str:
    """What gRPC says of a call that failed, in a person's words."""
    found = (words for pattern, words in _PLAIN if re.search(pattern, details))
    return next(found, flat(details) or NO_ANSWER)

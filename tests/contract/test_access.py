"""Who gets in and who does not, over real connections."""

import asyncio
import queue
import socket
import ssl
import threading
from contextlib import contextmanager
from datetime import UTC, datetime

import grpc
import pytest

import elasticdl.elastic.link.stream as stream
from elasticdl.cli.job_handle import MasterClient
from elasticdl.common.certificates import LIFETIME, issue
from elasticdl.common.channel import metadata, open_channel
from elasticdl.common.credentials import Endpoint, Role, TlsFolder, Token, WorkerEnvironment
from elasticdl.common.errors import RefusedError, UnreachableError, UserError
from elasticdl.job import messages as m
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.master.core.events import FromWorker, ScaleRequested, StopRequested
from elasticdl.master.shell import calls
from elasticdl.master.shell.agents import Agents
from elasticdl.master.shell.calls import ALLOWED, Server, Servicer, Sessions, TlsAccess, TokenAccess
from elasticdl.master.shell.journal_file import Journal
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc
from tests.unit.session_kit import Listening
from tests.waiting import wait_until

DEADLINE = 30.0
NOW = datetime.now(UTC)
TOKEN = Token("secret")
HELLO = pb.WorkerMessage(hello=pb.Hello(worker_id=3, host="127.0.0.1", pid=1))
CALLERS = (Role.WORKER, Role.OWNER, Role.METRICS)
REQUESTS = {
    "Session": HELLO,
    "Attend": pb.AgentMessage(hello=pb.AgentHello(place="place-0")),
    "Status": pb.StatusRequest(),
    "Watch": pb.StatusRequest(),
    "Events": pb.EventsRequest(),
    "Scale": pb.ScaleRequest(min_workers=1, max_workers=2),
    "Stop": pb.StopRequest(reason="enough"),
}


class ServedMaster:
    """A master's real server in a thread of its own, without a job behind it; ``events`` are what its handlers have posted.

    ``takes``: it lives to act upon them. None: nothing is saved either.
    """

    def __init__(self, access, journal, port):
        self.events, self.takes, self.port, self.why_not = [], True, port, lambda workers: ""
        self.status = pb.JobStatus(job_name="digits", phase="running", min_workers=1, max_workers=2)
        self._access, self._journal, self._up = access, journal, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._up.wait(DEADLINE)
        assert self.port

    def endpoint(self, credentials):
        return Endpoint(f"127.0.0.1:{self.port}", credentials, "the master of job digits")

    def wait_for(self, kind, count):
        """The first so many messages of workers, of one kind."""

        def said():
            return [e.said for e in self.events if isinstance(e, FromWorker) and isinstance(e.said, kind)]

        wait_until(lambda: len(said()) >= count, lambda: self.events)
        return said()[:count]

    def stop(self):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()

    def post(self, event):
        self.events.append(event)

    async def settled(self):
        if self.takes is None:
            await asyncio.Event().wait()
        return self.takes

    async def _serve(self):
        self._loop, self._over, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        journal, server = Journal(self._journal), Server("127.0.0.1", self._access)
        try:
            self.port = server.bind(self.port)
            parts = (lambda: self.status, ended, journal, lambda: pb.Welcome(job_name="digits"))
            await server.start(Servicer(self, Sessions(), *parts, lambda workers: self.why_not(workers), Agents()))
        finally:
            self._up.set()
        await self._over.wait()
        ended.set()
        journal.close()
        await server.close()


@contextmanager
def serving(access, journal, port=0):
    master = ServedMaster(access, journal, port)
    try:
        yield master
    finally:
        master.stop()


@contextmanager
def connect(master):
    """A client of the command line's, which is closed at the end."""
    with open_channel(master.address, master.credentials) as channel:
        yield MasterClient(channel, master)


def roles_of(folder, job="digits", now=NOW):
    """Every role's folder with its certificates, made anew."""
    for role, files in issue(job, now).items():
        files.write(folder / role)
    return {role: TlsFolder(folder / role) for role in Role}


@pytest.fixture
def roles(tmp_path):
    return roles_of(tmp_path / "certificates")


@pytest.fixture
def master(roles, tmp_path):
    with serving(TlsAccess.load(roles[Role.MASTER]), tmp_path / "journal.jsonl") as master:
        yield master


@pytest.fixture
def local_master(tmp_path):
    with serving(TokenAccess(TOKEN), tmp_path / "journal.jsonl") as master:
        yield master


def outcome(channel, name, carried=()):
    """Of a call; the first answer of a stream is enough."""
    request = iter([REQUESTS[name]]) if name in ("Session", "Attend") else REQUESTS[name]
    try:
        answer = getattr(pb_grpc.MasterStub(channel), name)(request, metadata=carried, timeout=DEADLINE)
        if isinstance(answer, grpc.Call):
            next(answer, None)
            answer.cancel()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("role", CALLERS)
def test_a_role_may_make_its_own_calls_and_no_other(master, roles, role):
    with open_channel(master.endpoint(roles[role]).address, roles[role]) as channel:
        outcomes = {name: outcome(channel, name, metadata(TOKEN)) for name in ALLOWED}  # a token adds nothing
    refused, fine = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.OK
    assert outcomes == {name: fine if role in allowed else refused for name, allowed in ALLOWED.items()}
    assert any(isinstance(event, StopRequested) for event in master.events) == (role is Role.OWNER)


def test_the_users_token_is_good_for_everything_on_this_machine(local_master):
    with open_channel(local_master.endpoint(TOKEN).address, TOKEN) as channel:
        assert {outcome(channel, name, metadata(TOKEN)) for name in ALLOWED} == {grpc.StatusCode.OK}
        wrong = metadata(Token("guessed"))
        assert {outcome(channel, name, wrong) for name in ALLOWED} == {grpc.StatusCode.UNAUTHENTICATED}
        assert {outcome(channel, name) for name in ALLOWED} == {grpc.StatusCode.UNAUTHENTICATED}


def test_the_owner_commands_and_another_role_is_told_whose_certificate_it_takes(master, roles):
    refusal = r"^the master of job digits refused: the worker may not call Stop: it takes the certificate of the owner$"
    with connect(master.endpoint(roles[Role.WORKER])) as client, pytest.raises(RefusedError, match=refusal):
        client.stop("enough")
    assert master.events == []
    with connect(master.endpoint(roles[Role.OWNER])) as client:
        assert client.status().job_name == "digits"
        assert next(client.watch()).phase == "running"
        client.stop("enough")
    assert master.events == [StopRequested("enough", checkpoint=True, now=False)]


@pytest.mark.parametrize(("queue", "most", "told"), [("kueue=a", 2, "can't be changed"), ("", 8, "give one number")])
def test_a_gang_is_scaled_to_what_it_could_be_submitted_with(local_master, queue, most, told):
    local_master.why_not = JobSpec(image="i", gang=True, num_workers="4", queue=queue).why_not_scaled_to
    with connect(local_master.endpoint(TOKEN)) as client:
        with pytest.raises(UserError, match=told):
            client.scale(WorkerRange(minimum=2, maximum=most))
        client.scale(same := WorkerRange(minimum=4, maximum=4))
    assert local_master.events == [ScaleRequested(same)]


NO_WAY = "^the master of job digits is not reached: the TLS handshake fails$"


@pytest.mark.parametrize("wrong", ["an earlier job's", "expired", "another's authority", "another role's key"])
def test_with_certificates_that_will_not_do_there_is_one_line(master, roles, tmp_path, wrong):
    owner, other = roles[Role.OWNER], roles_of(tmp_path / "earlier")[Role.OWNER]  # of a job of the same name
    match wrong:
        case "an earlier job's":
            owner = other
        case "expired":
            owner = roles_of(tmp_path / "old", now=NOW - LIFETIME)[Role.OWNER]
        case "another's authority":
            owner.ca.write_bytes(other.ca.read_bytes())
        case "another role's key":
            owner.key.write_bytes(roles[Role.WORKER].key.read_bytes())
    with connect(master.endpoint(owner)) as client, pytest.raises(RefusedError, match=NO_WAY):
        client.status()


def unchecked(master, tls, own=True):
    """A channel of somebody who does not look at their own certificate first, or shows none."""
    files = tls.read()
    shown = (files.key, files.certificate) if own else (None, None)
    name = ("grpc.ssl_target_name_override", "master.digits.elasticdl")
    address = master.endpoint(tls).address
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(files.ca, *shown), options=[name])


def test_without_a_certificate_of_somebody_who_may_call_there_is_no_connection(master, roles, tmp_path):
    other = roles_of(tmp_path / "other")[Role.OWNER]  # another job's, of one who trusts this master
    other.ca.write_bytes(roles[Role.OWNER].ca.read_bytes())
    for shown in ((roles[Role.OWNER], False), (other, True), (roles[Role.MASTER], True)):
        with unchecked(master, *shown) as channel:
            assert outcome(channel, "Status") is grpc.StatusCode.UNAVAILABLE


def test_an_expired_certificate_makes_no_connection(tmp_path):
    """With a master that has not noticed that its own has expired, too."""
    old = roles_of(tmp_path / "old", now=NOW - LIFETIME)
    with serving(TlsAccess(old[Role.MASTER], "digits"), tmp_path / "journal") as master:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(old[Role.OWNER].certificate, old[Role.OWNER].key)
        assert first_word(master.port, context) == b""


def first_word(port, context):
    """What an HTTP/2 server says unasked, once it has accepted the caller."""
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", port), DEADLINE) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="master.digits.elasticdl") as tls:
                return tls.recv(9)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError):
            return b""


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
@pytest.mark.parametrize(
    ("version", "welcome"),
    [(ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, True)],
)
def test_old_versions_of_TLS_are_refused(master, roles, version, welcome):
    owner = roles[Role.OWNER]
    context = ssl.create_default_context(cafile=owner.ca)
    context.load_cert_chain(owner.certificate, owner.key)
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python does by default since 3.13
    context.set_ciphers("DEFAULT@SECLEVEL=0")  # else OpenSSL itself would not speak the old one
    context.minimum_version = context.maximum_version = version
    assert bool(first_word(master.port, context)) == welcome


def test_no_worker_can_pose_as_the_master(roles, tmp_path):
    with serving(TlsAccess(roles[Role.WORKER], "digits"), tmp_path / "journal") as impostor:
        with connect(impostor.endpoint(roles[Role.OWNER])) as client, pytest.raises(UnreachableError):
            client.stop("enough")
        with unchecked(impostor, roles[Role.OWNER]) as channel:
            assert outcome(channel, "Stop") is grpc.StatusCode.UNAVAILABLE
        assert impostor.events == []


def test_no_proxy_stands_between(local_master, monkeypatch):
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with connect(local_master.endpoint(TOKEN)) as client:
        assert client.status().job_name == "digits"


def test_a_session_begins_with_hello_and_a_newer_one_ends_the_older_and_a_last_word_is_taken(local_master):
    with open_channel(local_master.endpoint(TOKEN).address, TOKEN) as channel:

        def session(word):
            (said := queue.SimpleQueue()).put(word)
            call = pb_grpc.MasterStub(channel).Session
            return said, call(iter(said.get, None), metadata=metadata(TOKEN), timeout=DEADLINE)

        _, answers = session(pb.WorkerMessage(ask=pb.Ask()))
        with pytest.raises(grpc.RpcError, match="begins with Hello"):
            next(answers)
        _, older = session(HELLO)
        assert next(older).welcome.job_name == "digits"
        said, newer = session(HELLO)
        assert next(newer).HasField("welcome")
        with pytest.raises(grpc.RpcError) as ended:
            next(older)
        assert ended.value.code() is grpc.StatusCode.ABORTED
        said.put(pb.WorkerMessage(failed=pb.Failed(message="no")))
        assert next(newer).HasField("last_word_taken")
        said.put(HELLO)
        with pytest.raises(grpc.RpcError, match="does not take hello"):
            next(newer)


# -- the worker's stream --


@pytest.fixture
def open_stream():
    """Open a worker's stream to a master, which does not give up for want of time."""
    opened = []

    def open_one(master, credentials, listening=None):
        listening = listening or Listening()
        address = master.endpoint(credentials).address
        environment = WorkerEnvironment(address, credentials, 3, "job.json", master_timeout=600)
        opened.append(stream.MasterStream(environment))
        opened[-1].open(listening)
        listening.say, listening.close = opened[-1].send, opened[-1].close
        return listening

    yield open_one
    for one in opened:
        one.close()


@pytest.mark.parametrize(
    ("role", "told"),
    [(Role.OWNER, "the owner may not call Session: it takes the certificate of the worker"), (None, "No such file")],
)
def test_a_worker_that_can_never_get_in_gives_up_at_once(master, roles, open_stream, tmp_path, role, told):
    reason = open_stream(master, roles.get(role, TlsFolder(tmp_path / "nowhere"))).next()
    assert reason.startswith(f"no session with the master at 127.0.0.1:{master.port}: ")
    assert told in reason
    assert "\n" not in reason


@pytest.fixture
def tried(monkeypatch):
    """Attempts of streams to find their master again."""
    tried = queue.SimpleQueue()
    monkeypatch.setattr(stream.log, "debug", lambda *words: tried.put(words))
    return tried


@pytest.fixture
def serve(roles, tmp_path):
    """The job's next master, at this port."""
    return lambda port=0: serving(TlsAccess.load(roles[Role.MASTER]), tmp_path / "journal", port)


def notice(step):
    return m.Notice("evaluation", {"step": step})


def test_what_no_master_has_saved_is_for_the_next_one_of_its_own_job(roles, open_stream, tmp_path, tried, serve):
    """A cluster may give the address of a master that is gone to another pod."""
    with serve() as first:
        listening = open_stream(first, roles[Role.WORKER])
        assert listening.next() == "welcome"
        listening.say(notice(1))
        first.wait_for(m.Notice, 1)
    tried.get(timeout=DEADLINE)
    listening.say(notice(2))
    stranger = roles_of(tmp_path / "strangers", "letters")
    with serving(TlsAccess.load(stranger[Role.MASTER]), tmp_path / "letters", first.port):
        while not tried.empty():
            tried.get()
        for _ in range(2):  # the first may have begun before this master did
            word = tried.get(timeout=DEADLINE)[1]
        assert (word, listening.heard.empty()) == ("the TLS handshake fails", True)
        listening.say(notice(3))
        listening.say(m.Heartbeat(0, 0, 0, waiting=False))
    with serve(first.port) as second:
        listening.say(notice(4))
        told = second.wait_for(m.Notice, 4)
    assert [(each.number, each.fields["step"]) for each in told[:4]] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_last_word_to_a_master_that_leaves_is_for_the_next(roles, open_stream, serve):
    class Ending(Listening):
        has_last_word = True

        def greet(self, unsent):
            return [m.Hello(), m.Finished(5, 1, {}, together=True)]

    with serve() as first:
        first.takes = False
        listening = open_stream(first, roles[Role.WORKER], Ending())
        first.wait_for(m.Finished, 1)
    closing = threading.Thread(target=listening.close)
    closing.start()
    with serve(first.port) as second:
        second.wait_for(m.Finished, 1)
        closing.join(DEADLINE)
    assert not closing.is_alive()
    heard = [listening.heard.get() for _ in range(listening.heard.qsize())]
    assert heard.count("last_word_taken") == 1


def test_who_asks_is_promised_nothing_by_a_master_that_does_not_settle(local_master, monkeypatch):
    """It waits until the job's state is saved, or leaves."""
    monkeypatch.setattr(calls, "SETTLE_SECONDS", 0.0)
    local_master.takes, local_master.status.reason = None, "waits until the job's state is saved: no space"
    told = r"it was told, and waits until the job's state is saved: no space$"
    with connect(local_master.endpoint(TOKEN)) as client:
        with pytest.raises(UnreachableError, match=told):
            client.stop("enough")
        local_master.takes = False
        for ask in (lambda: client.scale(WorkerRange(minimum=1, maximum=2)), lambda: client.stop("enough")):
            with pytest.raises(UnreachableError, match="ask again"):
                ask()


def test_a_call_that_the_table_does_not_know_is_refused_to_all(local_master, monkeypatch):
    monkeypatch.delitem(ALLOWED, "Status")
    with connect(local_master.endpoint(TOKEN)) as client, pytest.raises(RefusedError, match="certificate of nobody"):
        client.status()
    with open_channel(local_master.endpoint(TOKEN).address, TOKEN) as channel, pytest.raises(grpc.RpcError) as unknown:
        channel.unary_unary("/elasticdl.Master/Nonsense")(b"", metadata=metadata(TOKEN), timeout=DEADLINE)
    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED

"""What a process knows its master by: in the environment, in a Secret, and never in a log."""

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from elasticdl.common.channel import CLIENT_OPTIONS, SERVER_OPTIONS
from elasticdl.common.credentials import (
    CA,
    CERTIFICATE,
    KEY,
    MASTER,
    TLS,
    TOKEN,
    TlsFiles,
    TlsFolder,
    Token,
    WorkerEnvironment,
)
from elasticdl.common.errors import UserError

SECRET = TlsFiles(ca=b"authority", certificate=b"certificate", key=b"hidden")


def environment(credentials):
    return WorkerEnvironment("127.0.0.1:1", credentials, 3, "job.json")


@pytest.mark.parametrize("credentials", [Token("hidden"), TlsFolder(Path("/etc/elasticdl/tls"))])
def test_a_worker_reads_what_its_launcher_wrote(credentials):
    assert WorkerEnvironment.from_env(environment(credentials).to_env()) == environment(credentials)
    inner = environment(Token("own"))  # of a local job that is started within this one, and takes nothing from it
    assert WorkerEnvironment.from_env({**environment(credentials).to_env(), **inner.to_env()}) == inner


def test_credentials_that_are_missing_are_one_clear_line():
    given = environment(Token("hidden")).to_env()
    with pytest.raises(UserError, match=rf"^{MASTER} is set but {TOKEN} \(or {TLS}\) is not: "):
        WorkerEnvironment.from_env({**given, TOKEN: ""})


def test_secrets_do_not_show():
    assert "hidden" not in f"{SECRET!r} {environment(Token('hidden'))!r}"


def test_a_secret_of_kubernetes_and_back():
    assert SECRET.to_mapping() == {CA: b"authority", CERTIFICATE: b"certificate", KEY: b"hidden"}
    assert TlsFiles.from_mapping(SECRET.to_mapping()) == SECRET


@pytest.mark.parametrize("name", sorted({name for name, _ in (*CLIENT_OPTIONS, *SERVER_OPTIONS)}))
def test_grpc_knows_the_option(name):
    """It takes any name and says nothing: one that is misspelt has no effect, as pings that then count as an attack."""
    assert name.encode() + b"\0" in Path(cygrpc.__file__).read_bytes()

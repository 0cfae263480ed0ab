"""What a process knows its master by, in the environment, in a Secret and in certificates, and never in a log."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from grpc._cython import cygrpc
from refusal_kit import refused

from elasticdl.common import credentials as c
from elasticdl.common.certificates import issue
from elasticdl.common.channel import CLIENT_OPTIONS, SERVER_OPTIONS, identify
from elasticdl.common.credentials import Identity, Role, TlsFiles, TlsFolder, Token, WorkerEnvironment

NOW = datetime.now(UTC)
SECRET = TlsFiles(ca=b"authority", certificate=b"certificate", key=b"hidden")


def environment(credentials):
    return WorkerEnvironment("127.0.0.1:1", credentials, 3, "job.json")


@pytest.mark.parametrize("credentials", [Token("hidden"), TlsFolder(Path("/etc/elasticdl/tls"))])
def test_a_worker_reads_what_its_launcher_wrote(credentials):
    written = environment(credentials).to_env()
    assert WorkerEnvironment.from_env(written) == environment(credentials)
    inner = environment(Token("own"))  # of a local job that is started within this one, and takes nothing from it
    assert WorkerEnvironment.from_env({**written, **inner.to_env()}) == inner


def test_credentials_that_are_missing_are_one_clear_line():
    given = {**environment(Token("hidden")).to_env(), c.TOKEN: ""}
    refused(rf"^{c.MASTER} is set but {c.TOKEN} \(or {c.TLS}\) is not: ", lambda: WorkerEnvironment.from_env(given))


def test_secrets_do_not_show_but_in_a_secret_of_kubernetes():
    assert "hidden" not in f"{SECRET!r} {environment(Token('hidden'))!r}"
    assert SECRET.to_mapping() == {c.CA: b"authority", c.CERTIFICATE: b"certificate", c.KEY: b"hidden"}
    assert TlsFiles.from_mapping(SECRET.to_mapping()) == SECRET


@pytest.mark.parametrize("name", sorted({name for name, _ in (*CLIENT_OPTIONS, *SERVER_OPTIONS)}))
def test_grpc_knows_the_option(name):
    """It takes any name and says nothing: one that is misspelt has no effect, as pings that then count as an attack."""
    assert name.encode() + b"\0" in Path(cygrpc.__file__).read_bytes()


# ---- certificates ----


@pytest.fixture(scope="module")
def job():
    return issue("digits", NOW)


@pytest.mark.parametrize("role", Role)
def test_a_certificate_says_whose_it_is_and_what_for(tmp_path, job, role):
    certificate = x509.load_pem_x509_certificate(job[role].certificate)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(job[role].ca))

    def said(kind):
        return certificate.extensions.get_extension_for_class(kind).value

    use = ExtendedKeyUsageOID.SERVER_AUTH if role is Role.MASTER else ExtendedKeyUsageOID.CLIENT_AUTH
    assert said(x509.SubjectAlternativeName).get_values_for_type(x509.DNSName) == [f"{role}.digits.elasticdl"]
    assert (list(said(x509.ExtendedKeyUsage)), said(x509.BasicConstraints).ca) == ([use], False)
    assert certificate.not_valid_before_utc < NOW - timedelta(minutes=30)
    assert certificate.not_valid_after_utc == (NOW + timedelta(days=3650)).replace(microsecond=0)
    job[role].write(tmp_path)
    assert identify(TlsFolder(tmp_path)) == Identity(role, "digits")


def test_the_authority_signs_nothing_but_these_and_its_key_is_nowhere(job):
    authority = x509.load_pem_x509_certificate(job[Role.OWNER].ca)
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    keys = [serialization.load_pem_private_key(files.key, password=None).public_key() for files in job.values()]
    numbers = {key.public_numbers() for key in keys}
    assert len(numbers) == len(Role)
    assert authority.public_key().public_numbers() not in numbers


def test_a_folder_without_a_jobs_certificate_is_one_clear_line(tmp_path, job):
    job[Role.WORKER].write(tmp_path)
    for content in (issue("not.a.label", NOW)[Role.WORKER].certificate, b"nonsense"):
        (tmp_path / c.CERTIFICATE).write_bytes(content)
        refused("was not made for a job of elasticdl: take all of ", lambda: identify(TlsFolder(tmp_path)))
    (tmp_path / c.CERTIFICATE).unlink()
    refused(f"can't read .*/{c.CERTIFICATE}: .* should hold {c.CA}, ", lambda: identify(TlsFolder(tmp_path)))


def test_nobody_else_can_read_what_is_written(tmp_path, job):
    new, old = tmp_path / "new" / "tls", tmp_path / "old"
    old.mkdir()
    (old / c.KEY).write_text("of an earlier job")
    (old / c.KEY).chmod(0o644)
    for folder in (new, old):
        job[Role.OWNER].write(folder)
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
        assert TlsFolder(folder).read() == job[Role.OWNER]
    assert stat.S_IMODE(new.stat().st_mode) == 0o700


def test_the_interface_of_an_address():
    assert c.interface_of("127.0.0.1") == c.interface_of("127.3.2.1") == "lo"
    refused(r"no network interface of this machine has the address 203\.", lambda: c.interface_of("203.0.113.7"))

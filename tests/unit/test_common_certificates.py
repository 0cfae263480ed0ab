"""The certificates of a job: what they are made of, and what is told of a folder that does not hold the right ones."""

import os
import ssl
import stat
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from elasticdl.common.certificates import LIFETIME, issue
from elasticdl.common.channel import identify
from elasticdl.common.credentials import CA, CERTIFICATE, KEY, Identity, Role, TlsFolder
from elasticdl.common.errors import UserError

NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def job():
    return issue("digits", NOW)


@pytest.fixture
def folder(tmp_path, job):
    job[Role.WORKER].write(tmp_path / "tls")
    return TlsFolder(tmp_path / "tls")


@pytest.mark.parametrize("role", Role)
def test_a_certificate_says_whose_it_is_and_what_for(tmp_path, job, role):
    certificate = x509.load_pem_x509_certificate(job[role].certificate)
    authority = x509.load_pem_x509_certificate(job[role].ca)
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [f"{role}.digits.elasticdl"]
    use = ExtendedKeyUsageOID.SERVER_AUTH if role is Role.MASTER else ExtendedKeyUsageOID.CLIENT_AUTH
    assert list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [use]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.not_valid_before_utc < NOW - timedelta(minutes=30)
    assert certificate.not_valid_after_utc == (NOW + LIFETIME).replace(microsecond=0)
    key = serialization.load_pem_private_key(job[role].key, password=None)
    assert isinstance(key.curve, ec.SECP256R1)
    assert certificate.public_key() == key.public_key()
    job[role].write(tmp_path)
    assert identify(TlsFolder(tmp_path)) == Identity(role, "digits")


def test_the_authority_signs_nothing_but_these_and_its_key_is_nowhere(job):
    authority = x509.load_pem_x509_certificate(job[Role.OWNER].ca)
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    keys = [
        serialization.load_pem_private_key(files.key, password=None).public_key().public_numbers()
        for files in job.values()
    ]
    assert len(set(keys)) == len(Role)
    assert authority.public_key().public_numbers() not in keys


def test_certificates_hold_to_the_strictest_reading_of_the_rules(folder):
    """Python checks it by default since 3.13."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for context in (server, client):
        context.load_cert_chain(folder.certificate, folder.key)
    server.load_verify_locations(folder.ca)
    server.verify_mode, server.verify_flags = ssl.CERT_REQUIRED, ssl.VERIFY_X509_STRICT
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller, called = client.wrap_bio(outward, inward), server.wrap_bio(inward, outward, server_side=True)
    for side in (caller, called):
        with pytest.raises(ssl.SSLWantReadError):
            side.do_handshake()
    caller.do_handshake()
    called.do_handshake()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, f"can't read .*/{CERTIFICATE}: No such file or directory; .* should hold {CA}, "),
        (issue("not.a.label", NOW)[Role.WORKER].certificate, "was not made for a job of elasticdl: take all of "),
        (b"nonsense", "was not made for a job of elasticdl: take all of "),
    ],
    ids=["missing", "made for something else", "no certificate"],
)
def test_a_folder_without_a_jobs_certificate_is_one_clear_line(folder, content, told):
    folder.certificate.unlink() if content is None else folder.certificate.write_bytes(content)
    with pytest.raises(UserError, match=told) as raised:
        identify(folder)
    assert "\n" not in str(raised.value)


def test_nobody_else_can_read_what_is_written(tmp_path, job):
    before = os.umask(0)
    try:
        job[Role.OWNER].write(tmp_path / "new" / "tls")
        old = tmp_path / "old"
        old.mkdir()
        (old / KEY).write_text("of an earlier job")
        (old / KEY).chmod(0o644)
        job[Role.OWNER].write(old)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "tls").stat().st_mode) == 0o700
    for folder in (tmp_path / "new" / "tls", old):
        assert sorted(path.name for path in folder.iterdir()) == [CA, CERTIFICATE, KEY]
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
        assert TlsFolder(folder).read() == job[Role.OWNER]

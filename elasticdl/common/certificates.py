"""A job's own certification authority, and one certificate for each role, made when the job is submitted.

The authority's key exists only while `issue` runs: nobody can make another certificate of the job afterwards, and one
job's certificates mean nothing to another, not even to a later job of the same name. Only this module needs the package
``cryptography``.

Each certificate says whose it is in its DNS name (`elasticdl.common.credentials.Identity`), which the other side checks;
the subject (CN the role, O the job) says the same to people. The master's serves and can't call; the others call and
can't serve, so that no worker can pose as the master.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elasticdl.common.credentials import Identity, Role, TlsFiles

LIFETIME = timedelta(days=365)
# Clocks of a cluster's nodes differ.
BACKDATED = timedelta(hours=1)

_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
_NO_USE = dict.fromkeys(_USES, False)


def issue(job: str, now: datetime, lifetime: timedelta = LIFETIME) -> dict[Role, TlsFiles]:
    """The certificates of a new job.

    ``job`` must be a DNS label, as job names are; ``now`` must know its time zone.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([_named(NameOID.COMMON_NAME, f"elasticdl {job}"), _named(NameOID.ORGANIZATION_NAME, job)])
    authority = (
        _begun(name, name, key, now, lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**{**_NO_USE, "key_cert_sign": True, "crl_sign": True}), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificates = {}
    for role in Role:
        own_key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([_named(NameOID.COMMON_NAME, role), _named(NameOID.ORGANIZATION_NAME, job)])
        certificate = (
            _begun(subject, name, own_key, now, lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**{**_NO_USE, "digital_signature": True}), critical=True)
            .add_extension(x509.ExtendedKeyUsage([_use(role)]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(Identity(role, job).dns_name)]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        certificates[role] = TlsFiles(
            ca=authority.public_bytes(Encoding.PEM),
            certificate=certificate.public_bytes(Encoding.PEM),
            key=own_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )
    return certificates


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _named(oid: x509.ObjectIdentifier, value: str) -> x509.NameAttribute[str]:
    return x509.NameAttribute(oid, value)


def _use(role: Role) -> x509.ObjectIdentifier:
    return ExtendedKeyUsageOID.SERVER_AUTH if role is Role.MASTER else ExtendedKeyUsageOID.CLIENT_AUTH

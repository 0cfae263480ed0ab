"""A job's own certification authority, and one certificate for each role, made when the job is submitted.

The authority's key exists only while `issue` runs: nobody can make another certificate of the job afterwards, and one
job's certificates mean nothing to another, not even to a later job of the same name. Only this module needs the package
``cryptography``.

A certificate is valid for longer than any job lasts, and is never renewed. An end date limits what a stolen key is worth.
Here the job's end does that: an authority vouches for one job, and its certificates open nothing but this job's master.
A shorter life would need an authority whose key stays in the cluster, which is worth more to a thief than any of the keys.

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

LIFETIME = timedelta(days=3650)
# Clocks of a cluster's nodes differ.
BACKDATED = timedelta(hours=1)

_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def issue(job: str, now: datetime) -> dict[Role, TlsFiles]:
    """The certificates of a new job.

    ``job`` must be a DNS label, as job names are; ``now`` must know its time zone.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"elasticdl {job}", job)
    authority = (
        _begun(name, name, key, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage("key_cert_sign", "crl_sign"), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificates = {}
    for role in Role:
        own_key = ec.generate_private_key(ec.SECP256R1())
        use = ExtendedKeyUsageOID.SERVER_AUTH if role is Role.MASTER else ExtendedKeyUsageOID.CLIENT_AUTH
        certificate = (
            _begun(_name(role, job), name, own_key, now)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
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
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _name(common: str, job: str) -> x509.Name:
    names = {NameOID.COMMON_NAME: common, NameOID.ORGANIZATION_NAME: job}
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in names.items()])


def _key_usage(*uses: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in uses for use in _USES})

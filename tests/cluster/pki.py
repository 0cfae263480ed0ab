"""The certificates of a test cluster: one authority and what it signs, all of them gone with the cluster."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID = datetime.timedelta(days=7)
_CLOCK_SKEW = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Pair:
    """Files of a certificate and its private key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs for clients and servers of one cluster."""

    folder: Path
    files: Pair
    _certificate: x509.Certificate
    _key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, folder: Path) -> Authority:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "elasticdl-test-cluster")])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = _builder(name, name, key).add_extension(constraints, True).add_extension(identifier, False)
        certificate = builder.sign(key, hashes.SHA256())
        return cls(folder, _write(folder, "ca", certificate, key), certificate, key)

    def issue(
        self,
        file_name: str,
        user: str,
        groups: Sequence[str] = (),
        addresses: Sequence[str] = (),
        names: Sequence[str] = (),
    ) -> Pair:
        """A certificate that serves at ``addresses`` and ``names`` and makes its holder ``user`` of ``groups``."""
        key = ec.generate_private_key(ec.SECP256R1())
        organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject = x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, user)])
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        builder = _builder(subject, self._certificate.subject, key).add_extension(uses, critical=False)
        alternatives: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]
        alternatives += [x509.DNSName(each) for each in names]
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        return _write(self.folder, file_name, builder.sign(self._key, hashes.SHA256()), key)

    def new_signing_key(self, file_name: str) -> Path:
        """A bare private key, for the tokens of service accounts."""
        return _write_private(self.folder / f"{file_name}.key", ec.generate_private_key(ec.SECP256R1()))


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _CLOCK_SKEW).not_valid_after(now + _VALID)


def _write(folder: Path, file_name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    (folder / f"{file_name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return Pair(folder / f"{file_name}.crt", _write_private(folder / f"{file_name}.key", key))


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    # Go's server wants the traditional form of an EC key for tokens, and takes it everywhere.
    form = serialization.PrivateFormat.TraditionalOpenSSL
    content = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    return path

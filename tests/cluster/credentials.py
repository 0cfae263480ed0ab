"""Certificates of a cluster's own authority, keys and kubeconfigs."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID = datetime.timedelta(days=7)
_CLOCK_SKEW = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs for clients and servers of one cluster; ``file`` has its own certificate."""

    file: Path
    _certificate: x509.Certificate
    _key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, folder: Path) -> Authority:
        folder.mkdir(mode=0o700)
        key, name = write_key(folder / "ca.key"), _name("elasticdl-test-cluster")
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = _builder(name, name, key).add_extension(constraints, True).add_extension(identifier, False)
        certificate = builder.sign(key, hashes.SHA256())
        (folder / "ca.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
        return cls(folder / "ca.crt", certificate, key)

    def issue(self, path: Path, user: str, groups: Sequence[str] = (), serves: Sequence[str] = ()) -> None:
        """``path``.crt, which makes its holder ``user`` of ``groups``, or serves at addresses and names; ``path``.key."""
        key = write_key(path.with_suffix(".key"))
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        builder = _builder(_name(user, groups), self._certificate.subject, key).add_extension(uses, critical=False)
        if serves:
            alternatives = x509.SubjectAlternativeName(list(map(_place, serves)))
            builder = builder.add_extension(alternatives, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        path.with_suffix(".crt").write_bytes(certificate.public_bytes(Encoding.PEM))


def _name(user: str, groups: Sequence[str] = ()) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _place(text: str) -> x509.GeneralName:
    return x509.IPAddress(ipaddress.ip_address(text)) if text[0].isdigit() else x509.DNSName(text)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _CLOCK_SKEW).not_valid_after(now + _VALID)


def write_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A new private key."""
    key = ec.generate_private_key(ec.SECP256R1())
    # Go's server wants the traditional form of an EC key for tokens, and takes it everywhere.
    _keep(path, key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    return key


def write_kubeconfig(
    path: Path, server: str, authority: Path, user: str, credentials: Mapping[str, str], namespace: str = "default"
) -> Path:
    """A file with one context."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority": str(authority)}}],
        "users": [{"name": user, "user": dict(credentials)}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": namespace}}],
    }
    _keep(path, yaml.safe_dump(content).encode())
    return path


def _keep(path: Path, content: bytes) -> None:
    """In a file that its owner alone may read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)

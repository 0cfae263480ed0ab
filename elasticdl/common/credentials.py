"""Tokens and certificates, by which the two ends of a call to a master know each other.

A job on this machine has a token of the user's, sent over loopback only. A job on a cluster has a certification authority
of its own (`elasticdl.common.certificates`) and one certificate for each role; a process holds those of its own role as
the three files of a folder, as Kubernetes mounts a Secret of type ``kubernetes.io/tls``. What a role may do is decided
by the master (`elasticdl.master.shell.access`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeAlias

from elasticdl.common.errors import UserError

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"


class Role(StrEnum):
    """What a process is to a job."""

    MASTER = "master"
    WORKER = "worker"
    OWNER = "owner"  # whoever submitted the job, and the command line for them
    METRICS = "metrics"  # what collects metrics; sees no more than those


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose a certificate is."""

    role: Role
    job: str

    @property
    def dns_name(self) -> str:
        """As the certificate has it. The master answers to its own, at whatever address it is reached."""
        return f"{self.role}.{self.job}.elasticdl"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The contents of one role's Secret: PEM."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    def to_mapping(self) -> dict[str, bytes]:
        return {CA: self.ca, CERTIFICATE: self.certificate, KEY: self.key}

    @classmethod
    def from_mapping(cls, files: Mapping[str, bytes]) -> Self:
        """Raises KeyError for what is not there."""
        return cls(ca=files[CA], certificate=files[CERTIFICATE], key=files[KEY])

    def write(self, folder: Path) -> None:
        """Write them readable by the user alone, whatever the umask; each replaces an older one atomically."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in self.to_mapping().items():
            scratch = folder / f".{name}.{os.getpid()}"
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
            scratch.replace(folder / name)


@dataclass(frozen=True, slots=True)
class Token:
    """For loopback: whoever holds it may do everything."""

    value: str = field(repr=False)


class PathBelow:
    """A file in the folder that is the ``path`` of an object."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, _: type) -> Path:
        return Path(owner.path, self._name)


@dataclass(frozen=True, slots=True)
class TlsFolder:
    """Where a process finds the certificate of its role in a job."""

    path: Path

    ca = PathBelow(CA)
    certificate = PathBelow(CERTIFICATE)
    key = PathBelow(KEY)

    def read(self) -> TlsFiles:
        """
        Raises:
            UserError: a file is missing or can't be read.
        """
        try:
            return TlsFiles(self.ca.read_bytes(), self.certificate.read_bytes(), self.key.read_bytes())
        except OSError as error:
            raise UserError(
                f"can't read {error.filename}: {error.strerror}; {self.path} should hold {CA}, {CERTIFICATE} and {KEY}"
            ) from None


Credentials: TypeAlias = Token | TlsFolder


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A master as a client sees it."""

    address: str  # host:port
    credentials: Credentials
    title: str  # for messages: "the master at 127.0.0.1:50001 (process 7)"

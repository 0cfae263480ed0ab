"""What may come of a request to an API server: one error for each, in one line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import urllib3
from kubernetes.client import ApiException

from elasticdl.common.errors import ElasticDLError, UnreachableError, UserError
from elasticdl.common.reason import flat

STRANGER, FORBIDDEN, ABSENT, CONFLICT, GONE, INVALID, BUSY = 401, 403, 404, 409, 410, 422, 429


class ApiError(ElasticDLError):
    """A request did not succeed. ``status`` is that of HTTP, 0 if there was no answer."""

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(flat(message))
        self.status = status
        self.retry_after = retry_after

    @property
    def uncertain(self) -> bool:
        """Whether it may have been done all the same."""
        return self.status == 0 or self.status >= 500


class NoAnswerError(ApiError, UnreachableError):
    """The server is not there, or has too much to do."""


class NotDoneError(ApiError, UserError):
    """The server refuses the request."""

    @property
    def by_quota(self) -> bool:
        return self.status == FORBIDDEN and "exceeded quota" in str(self)

    @property
    def by_rights(self) -> bool:
        """The user may not do this at all, whatever the object."""
        return self.status == FORBIDDEN and _lacks_rights(str(self))


@contextlib.contextmanager
def translated(what: str, server: str, namespace: str) -> Iterator[None]:
    """Everything that a request may raise, as `NoAnswerError` or `NotDoneError`; ``what``: as in "create pods"."""
    try:
        yield
    except ApiException as error:
        status = error.status or 0  # 0: the client itself gave the connection up
        if status == 0:
            raise NoAnswerError(0, f"the cluster at {server} is not to be had: {error.reason}") from error
        said, wait = _message(error), _retry_after(error)
        if status >= 500 or status == BUSY:
            raise NoAnswerError(status, f"the cluster at {server} failed: {said}", wait) from error
        if status == STRANGER:
            said = f"the cluster at {server} does not know you: log in anew, or choose another --kube_context"
        elif status == FORBIDDEN and _lacks_rights(said):
            said = f"you may not {what} in namespace {namespace}: {said}"
        elif status == ABSENT and f'namespaces "{namespace}" not found' in said:
            said = f"there is no namespace {namespace} in the cluster at {server}: choose another --namespace"
        raise NotDoneError(status, said, wait) from error
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        raise NoAnswerError(0, f"the cluster at {server} does not answer: {error}") from error


def _lacks_rights(message: str) -> bool:
    return "cannot " in message and "resource" in message


def _message(error: ApiException) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.status} {error.reason}"


def _retry_after(error: ApiException) -> float:
    try:
        return float((error.headers or {}).get("Retry-After", 0))
    except ValueError:
        return 0.0

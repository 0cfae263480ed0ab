"""Who may call what: `ALLOWED` says it, and `Guard` applies it to every call.

A caller has a role. On a cluster the caller's certificate says which. On this machine whoever holds the user's token has
every role. All workers of a job share one certificate, so a worker may say Hello with the id of another: workers
trust each other with the gradients already, and whoever has got into one worker can spoil the training, or end it by
reporting an error, anyway. With a worker's certificate nobody can command or watch the job, or reach another job.
A call that the table does not name is refused to all.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

import grpc

from elasticdl.common.channel import TOKEN_KEY, identify
from elasticdl.common.credentials import Identity, Role, TlsFolder, Token

ALLOWED: Mapping[str, frozenset[Role]] = {
    "Session": frozenset({Role.WORKER}),
    "Attend": frozenset({Role.WORKER}),  # an agent holds what its workers hold
    "Status": frozenset({Role.OWNER}),
    "Watch": frozenset({Role.OWNER}),
    "Events": frozenset({Role.OWNER}),
    "Scale": frozenset({Role.OWNER}),
    "Stop": frozenset({Role.OWNER}),
}

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stubs only


class Access(Protocol):
    """Where the master listens, and which roles a caller has."""

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Listen at ``host:port``; returns the port taken, 0 (or RuntimeError) if it is not to be had."""

    def roles(self, context: Context) -> frozenset[Role]:
        """The roles of the caller; none for a stranger."""

    @property
    def stranger(self) -> str:
        """What a stranger is told."""


@dataclass(frozen=True, slots=True)
class TokenAccess:
    """A job of this machine: whoever has the token holds every role."""

    token: Token
    stranger: str = "the job's token is missing or wrong: jobs are controlled by the user who started them"

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        host = address.rpartition(":")[0].strip("[]")
        if not ipaddress.ip_address(host).is_loopback:
            raise ValueError(f"a token must not travel in the clear, so not over {host}: use certificates")
        return server.add_insecure_port(address)

    def roles(self, context: Context) -> frozenset[Role]:
        given = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        right = hmac.compare_digest(given_bytes, self.token.value.encode())
        return frozenset(Role) if right else frozenset()


@dataclass(frozen=True, slots=True)
class TlsAccess:
    """A job on a cluster: mutual TLS. A caller without a certificate of this job gets no connection at all.

    gRPC speaks TLS 1.2 and newer only.
    """

    tls: TlsFolder  # the master's
    job: str
    stranger: str = "the certificate is of another job, or of no role in this one"

    @classmethod
    def load(cls, tls: TlsFolder) -> Self:
        """
        Raises:
            UserError: the certificate can't be read, or is of no job.
        """
        return cls(tls, identify(tls).job)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        files = self.tls.read()
        credentials = grpc.ssl_server_credentials([(files.key, files.certificate)], files.ca, require_client_auth=True)
        return server.add_secure_port(address, credentials)

    def roles(self, context: Context) -> frozenset[Role]:
        names = context.auth_context().get("x509_subject_alternative_name", ())
        return frozenset(role for role in Role if Identity(role, self.job).dns_name.encode() in names)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # as above
    """Lets a call reach its handler, a coroutine function, only if the caller has a role for which the table allows it."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # no such call: gRPC says so
        name = handler_call_details.method.rpartition("/")[2]
        streams = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if streaming else "unary" for streaming in streams)
        behaviour, make = getattr(handler, kind), getattr(grpc, f"{kind}_rpc_method_handler")

        async def guarded(request: Any, context: Context) -> Any:
            roles, allowed = self._access.roles(context), ALLOWED.get(name, frozenset())
            if not roles:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, self._access.stranger)
            if not roles & allowed:
                text = f"{_listed(roles)} may not call {name}: it takes the certificate of {_listed(allowed)}"
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
            return await behaviour(request, context)

        made: Handler = make(guarded, handler.request_deserializer, handler.response_serializer)
        return made


def _listed(roles: frozenset[Role]) -> str:
    return " or ".join(f"the {role}" for role in sorted(roles)) or "nobody"

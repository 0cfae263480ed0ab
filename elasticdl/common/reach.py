"""The lines of a worker or an agent about a master that it does not reach, and how they are found in its log."""

from __future__ import annotations

import re

from elasticdl.common.reason import flat

NOT_REACHED = "has not reached the master"  # as a reason; the worker may not have tried yet
NO_ANSWER = "no answer"
# What gRPC's details contain, and what it means.
_PLAIN = (
    (r"lookup|DNS|ARES_", "its name can't be resolved"),
    (r"Connection refused", "the connection is refused, as nothing listens there"),
    (r"No route to host|unreachable", "there is no route to it"),
    (r"[Hh]andshake.*Socket closed", "the connection is closed in the TLS handshake"),
    (r"[Hh]andshake|SSL_", "the TLS handshake fails"),
    (r"timed out|timeout|Deadline|cancelled", NO_ANSWER),
    (r"Socket closed|Connection reset|End of TCP|GOAWAY", "the connection is closed at once"),
    (r"HTTP/2|http2", "what answers there is no master"),
)
_UNREACHED = re.compile(
    r"has not reached the master at (?P<address>\S+) for \d+ s: (?P<problem>.*?); it goes on trying"
)
_REACHED = "has reached the master at "


def in_words(details: str) -> str:
    """What gRPC says of a call that failed, in a person's words."""
    found = (words for pattern, words in _PLAIN if re.search(pattern, details))
    return next(found, flat(details) or NO_ANSWER)


def unreached(address: str, seconds: float, problem: str, limit: float, who: str = "worker") -> str:
    """The line of a worker, or an agent, about a master that does not answer; it gives up after ``limit`` seconds."""
    return (
        f"this {who} has not reached the master at {address} for {seconds:.0f} s: {problem}; it goes on trying, and "
        f"gives up after {limit:g} s"
    )


def reached(address: str, seconds: float, who: str = "worker") -> str:
    """Its line when the master has answered after all."""
    return f"this {who} {_REACHED}{address} after {seconds:.0f} s"


def last_problem(log: str) -> str:
    """``ADDRESS: PROBLEM``, if a worker has said last that it does not reach its master; else empty."""
    problem = ""
    for line in log.splitlines():
        if found := _UNREACHED.search(line):
            problem = f"{found['address']}: {found['problem']}"
        elif _REACHED in line:
            problem = ""
    return problem

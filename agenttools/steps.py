"""A tool written once for sync and async callers: a generator of requests, and the two drivers that make them.

Owns how requests reach a client. Must not know what a request means.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from agenttools.arguments import FAULTS, mistaken
from agenttools.wire import WireError

Reply = dict[str, Any]
Request = tuple[str, dict[str, Any]]
"""An operation of ``agenttools.wire`` and its parameters."""

HELLO: Request = ("hello", {})
"""Asks for what the daemon said of itself, which the client knows after its first request."""

FAILURES = (OSError, WireError)
"""What a request may raise: thrown into the generator where it asked."""

P = ParamSpec("P")
R = TypeVar("R")

Steps = Generator[Request, Reply, R]
"""A tool at work: yields requests, is sent their replies, returns the result."""


class Client(Protocol):
    """What the tools need of ``agenttools.client.Client``."""

    @property
    def hello(self) -> Reply: ...
    def call(self, op: str, /, **params: Any) -> Reply: ...


class AsyncClient(Protocol):
    """What the async tools need of it."""

    async def ahello(self) -> Reply: ...
    async def acall(self, op: str, /, **params: Any) -> Reply: ...


def run(client: Client, steps: Steps[R]) -> R:
    """Make the requests of ``steps`` one after the other; its result."""
    try:
        request = next(steps)
        while True:
            try:
                reply = client.hello if request is HELLO else client.call(request[0], **request[1])
            except FAILURES as exc:
                request = steps.throw(exc)
            else:
                request = steps.send(reply)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


async def arun(client: AsyncClient, steps: Steps[R]) -> R:
    """The same inside asyncio or trio. Cancelling it cancels the request that is under way."""
    try:
        request = next(steps)
        while True:
            try:
                reply = await (client.ahello() if request is HELLO else client.acall(request[0], **request[1]))
            except FAILURES as exc:
                request = steps.throw(exc)
            else:
                request = steps.send(reply)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def both(
    make: Callable[P, Steps[R]],
) -> tuple[Callable[Concatenate[Client, P], R], Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]]:
    """``make`` as a function and as a coroutine function ``a...``, with the client as their first parameter.

    An argument of a wrong type is a TypeError that names it.
    """

    def sync(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return run(client, make(*args, **kwargs))
        except FAULTS as exc:
            raise mistaken(make, args, kwargs) or exc from None

    async def concurrent(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await arun(client, make(*args, **kwargs))
        except FAULTS as exc:
            raise mistaken(make, args, kwargs) or exc from None

    client = inspect.Parameter("client", inspect.Parameter.POSITIONAL_ONLY)
    shown = inspect.Signature([client, *inspect.signature(make).parameters.values()])
    name = make.__name__.lstrip("_")
    functions: tuple[tuple[Any, str], ...] = ((sync, name), (concurrent, f"a{name}"))
    for function, called in functions:
        function.__name__ = function.__qualname__ = called
        function.__module__, function.__doc__, function.__signature__ = make.__module__, make.__doc__, shown
    return sync, concurrent

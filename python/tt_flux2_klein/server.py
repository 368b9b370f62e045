# SPDX-License-Identifier: Apache-2.0
"""The HTTP server as an ASGI application: ``uvicorn tt_flux2_klein.server:app --port 20000``.

Every route is answered by the Rust server's own handlers, in this process. Settings are the variables of ``flux2-server
serve --help`` (``KLEIN_SNAPSHOT``, ``FLUX2_DTYPE``, ``API_KEY``, …); host, port and connections are the ASGI server's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from typing import Any
from urllib.parse import quote

from . import _native
from .errors import KleinError, ServeError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_log = logging.getLogger("uvicorn.error")


class _Running:
    """One server, from its start to its end."""

    def __init__(self) -> None:
        self.server = _native.Server()
        self.started, self.warm, self.ended = self.server.start()
        self.stopping = False

    def watch(self) -> None:
        """A device that is lost ends the process, so that a supervisor starts it again."""

        def lost(ended: Future[None]) -> None:
            if not self.stopping and ended.exception() is not None:
                _log.error("%s", ended.exception())
                os.kill(os.getpid(), signal.SIGTERM)

        self.ended.add_done_callback(lost)

    async def stop(self) -> None:
        self.stopping = True
        self.server.drain()
        try:
            await asyncio.wrap_future(self.ended)
        except ServeError as error:
            _log.error("%s", error)
        await asyncio.get_running_loop().run_in_executor(None, self.server.close)


class App:
    """The application. It loads the model at the ASGI server's start-up, or at the first request without one."""

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._lock = threading.Lock()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one connection of the ASGI server (ASGI 3.0: ``lifespan`` and ``http``)."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        else:
            raise NotImplementedError(f"there is no answer to ASGI scopes of type {scope['type']!r}")

    def _run(self) -> _Running:
        with self._lock:
            if self._running is None:
                self._running = _Running()
            return self._running

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            running = self._run()
            # "Application startup complete" is said after this: it has to be true.
            await asyncio.wrap_future(running.warm)
            running.watch()
        except (KleinError, ValueError) as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await running.stop()
        self._running = None
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Message, receive: Receive, send: Send) -> None:
        running = self._run()
        await asyncio.wrap_future(running.started)
        client = scope.get("client")
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        exchange = running.server.open(scope["method"], _target(scope), headers, client[0] if client else None)
        feeding = asyncio.ensure_future(_feed(exchange, receive))
        try:
            head = await asyncio.wrap_future(exchange.response())
            if head is None:
                return
            await send({"type": "http.response.start", "status": head[0], "headers": head[1]})
            while (piece := await asyncio.wrap_future(exchange.piece())) is not None:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            feeding.cancel()
            exchange.close()


def _target(scope: Message) -> bytes:
    """Path and query as they came, below the place where the application is mounted."""
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    root = quote(scope.get("root_path", "")).encode()
    if root and path.startswith(root):
        path = path[len(root) :] or b"/"
    query: bytes = scope.get("query_string", b"")
    return path + b"?" + query if query else path


async def _feed(exchange: _native.Exchange, receive: Receive) -> None:
    """The request's body; then waits for the client to go away, which ends what is done for it alone."""
    more = True
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            exchange.close()
            return
        if more:
            if piece := message.get("body", b""):
                await asyncio.wrap_future(exchange.feed(bytes(piece)))
            more = message.get("more_body", False)
            if not more:
                exchange.end_body()


#: What an ASGI server is pointed at.
app = App()

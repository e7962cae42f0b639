"""The server: its address, and how it starts and stops."""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import uvicorn

from moejax.errors import InputError
from moejax.serve.batch import Batch
from moejax.serve.endpoint.app import Endpoint
from moejax.serve.endpoint.fields import RefusedError

CLOSE_SECONDS = 5  # for connections to end, after their texts have
JOIN_SECONDS = 10  # for a step of the batch
CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket at an address; port 0 takes a free one. Nobody is answered yet.

    Raises:
      InputError: if the address cannot be used.
    """
    opened = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
    except (OSError, UnicodeError) as error:  # a name may be none of the internet's
        if opened is not None:
            opened.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"cannot listen. {host}:{port}: {reason}. The address must be this machine's, "
            f"and the port free. Choose another with --port."
        ) from error
    return opened


def url_of(opened: socket.socket) -> str:
    """Returns the address of a socket as clients write it."""
    host, port = opened.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


class _Uvicorn(uvicorn.Server):
    """A server without handlers of signals."""

    def capture_signals(self) -> Any:
        return nullcontext()


class Server:
    """Answers at an address until a signal or an error of the batch ends it."""

    def __init__(self, endpoint: Endpoint, opened: socket.socket, *, grace: float):
        """Takes the seconds that texts have to end after a signal."""
        self._endpoint, self._socket, self._grace = endpoint, opened, grace
        config = uvicorn.Config(
            endpoint.app,
            lifespan="off",
            ws="none",
            log_config=None,  # errors are shown by Python's own last resort
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        self._uvicorn, self._code = _Uvicorn(config), 0

    def run(self, warm_up: Callable[[Batch], None], ready: Callable[[], None]) -> int:
        """Serves. Returns the exit code.

        Args:
          warm_up: what the batch's thread does before it takes requests.
          ready: called when it takes them.
        """
        return asyncio.run(self._run(warm_up, ready))

    def stop(self) -> None:
        """Stops as SIGTERM does; may be called from any thread, once `run` has begun."""
        self._loop.call_soon_threadsafe(self._ask, signal.SIGTERM)

    async def _run(self, warm_up: Callable[[Batch], None], ready: Callable[[], None]) -> int:
        worker, loop = self._endpoint.worker, asyncio.get_running_loop()
        self._loop, self._ready = loop, ready
        self._asked, self._hurried = asyncio.Event(), asyncio.Event()
        # A loop of another thread gets no signals.
        in_main = threading.current_thread() is threading.main_thread()
        for number in CODES if in_main else ():
            loop.add_signal_handler(number, self._ask, number)
        worker.start(warm_up, self._on_change)
        ending = asyncio.ensure_future(self._end())
        await self._uvicorn.serve([self._socket])
        ending.cancel()
        for number in CODES if in_main else ():
            loop.remove_signal_handler(number)
        if worker.error is not None:
            raise worker.error
        worker.stop(self._code)
        if not await asyncio.to_thread(worker.join, JOIN_SECONDS):
            # A compiler is at work, and would keep the process.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code)
        return self._code

    def _ask(self, number: signal.Signals) -> None:
        """Stops after the texts under way; at the second signal at once."""
        if self._asked.is_set():
            self._hurried.set()
        self._endpoint.closing, self._code = True, CODES[number]
        self._asked.set()

    def _on_change(self) -> None:
        """Is called when the worker is ready, and when it has ended."""
        if self._endpoint.worker.error is not None:
            self._endpoint.closing = True
            self._hurried.set()
            self._asked.set()
        elif self._endpoint.worker.ready and not self._endpoint.closing:
            self._ready()

    async def _end(self) -> None:
        """Waits for a signal, then for texts, and closes the server."""
        await self._asked.wait()
        worker, loop = self._endpoint.worker, asyncio.get_running_loop()
        until = loop.time() + self._grace
        while worker.under_way and loop.time() < until and not self._hurried.is_set():
            await asyncio.sleep(0.05)
        failed = worker.error is not None
        worker.end_all(
            RefusedError(
                "text is not finished. The server "
                + ("failed." if failed else "stops, and its grace is over. Send it again later."),
                status=500 if failed else 503,
                code="failed" if failed else "stopping",
            )
        )
        self._uvicorn.should_exit = True

"""SGLang's HTTP, as far as the bridge speaks it: control calls, and generations that run side by side on one thread.

Knows addresses, keys, deadlines and status codes; what the answers mean is for others. Written against SGLang 0.5.23.
"""

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import Mapping
from typing import Any

import httpx2

from rollout_bridge.errors import Fatal, Retryable

_CONNECT_SECONDS = 5.0


class Refused(Fatal):
    """The server answered with an error of ours (a status of 400 to 499)."""


class SglangHttp:
    """One server. Every method may be called from any thread."""

    def __init__(self, url: str, *, api_key: str | None, admin_key: str | None) -> None:
        """Connects to nothing yet.

        Args:
          url: http://host:port.
          api_key: that generations send; None = none.
          admin_key: that control calls send; None = the API key.
        """
        self.url = url.rstrip("/")
        self._control = httpx2.Client(headers=_bearer(admin_key or api_key), trust_env=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-http", daemon=True)
        self._thread.start()
        self._generations = asyncio.run_coroutine_threadsafe(
            _client(_bearer(api_key or admin_key)), self._loop
        ).result()

    def get(self, path: str, seconds: float) -> dict[str, Any]:
        """Answer of a GET.

        Raises:
          Retryable: no answer within the time, or the server's own error.
          Refused: the server refuses.
        """
        return self._call("GET", path, None, seconds)

    def post(self, path: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Answer of a POST; {} when it is not a JSON object. Raises as `get`."""
        return self._call("POST", path, body, seconds)

    def start(self, path: str, body: Mapping[str, Any], seconds: float) -> "concurrent.futures.Future[bytes]":
        """Starts a POST of the generating kind; the future gives its answer, or raises as `get`.

        Cancelling the future hangs up.
        """
        return asyncio.run_coroutine_threadsafe(self._start(path, body, seconds), self._loop)

    def result(self, started: "concurrent.futures.Future[bytes]") -> bytes:
        """Waits for the answer of what was started.

        Raises:
          Retryable: no answer, or somebody hung up.
          Refused: the server refuses.
        """
        try:
            return started.result()
        except concurrent.futures.CancelledError as error:
            raise Retryable(f"SGLang at {self.url}: expected an answer, got a call that was given up") from error

    def close(self) -> None:
        """Hangs up on everything."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()
        self._control.close()

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
        limits = httpx2.Timeout(seconds, connect=min(_CONNECT_SECONDS, seconds))
        try:
            answer = self._control.request(method, self.url + path, json=body, timeout=limits)
        except httpx2.TransportError as error:
            raise self._unreachable(path, error) from error
        content = _content(self.url + path, answer)
        try:
            parsed = json.loads(content)
        except ValueError:  # some control calls answer in words
            return {}
        return parsed if isinstance(parsed, dict) else {}

    async def _start(self, path: str, body: Mapping[str, Any], seconds: float) -> bytes:
        limits = httpx2.Timeout(seconds, connect=_CONNECT_SECONDS)
        try:
            answer = await self._generations.post(self.url + path, json=body, timeout=limits)
        except httpx2.TransportError as error:
            raise self._unreachable(path, error) from error
        return _content(self.url + path, answer)

    async def _end(self) -> None:
        others = asyncio.all_tasks(self._loop) - {asyncio.current_task(self._loop)}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._generations.aclose()
        await asyncio.sleep(0.01)  # a transport closes its socket only in the loop's next round

    def _unreachable(self, path: str, error: httpx2.TransportError) -> Retryable:
        return Retryable(
            f"SGLang at {self.url}{path}: expected an answer, got {type(error).__name__}: {error}; does it run there?"
        )


async def _client(headers: Mapping[str, str]) -> httpx2.AsyncClient:
    """Made on the loop that it lives on; the bridge's own limits are the only ones."""
    unlimited = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx2.AsyncClient(headers=headers, limits=unlimited, trust_env=False)


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _content(where: str, answer: httpx2.Response) -> bytes:
    status = answer.status_code
    if status < 400:
        return answer.content
    text = answer.text[:500]
    if status in (401, 403):
        raise Fatal(
            f"SGLang at {where}: expected our key to be accepted, got {status}; give the bridge the server's keys "
            "(--api-key-file, --admin-key-file)"
        )
    if status < 500 and status not in (408, 429):
        raise Refused(f"SGLang at {where}: expected success, got {status}: {text}")
    raise Retryable(f"SGLang at {where}: expected success, got {status}: {text}")

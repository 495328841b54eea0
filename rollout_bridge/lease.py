"""Who publishes to an engine: one trainer at a time, and of one run only its latest start.

A trainer that lives shows it with every call and with the state that it follows; one that ends gives the engine back,
and one that was silent for long enough has lost it. A run that was resumed takes over from its former start at once,
and may go back to an older version: what that one had published since is not part of the run any more.
"""

import dataclasses
import threading
import time
import urllib.parse
from collections.abc import Callable

from rollout_bridge.errors import Fatal

LEASE_KEY = "sat-jax-lease"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A trainer's claim.

    Attributes:
      holder: names the run, for others; the same after a resume.
      start: of this start of it alone, e.g. a UUID.
    """

    holder: str
    start: str

    def to_metadata(self) -> str:
        """As it travels with a call: metadata is ASCII."""
        return f"{urllib.parse.quote(self.holder)} {urllib.parse.quote(self.start)}"

    @classmethod
    def from_metadata(cls, text: str) -> "Lease":
        """The claim that travelled.

        Raises:
          ValueError: it is none.
        """
        parts = [urllib.parse.unquote(part) for part in text.split(" ")]
        if len(parts) != 2 or not all(parts):
            raise ValueError(f"lease: expected a holder and a start, got {text!r}")
        return cls(holder=parts[0], start=parts[1])


NOBODY = Lease(holder="a client without a lease", start="")


class LeaseBook:
    """Keeps who holds one engine. Every method may be called from any thread."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins free.

        Args:
          seconds: of silence after which a holder has lost it.
          clock: seconds since whenever.
        """
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._held: Lease | None = None
        self._since = self._seen = 0.0
        self._past: set[Lease] = set()

    def renew(self, lease: Lease) -> None:
        """A sign of life; of others than the holder it means nothing."""
        with self._lock:
            if lease == self._held:
                self._seen = self._clock()

    def release(self, lease: Lease) -> None:
        """Gives it back; of others than the holder it means nothing."""
        with self._lock:
            if lease == self._held:
                self._held = None

    def claim(self, lease: Lease) -> None:
        """Makes it the holder, if that is allowed.

        Raises:
          Fatal: another trainer holds it, or a later start of the same run has taken over.
        """
        with self._lock:
            now, held = self._clock(), self._held
            if lease in self._past and held is not None:
                raise Fatal(
                    f"lease of {lease.holder}: expected the engine's holder, got a start that {held.holder} has taken "
                    f"over from {now - self._since:.0f} s ago; end this process"
                )
            silent = now - self._seen
            if held is not None and lease.holder != held.holder and silent < self._seconds:
                raise Fatal(
                    f"lease of {lease.holder}: expected a free engine, got one that {held.holder} has held for "
                    f"{now - self._since:.0f} s; give this run its own fleet, or end that trainer: it gives the "
                    f"engine back, or loses it {self._seconds:.0f} s after its last sign of life"
                )
            if lease != held:
                if held is not None and lease.start:
                    self._past.add(held)
                self._held, self._since = lease, now
            self._seen = now

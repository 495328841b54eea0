"""Whether the server is there, whether it is still the same one, and what of its weights was verified.

A server that restarted has its base weights again. It is known by its tag: every update by a bridge gives the weights
a tag that nobody used before, so a tag that is not ours, of a start or of somebody else's update, is another instance.
"""

import dataclasses
import logging
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

from rollout_bridge.engines.sglang_http import SglangHttp
from rollout_bridge.engines.sglang_server import TESTED, ServerFacts, read_facts, read_tag
from rollout_bridge.errors import BridgeError, Fatal, Retryable
from rollout_bridge.messages import Manifest, ModelInfo, ProbeReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class Live:
    """What serves, verified: its tag, what was pushed, and how well it was reproduced."""

    tag: str
    manifest: Manifest
    report: ProbeReport


@dataclasses.dataclass(kw_only=True, eq=False)
class Instance:
    """A server from its start to its end.

    Attributes:
      engine_id: names it.
      facts: what it is.
      verified: versions by the tags that were verified on it.
      own: every tag, with where the weights were read, that it may show.
      live: what serves; None before the first commit, and while an update is in doubt.
    """

    engine_id: str
    facts: ServerFacts
    verified: dict[str, int] = dataclasses.field(default_factory=dict)
    own: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    live: Live | None = None


class Watch:
    """Follows one server in a thread of its own. What is read here is guarded by `changed`."""

    def __init__(
        self,
        http: SglangHttp,
        model: Path | None,
        changed: threading.Condition,
        *,
        held: Callable[[], bool],
        seconds: tuple[float, float],
    ) -> None:
        """Starts looking.

        Args:
          http: the server.
          model: folder of its config.json; None = the one that it names.
          changed: notified when the server comes, goes, or is another.
          held: whether an update is under way, which looks for itself; called with `changed` held.
          seconds: between two looks, and the deadline of a call.
        """
        self._http = http
        self._model = model
        self._changed = changed
        self._held = held
        self._every, self._deadline = seconds
        self.instance: Instance | None = None
        self.gone: str | None = f"SGLang at {http.url} has not been reached yet"
        self.failure: Fatal | None = None
        self._soon = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="sglang-watch", daemon=True)
        self._thread.start()

    @property
    def engine_id(self) -> str:
        """Identity of the server's instance."""
        instance = self.instance
        return "sglang-unreached" if instance is None else instance.engine_id

    @property
    def live(self) -> Live | None:
        """What serves, if the server is there."""
        if self.gone or self.failure or self.instance is None:
            return None
        return self.instance.live

    def present(self) -> Instance:
        """The instance that is there.

        Raises:
          Retryable: none is.
          Fatal: it cannot be used as it was started; says what to change.
        """
        if self.failure is not None:
            raise Fatal(str(self.failure))
        if self.gone is not None or self.instance is None:
            raise Retryable(str(self.gone))
        return self.instance

    def model(self) -> ModelInfo:
        """What the server holds, also while it is away. Raises as `present`, before its first answer."""
        with self._changed:
            return (self.present() if self.failure or self.instance is None else self.instance).facts.model

    def wait(self, seconds: float) -> None:
        """Until the first answer, whatever it says."""
        with self._changed:
            self._changed.wait_for(lambda: self.instance is not None or self.failure is not None, seconds)

    def look_soon(self) -> None:
        """Something is not as it was."""
        self._soon.set()

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._soon.set()
        self._thread.join(self._deadline + 5.0)

    def _follow(self) -> None:
        while not self._closing.is_set():
            try:
                self._look()
            except Retryable as error:
                self._note(str(error), self.failure)
            except BridgeError as error:
                self._note(self.gone, Fatal(str(error)))
            except Exception as error:  # a defect of ours: whoever needs the server hears of it
                logging.getLogger(__name__).exception("the look at the server broke")
                self._note(self.gone, Fatal(f"the look at the server broke: {type(error).__name__}: {error}"))
            self._soon.wait(self._every)
            self._soon.clear()

    def _look(self) -> None:
        tag = read_tag(self._http, self._deadline)
        with self._changed:
            known = self.instance is not None and tag in self.instance.own
            if self._held() or (known and self.gone is None and self.failure is None):
                return
        facts = read_facts(self._http, self._model, self._deadline)
        with self._changed:
            if self._held():
                return
            self.gone = self.failure = None
            before = self.instance
            if before is None or facts.tag not in before.own or facts.model != before.facts.model:
                self._welcome(facts)
            self._changed.notify_all()

    def _welcome(self, facts: ServerFacts) -> None:
        """A server of which nothing is verified."""
        engine_id = f"sglang-{uuid.uuid4().hex[:12]}"
        self.instance = Instance(engine_id=engine_id, facts=facts, own={facts.tag})
        log = logging.getLogger(__name__)
        log.info("%s: SGLang %s at %s, weights %s", engine_id, facts.version, self._http.url, facts.tag[0])
        if facts.version != TESTED:
            log.warning("SGLang %s at %s: %s is what was tested", facts.version, self._http.url, TESTED)

    def _note(self, gone: str | None, failure: Fatal | None) -> None:
        with self._changed:
            self.gone, self.failure = gone, failure
            self._changed.notify_all()

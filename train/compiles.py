"""Counts XLA compilations, so that a run can say that none came after the first of its shape."""

from types import TracebackType

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """A context manager; `count` is the number of programs compiled in this process since it was entered."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def __enter__(self) -> "CompileCounter":
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_kwargs: str | int) -> None:
        if event == _EVENT:
            self.count += 1
            self.seconds += duration_secs

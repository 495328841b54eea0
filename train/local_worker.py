"""What the local engine's one thread does: continuous batching, and versions that change under running sequences.

Between short stretches of decoding it gives out what has finished and fills free slots. Everything here runs on that
thread alone, except `status`, which reads single attributes.
"""

import dataclasses
import queue
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import numpy as np
from flax import nnx

from rollout_bridge.errors import BridgeError, Busy, Fatal, NotStaged, Retryable
from rollout_bridge.messages import (
    Completion,
    EngineStatus,
    Finish,
    InFlight,
    LogprobDefinition,
    Manifest,
    Probe,
    ProbeReport,
    SampleRequest,
    Serving,
    Trace,
)
from sat_jax.model import Policy, PolicyConfig
from sat_jax.sampler import Sequences, SlotsConfig
from train.local_programs import LocalPrograms, Progress


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ticket:
    """A completion that somebody waits for at `reply`: it comes there, or the reason why it does not."""

    request: SampleRequest
    member: int
    reply: "queue.SimpleQueue[Completion | BridgeError]"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StagedWeights:
    """A complete push, on the device, not yet verified."""

    manifest: Manifest
    weights: nnx.State


class LocalWorker:
    """Owns the device, the slots, the queue of tickets and the version."""

    def __init__(self, engine_id: str, policy: PolicyConfig, slots: SlotsConfig, steps: int) -> None:
        """Compiles the programs: seconds.

        Args:
          engine_id: written on every completion.
          policy: the architecture; its `dtype` is that of weights and computation.
          slots: how much is held at once.
          steps: most tokens a slot between two looks at commands.
        """
        self._engine_id = engine_id
        self._dtype = policy.dtype
        self._steps = steps
        self._programs = LocalPrograms(policy, slots)
        self._owners: list[Ticket | None] = [None] * slots.slots
        self._waiting: deque[Ticket] = deque()
        self._weights: nnx.State | None = None
        self._version = -1
        self._live: tuple[Manifest, ProbeReport] | None = None
        self._staged: StagedWeights | None = None
        self._paused = False
        self._when_idle: Callable[[], None] | None = None

    def status(self) -> EngineStatus:
        """The present state; may be called from any thread."""
        version, staged = self._version, self._staged
        served = Serving.PAUSED if self._paused else Serving.SERVING
        return EngineStatus(
            engine_id=self._engine_id,
            serving=served if version >= 0 else Serving.NOT_SERVING,
            version=version,
            staged_version=None if staged is None else staged.manifest.version,
            running=len(self._running()),
            waiting=len(self._waiting),
        )

    def turn(self) -> bool:
        """Admits, decodes and gives out once; whether there is more to do without a further command."""
        if self._when_idle and not self._running():
            action, self._when_idle = self._when_idle, None
            action()
        if self._weights is None or self._paused:
            return False
        enough = len(self._owners)
        if self._when_idle is None:
            self._admit()
            if self._waiting:  # then no slot is free: the stretch ends as soon as an eighth of them is
                enough = max(1, enough // 8)
        if self._running():
            progress = self._programs.decode(self._weights, self._version, self._steps, enough)
            ended = [slot for slot in self._running() if not progress.running_B[slot]]
            self._give_out(ended, progress)
        return bool(self._running() or self._waiting or self._when_idle)

    def begin(self, policy: Policy, version: int) -> None:
        """Serves these weights from now on, on the caller's word."""
        self._weights, self._version = self._programs.weights(policy), version

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queues tickets.

        Raises:
          Retryable: no version serves.
        """
        if self._version < 0:
            raise Retryable(
                f"request {tickets[0].request.request_id!r}: expected a serving engine, got one without a verified "
                f"version (engine {self._engine_id}); publish to it first"
            )
        self._waiting.extend(tickets)

    def cancel(self, tickets: Collection[Ticket]) -> None:
        """Forgets tickets that nobody waits for any more."""
        self._waiting = deque(ticket for ticket in self._waiting if ticket not in tickets)
        slots = [slot for slot in self._running() if self._owners[slot] in tickets]
        if slots:
            self._programs.halt(slots)
        for slot in slots:
            self._owners[slot] = None

    def abort(self, request_ids: Collection[str] | None) -> None:
        """Ends requests (all, if None): running ones give what they have, waiting ones nothing."""
        self._abort_running(request_ids)
        for ticket in tuple(self._waiting):
            if request_ids is None or ticket.request.request_id in request_ids:
                self._waiting.remove(ticket)
                ticket.reply.put(self._completion(ticket, None, 0))

    def stage(self, staged: StagedWeights) -> None:
        """Takes a complete push in place of an earlier one."""
        self._staged = staged

    def discard(self) -> None:
        """Drops what is staged."""
        self._staged = None

    def commit(self, version: int, probe: Probe, in_flight: InFlight, done: "Future[ProbeReport]") -> None:
        """Verifies what is staged, then makes it live, now or when the last running request has finished.

        Raises:
          NotStaged: this version is neither staged nor live.
          Fatal: it does not reproduce the probe; then it is dropped.
          Retryable: another call is waiting for running requests, or paused ones would never finish.
        """
        self._check_idle_free(f"commit of version {version}", in_flight)
        staged, self._staged = self._staged, None
        if (
            self._live
            and self._live[0].version == version
            and (staged is None or staged.manifest.digest == self._live[0].digest)
        ):
            done.set_result(self._live[1])
            return
        if staged is None or staged.manifest.version != version:
            got = "nothing" if staged is None else f"version {staged.manifest.version}"
            self._staged = staged
            raise NotStaged(
                f"commit of version {version}: expected it to be staged, got {got} (engine {self._engine_id})"
            )
        report = self._verify(staged, probe)

        def swap() -> None:
            self._weights, self._version, self._live = staged.weights, version, (staged.manifest, report)
            done.set_result(report)

        self._apply(swap, in_flight)
        if in_flight is InFlight.RETRACT:
            self._programs.retract()

    def pause(self, in_flight: InFlight, done: "Future[None]") -> None:
        """Stops sampling, now or when the last running request has finished.

        Retracted requests keep their slots: if the weights have not changed by `resume`, nor has their cache.

        Raises:
          Retryable: another call is waiting for running requests.
        """
        if self._paused:
            done.set_result(None)
            return
        self._check_idle_free("pause", in_flight)

        def stop() -> None:
            self._paused = True
            done.set_result(None)

        self._apply(stop, in_flight)

    def resume(self) -> None:
        """Samples again.

        Raises:
          Retryable: a call is waiting for running requests.
        """
        self._check_idle_free("resume", InFlight.RETRACT)
        self._paused = False

    def _running(self) -> list[int]:
        return [slot for slot, ticket in enumerate(self._owners) if ticket is not None]

    def _check_idle_free(self, what: str, in_flight: InFlight) -> None:
        running = len(self._running())
        if self._when_idle:
            raise Busy(f"{what}: expected no other change under way, got one that waits for {running} running requests")
        if self._paused and running and in_flight is InFlight.FINISH:
            raise Retryable(f"{what}: expected requests that can finish, got {running} that are paused; resume first")

    def _apply(self, action: Callable[[], None], in_flight: InFlight) -> None:
        if in_flight is InFlight.FINISH and self._running():
            self._when_idle = action
            return
        if in_flight is InFlight.ABORT:
            self._abort_running(None)
        action()

    def _verify(self, staged: StagedWeights, probe: Probe) -> ProbeReport:
        """Compares the probe's log-probs under the staged weights with the trainer's."""
        report = probe.compare(self._programs.score(staged.weights, probe))
        if not report.mean_abs <= probe.tolerance:  # also when it is NaN
            live = "nothing serves" if self._version < 0 else f"version {self._version} serves on"
            raise Fatal(
                f"probe of version {staged.manifest.version}: expected mean |log-prob difference| of at most "
                f"{probe.tolerance:.4g} nats, got {report.mean_abs:.4g} (largest {report.max_abs:.4g}, "
                f"{len(probe.tokens)} tokens, engine {self._engine_id} in {self._dtype}); the push is dropped, {live}; "
                "check that every tensor was exported under its own name"
            )
        return report

    def _admit(self) -> None:
        free = [slot for slot, ticket in enumerate(self._owners) if ticket is None]
        new = {slot: self._waiting.popleft() for slot in free[: len(self._waiting)]}
        for slot, ticket in new.items():
            self._owners[slot] = ticket
        if new:
            self._programs.admit({slot: (ticket.request, ticket.member) for slot, ticket in new.items()})

    def _abort_running(self, request_ids: Collection[str] | None) -> None:
        slots = [
            slot
            for slot, ticket in enumerate(self._owners)
            if ticket is not None and (request_ids is None or ticket.request.request_id in request_ids)
        ]
        if slots:
            self._programs.halt(slots)
            self._give_out(slots, self._programs.progress())

    def _give_out(self, slots: list[int], progress: Progress) -> None:
        """Answers the tickets of slots that have ended, and frees these."""
        if not slots:
            return
        sequences = self._programs.take(slots)
        for row, slot in enumerate(slots):
            ticket = self._owners[slot]
            assert ticket is not None
            self._owners[slot] = None
            known = int(progress.known_B[slot])
            if progress.fed_B[slot] < known - 1:
                # Halted while its cache was being rebuilt: its routes are of two versions and belong to no token.
                known = len(ticket.request.prompt_tokens)
            ticket.reply.put(self._answer(ticket, _row(sequences, row), known))

    def _answer(self, ticket: Ticket, sequence: Sequences, known: int) -> Completion | BridgeError:
        completion = self._completion(ticket, sequence, known - len(ticket.request.prompt_tokens))
        bad = ~np.isfinite(completion.behavior_logp)
        if not bad.any():
            return completion
        at = int(bad.argmax())
        return Fatal(
            f"completion {completion.request_id}/{completion.member}: expected finite log-probs, got "
            f"{completion.behavior_logp[at]} at token {at} (engine {self._engine_id}, version "
            f"{completion.version[at]}, {self._dtype}); the weights overflow"
        )

    def _completion(self, ticket: Ticket, sequence: Sequences | None, count: int) -> Completion:
        """The last `count` known tokens of a sequence, in arrays of their own."""
        request = ticket.request
        prompt = len(request.prompt_tokens)
        known = prompt + count
        integers, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
        tokens, logp, version, trace = integers, floats, integers, None
        if sequence is not None and count:
            tokens = np.array(sequence.token_BS[prompt:known])
            logp = np.array(sequence.logp_BS[prompt:known])
            version = np.array(sequence.sampler_BS[prompt:known])
            if request.want_trace and sequence.experts_BSLK.shape[1]:  # a dense model has no routes
                trace = Trace(
                    experts_TLK=np.array(sequence.experts_BSLK[: known - 1]),
                    first_row=0,
                    version_T=np.array(sequence.router_BS[: known - 1]),
                )
        return Completion(
            request_id=request.request_id,
            member=ticket.member,
            tokens=tokens,
            behavior_logp=logp,
            version=version,
            trace=trace,
            finish=_finish(request, tokens),
            engine_id=self._engine_id,
            logprob=LogprobDefinition(temperature=request.sampling.temperature or 1.0),
        )


def _row(sequences: Sequences, row: int) -> Sequences:
    fields = {field.name: getattr(sequences, field.name)[row] for field in dataclasses.fields(sequences)}
    return Sequences(**fields)


def _finish(request: SampleRequest, tokens: np.ndarray) -> Finish:
    if len(tokens) and int(tokens[-1]) in request.sampling.stop_ids:
        return Finish.STOP
    room = request.sampling.max_new_tokens - request.already_sampled
    return Finish.LENGTH if len(tokens) == room else Finish.ABORT

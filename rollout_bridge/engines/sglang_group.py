"""Staged weights into an SGLang server over a process group: a sender process beside the bridge broadcasts them.

For servers that cannot read this host's files, or whose workers take weights faster over NCCL than from files. The
sender (`torch_sender`) alone needs PyTorch. A group is of one sender and one instance of the server: when either ends,
or an update breaks off, the next push makes another group. What the server then holds is in doubt, as after any update
that broke (`sglang_update.switch`).
"""

import collections
import contextlib
import dataclasses
import json
import logging
import queue
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_bridge.engines.sglang_files import Bucket, Push
from rollout_bridge.engines.sglang_http import Refused, SglangHttp
from rollout_bridge.engines.sglang_watch import Instance
from rollout_bridge.errors import Fatal, Retryable

BACKENDS = ("gloo", "nccl")
_SENDER = Path(__file__).with_name("torch_sender.py")
_ANSWER_SECONDS = 60.0  # for the sender to say that it has done what the server has already confirmed
_END_SECONDS = 10.0
_IMPORT_SECONDS = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """The process group.

    Attributes:
      backend: of torch.distributed, "gloo" or "nccl".
      address: of this host, as the server's workers reach it; a port of it is chosen when the group is made.
      device: of the sender, "cpu" or "cuda:N". NCCL wants a GPU that none of the server's workers has.
      sender: the command of the sender, without its arguments: an interpreter that has PyTorch, and the program.
      bucket_bytes: at most this much is broadcast at once; the server holds as much beside its weights.
      join_seconds: for the sender to start, and for all ranks to meet.
    """

    backend: str = "gloo"
    address: str = "127.0.0.1"
    device: str = "cpu"
    sender: tuple[str, ...] = (sys.executable, "-P", str(_SENDER))
    bucket_bytes: int = 256 << 20
    join_seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"group backend: expected {' or '.join(BACKENDS)}, got {self.backend!r}")
        if self.backend == "nccl" and self.device == "cpu":
            raise ValueError(
                "group device: expected cuda:N with the backend nccl, got cpu; give the sender a GPU that none of the "
                "server's workers has, or use gloo"
            )
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket bytes: expected at least 1, got {self.bucket_bytes}")

    @classmethod
    def with_python(cls, python: Path, **fields: Any) -> "GroupConfig":
        """A group whose sender is run by this interpreter. Keywords as the attributes."""
        return cls(sender=(str(python), "-P", str(_SENDER)), **fields)  # -P: its folder holds a module called sglang


def require_pytorch(python: Path) -> None:
    """Sees whether a sender could run, before a push needs it.

    Raises:
      ValueError: this is no interpreter, or it has no PyTorch with distributed.
    """
    command = [str(python), "-P", "-c", "import torch.distributed as d; raise SystemExit(not d.is_available())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False)
        said = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no torch.distributed in it"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said:
        raise ValueError(
            f"sender: expected an interpreter with PyTorch, got {python}: {said}; name SGLang's (--sender-python)"
        )


class Sender:
    """The sending process. What it prints on stderr goes where the bridge's own does."""

    def __init__(self, command: Sequence[str]) -> None:
        """Starts it.

        Raises:
          Fatal: there is no such program.
        """
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise Fatal(
                f"sender: expected to start {command[0]}, got: {error}; name an interpreter that has PyTorch "
                "(--sender-python)"
            ) from error
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="sglang-sender", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def order(self, order: Mapping[str, Any]) -> None:
        """Tells it what to do, and returns at once.

        Raises:
          Retryable: it has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError is Python's word for a pipe that `kill` has closed
            raise self._ended(f"it to take {order['do']!r}") from error

    def answer(self, seconds: float) -> dict[str, Any]:
        """Waits until it has done the oldest order that it was not asked about yet.

        Raises:
          Retryable: it has ended, or needs longer than `seconds`.
        """
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise Retryable(f"sender: expected an answer within {seconds} s, got none") from None
        if line is None:
            self._answers.put(None)  # for whoever asks next
            raise self._ended("an answer")
        return json.loads(line)

    def _ended(self, expected: str) -> Retryable:
        with contextlib.suppress(subprocess.TimeoutExpired):  # its pipe is closed, though it lives: None is told
            self._process.wait(_END_SECONDS)
        return Retryable(
            f"sender: expected {expected}, it ended with {self._process.returncode}; see its words above. It needs "
            "PyTorch (--sender-python)"
        )

    def kill(self) -> None:
        """Ends it at once. A second time it does nothing."""
        self._process.kill()
        self._process.wait(_END_SECONDS)
        self._reader.join(_END_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # an order that it did not take is still in the buffer
                logging.getLogger(__name__).debug("the sender ended with an order untaken")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Joined:
    """A group: its name, its sender, and the instance of the server that is in it."""

    name: str
    sender: Sender
    instance: Instance


class ByGroup:
    """See `rollout_bridge.engines.sglang_update.Transport` for what each method promises."""

    def __init__(self, http: SglangHttp, config: GroupConfig) -> None:
        self._http = http
        self._config = config
        self._joined: _Joined | None = None
        self._lock = threading.Lock()  # of `_open` and `_closed`
        self._open: set[Sender] = set()
        self._closed = False

    @property
    def sender(self) -> Sender | None:
        """The sender of the present group."""
        return None if self._joined is None else self._joined.sender

    def prepare(self, instance: Instance) -> None:
        """Makes a group with this instance, unless there is one."""
        joined = self._joined
        if joined is not None and joined.instance is instance and joined.sender.alive():
            return
        if joined is not None:
            self._leave(joined)
        self._joined = self._join(instance)

    def load(self, push: Push, tag: str, seconds: float) -> None:
        """Broadcasts bucket after bucket; the last one gives the weights their name."""
        joined = self._joined
        assert joined is not None, "load without prepare"
        self._begin(seconds)
        buckets = collections.deque(push.buckets(self._config.bucket_bytes))
        try:
            while buckets:
                bucket = buckets.popleft()
                self._send(joined, bucket, tag if not buckets else None, seconds)
        except BaseException:
            joined.sender.kill()  # a server that waits for its broadcast would do nothing else
            raise
        finally:
            self._http.post("/end_weight_update", {}, seconds)

    def path(self, push: Push, instance: Instance) -> str:
        """Where it read its weights before, which this does not change."""
        return instance.facts.tag[1]

    def close(self) -> None:
        """Ends the sender, whatever it is doing."""
        with self._lock:
            self._closed = True
            senders, self._open = self._open, set()
        for sender in senders:
            sender.kill()

    def _join(self, instance: Instance) -> _Joined:
        tensor, pipeline = instance.facts.parallel
        if pipeline != 1:
            raise Fatal(
                f"SGLang at {self._http.url}: expected pp_size = 1 for a process group, got {pipeline}; use "
                "--transport disk"
            )
        name, config, world = f"sat-jax-{uuid.uuid4().hex[:12]}", self._config, 1 + tensor
        options = {"address": config.address, "backend": config.backend, "device": config.device}
        options |= {"group": name, "world-size": world, "seconds": config.join_seconds}
        sender = self._start([*config.sender, *(f"--{key}={value}" for key, value in options.items())])
        try:
            sender.order({"do": "listen"})
            port = sender.answer(config.join_seconds)["port"]
            sender.order({"do": "join"})  # it waits for the server, which is then held up for as short as can be
            self._http.post(
                "/init_weights_update_group",
                {
                    "master_address": config.address,
                    "master_port": port,
                    "rank_offset": 1,
                    "world_size": world,
                    "group_name": name,
                    "backend": config.backend,
                },
                config.join_seconds,
            )
            sender.answer(_ANSWER_SECONDS)
        except BaseException:
            self._end(sender)
            raise
        return _Joined(name=name, sender=sender, instance=instance)

    def _start(self, command: Sequence[str]) -> Sender:
        with self._lock:
            if self._closed:
                raise Retryable("process group: the bridge is shutting down")
            sender = Sender(command)
            self._open.add(sender)
        return sender

    def _leave(self, joined: _Joined) -> None:
        """Ends a group, in the server too."""
        self._joined = None
        self._end(joined.sender)
        try:
            self._http.post("/destroy_weights_update_group", {"group_name": joined.name}, self._config.join_seconds)
        except Refused as error:  # it restarted: it does not have the group, which is what was wanted
            logging.getLogger(__name__).info("%s", error)

    def _end(self, sender: Sender) -> None:
        sender.kill()
        with self._lock:
            self._open.discard(sender)

    def _begin(self, seconds: float) -> None:
        """Opens the server's session; one that a killed bridge left open is closed first."""
        try:
            self._http.post("/begin_weight_update", {}, seconds)
        except Refused:
            self._http.post("/end_weight_update", {}, seconds)  # refused too, unless a session is open
            self._http.post("/begin_weight_update", {}, seconds)

    def _send(self, joined: _Joined, bucket: Bucket, tag: str | None, seconds: float) -> None:
        """One broadcast: the sender begins, the server takes it, and both say so."""
        joined.sender.order({"do": "send", "path": str(bucket.path), "begin": bucket.begin, "end": bucket.end})
        body = {
            "names": [spec.name for spec in bucket.tensors],
            "dtypes": [spec.dtype for spec in bucket.tensors],
            "shapes": [list(spec.shape) for spec in bucket.tensors],
            "group_name": joined.name,
            "load_format": "flattened_bucket",
            "weight_version": tag,
            "flush_cache": False,  # it was flushed, and nothing has run since
            "abort_all_requests": False,
        }
        try:
            self._http.post("/update_weights_from_distributed", body, seconds)
        except Refused as error:
            _must_be_the_servers_own(error, joined.sender)
            raise
        joined.sender.answer(_ANSWER_SECONDS)


def _must_be_the_servers_own(error: Refused, sender: Sender) -> None:
    """A broadcast that broke is a refusal to the server, though another push with another sender may succeed.

    Raises:
      Retryable: the sender has not sent it.
    """
    try:
        sender.answer(_END_SECONDS)
    except Retryable as broken:
        raise Retryable(f"{broken}; the server says: {error}") from error

"""New weights into a running SGLang server, and the proof that they are what it now serves.

The order is what the traps of SGLang 0.5.23 ask for. Nothing runs while weights change (pause), no prefix of older
weights outlives the change (flush), sampling goes on whatever happens (continue), and no word of the server is taken
for success: names that load nothing, and updates that are refused after they changed something, look like success or
like nothing. So the version, the checksum of the weights and the log-probs of a probe are asked for.
"""

import concurrent.futures
import json
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from rollout_bridge.engines.sglang_files import Push
from rollout_bridge.engines.sglang_http import Refused, SglangHttp
from rollout_bridge.engines.sglang_server import read_tag
from rollout_bridge.engines.sglang_watch import Instance
from rollout_bridge.errors import Fatal, Retryable
from rollout_bridge.messages import Probe, ProbeReport

_FLUSH_SECONDS = 10.0


class Transport(Protocol):
    """How a push that lies staged on this host gets into the server. One call at a time."""

    def prepare(self, instance: Instance) -> None:
        """Makes ready for `load`, while sampling goes on and the weights are as they were.

        Raises:
          Retryable: it could not be done this time.
          Fatal: the server refuses.
        """
        ...

    def load(self, push: Push, tag: str, seconds: float) -> None:
        """Loads a complete push into a server that is paused.

        Args:
          push: as staged.
          tag: the server's name of these weights once all of them are there.
          seconds: for every call.

        Raises:
          Retryable: nobody knows what the server holds.
          Fatal: the same.
        """
        ...

    def path(self, push: Push, instance: Instance) -> str:
        """What the server then names as the folder of its weights."""
        ...

    def close(self) -> None:
        """Releases everything."""
        ...


class ByDisk:
    """The server reads the staged files itself."""

    def __init__(self, http: SglangHttp) -> None:
        self._http = http

    def prepare(self, instance: Instance) -> None:
        """Nothing to do."""

    def load(self, push: Push, tag: str, seconds: float) -> None:
        """One call."""
        answer = self._http.post(
            "/update_weights_from_disk",
            {
                "model_path": str(push.folder),
                "load_format": "auto",
                "weight_version": tag,
                "flush_cache": True,
                "abort_all_requests": False,
            },
            seconds,
        )
        if answer.get("success") is not True:
            raise Fatal(f"SGLang at {self._http.url}: expected the weights of {tag} to load, got {answer}")

    def path(self, push: Push, instance: Instance) -> str:
        """Where they are staged."""
        return str(push.folder)

    def close(self) -> None:
        """Nothing to do."""


def torn(tag: str) -> str:
    """The server's name of its weights while those of `tag` are being loaded; nothing of this name is ever verified."""
    return f"{tag}.torn"


def switch(
    http: SglangHttp, tag: str, load: Callable[[], None], *, abort: bool, seconds: float, changing: Callable[[], None]
) -> None:
    """Makes the server load weights, with sampling stopped meanwhile.

    Args:
      http: the server.
      tag: the server's name of these weights from then on.
      load: does it, and gives them their name with the last of them.
      abort: whether running requests end with what they have; else they keep it and rebuild their cache.
      seconds: for every call.
      changing: called when the next call may change the weights, whatever it answers, and when sampling could not be
        made to go on.

    Raises:
      Retryable: without `changing`, the old weights serve as before; after it, nobody knows.
      Fatal: the same.
    """
    try:
        http.post("/pause_generation", {"mode": "abort" if abort else "retract"}, seconds)
        _flush(http)
        changing()
        # A load that breaks off leaves weights of both versions, and the server goes on under the name that it has: it
        # must not be the old one, whose tokens are trusted.
        http.post("/update_weight_version", {"new_version": torn(tag), "abort_all_requests": False}, seconds)
        load()
    finally:
        try:
            http.post("/continue_generation", {}, seconds)
        except BaseException:
            changing()  # a server that stays paused serves nothing
            raise


def checksum(http: SglangHttp, seconds: float) -> str:
    """SGLang's own checksum over all weights that it holds, in its own layout: equal where the weights are.

    Raises:
      Fatal: it does not tell one.
    """
    answer = http.post("/weights_checker", {"action": "checksum"}, seconds)
    found = answer.get("per_engine_checksum")
    if not isinstance(found, str):
        raise Fatal(f"SGLang at {http.url}: expected a checksum of its weights, got {str(answer)[:300]}")
    return found


def verify(http: SglangHttp, tag: str, probe: Probe, seconds: float) -> ProbeReport:
    """Compares what the server computes under these weights with what the trainer does.

    Raises:
      Fatal: it serves other weights, or does not reproduce the probe.
      Retryable: it does not answer.
    """
    served, _ = read_tag(http, seconds)
    if served != tag:
        raise Fatal(
            f"SGLang at {http.url}: expected the weights {tag}, got {served}; it restarted, or others update it"
        )
    report = probe.compare(_score(http, tag, probe, seconds))
    if not report.mean_abs <= probe.tolerance:  # also when it is NaN
        raise Fatal(
            f"probe of weights {tag}: expected mean |log-prob difference| of at most {probe.tolerance:.4g} nats, got "
            f"{report.mean_abs:.4g} (largest {report.max_abs:.4g}, {len(probe.tokens)} tokens, SGLang at {http.url}); "
            "check that every tensor was exported under its own name"
        )
    return report


def _flush(http: SglangHttp) -> None:
    """Drops every cached prefix. Requests that are just being aborted make the server refuse for a moment."""
    end = time.monotonic() + _FLUSH_SECONDS
    while True:
        try:
            http.post("/flush_cache", {}, _FLUSH_SECONDS)
            return
        except Refused as error:
            if time.monotonic() > end:
                raise Retryable(
                    f"SGLang at {http.url}: expected to flush its cache within {_FLUSH_SECONDS} s of the pause, got: "
                    f"{error}; do others send it requests?"
                ) from error
        time.sleep(0.05)


def _score(http: SglangHttp, tag: str, probe: Probe, seconds: float) -> np.ndarray:
    """Log-probs of probe.tokens[1:], float32; anything where another sequence begins."""
    ends = np.cumsum(probe.lengths)
    sequences = [probe.tokens[end - length : end] for end, length in zip(ends, probe.lengths, strict=True)]
    answers = [http.start("/generate", _scoring(tokens, tag), seconds) for tokens in sequences]
    concurrent.futures.wait(answers)
    logp = np.zeros(len(probe.tokens), np.float32)
    for end, tokens, answer in zip(ends, sequences, answers, strict=True):
        meta = json.loads(http.result(answer))["meta_info"]
        triples = meta["input_token_logprobs"]
        # The ids that come back are not compared: SGLang names the vocabulary's last one 0.
        if len(triples) != len(tokens) or meta["weight_version"] != tag:
            raise Fatal(
                f"probe of weights {tag}: expected log-probs of {len(tokens)} given tokens, got {len(triples)} of "
                f"weights {meta['weight_version']}"
            )
        logp[end - len(tokens) + 1 : end] = [triple[0] for triple in triples[1:]]  # the first token has none
    return logp[1:]


def _scoring(tokens: np.ndarray, tag: str) -> dict[str, object]:
    """Input log-probs are at temperature 1, and switch the prefix cache off for the request."""
    return {
        "input_ids": tokens.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": tag,
        "stream": False,
    }

"""A member of a request as SGLang's /generate wants it, and its answer as a completion. Pure.

What SGLang returns (0.5.23): log-probs at the request's temperature, before top-p and top-k; routed expert ids as
base64 of little-endian int32 without a shape, one row a fed token; and which of the output's tokens were sampled under
which weights, by the *tag* that the bridge gave to an update. A tag is unique to one update of one bridge, so a server
that restarted, or that somebody else updated, cannot be taken for ours.
"""

import base64
import binascii
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollout_bridge.checks import id_dtype
from rollout_bridge.errors import Fatal
from rollout_bridge.messages import Completion, Finish, LogprobDefinition, ModelInfo, SampleRequest, Sampling, Trace

_MASK_TOP_K = 4096  # SGLang's own limit (--sampling-mask-max-tokens)


def payload(request: SampleRequest, member: int, *, rid: str, tag: str) -> dict[str, Any]:
    """The body of /generate for one member.

    Args:
      request: checked against the model: an id outside the vocabulary would end the server.
      member: of the request; the server samples it apart from its companions.
      rid: SGLang's name for it, unique.
      tag: of the weights that serve; prefixes are shared only within one, whatever a flush has missed.
    """
    sampling = request.sampling
    return {
        "rid": rid,
        "input_ids": request.prompt_tokens.tolist(),
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens - request.already_sampled,
            "stop_token_ids": list(sampling.stop_ids),
        },
        "return_logprob": True,
        "logprob_start_len": -1,  # 0 would switch the prefix cache off
        "return_routed_experts": request.want_trace,
        "routed_experts_start_len": 0,
        "extra_key": tag,
        "stream": False,
    } | _truncation(sampling)


def _truncation(sampling: Sampling) -> dict[str, Any]:
    """Asks for the log-prob over what top-p and top-k keep, where SGLang can tell it: with a finite top-k."""
    if not 1 < sampling.top_k <= _MASK_TOP_K:
        return {}
    return {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """Output tokens [begin, end) were sampled under the weights of this tag."""

    tag: str
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What /generate returned, read but not yet judged.

    Attributes:
      tokens: int32[N].
      logp: float32[N], nats.
      spans: of the output, in order; none when there are no tokens.
      aborted: it was ended from outside.
      retractions: how often its cache was dropped and rebuilt.
      routes: base64, or None.
      truncated_logp: float32[N], nats, over what top-p and top-k kept; None where it was not asked for.
    """

    tokens: np.ndarray
    logp: np.ndarray
    spans: tuple[Span, ...]
    aborted: bool
    retractions: int
    routes: str | None
    truncated_logp: np.ndarray | None = None

    @property
    def tags(self) -> set[str]:
        """Of all weights that had a part in it."""
        return {span.tag for span in self.spans}


NOTHING = Answer(
    tokens=np.zeros(0, np.int32), logp=np.zeros(0, np.float32), spans=(), aborted=True, retractions=0, routes=None
)


def read_answer(content: bytes, where: str) -> Answer:
    """Reads an answer of /generate.

    Args:
      content: its JSON.
      where: names the completion in errors.

    Raises:
      Fatal: it is not what SGLang 0.5.23 answers.
    """
    try:
        parsed = json.loads(content)
        meta = parsed["meta_info"]
        finish = meta["finish_reason"]["type"]
        tokens = np.array(parsed["output_ids"], np.int32)
        triples = meta.get("output_token_logprobs") or []
        logp = np.array([triple[0] for triple in triples], np.float32)  # null, SGLang's NaN, becomes NaN
        named = [triple[1] for triple in triples]
        spans = _spans(meta, len(tokens))
        routes, retractions = meta.get("routed_experts"), int(meta.get("num_retractions") or 0)
        kept = meta.get("output_token_sampling_logprobs")
        truncated = None if kept is None else np.array(kept, np.float32)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise Fatal(
            f"{where}: expected an answer of SGLang's /generate, got {content[:200]!r}... ({type(error).__name__}: "
            f"{error}); is the server's version one that was tested?"
        ) from error
    if named != tokens.tolist():
        raise Fatal(
            f"{where}: expected a log-prob for each of the {len(tokens)} tokens, got {len(named)} for tokens "
            f"{named[:8]}...; the server must return log-probs"
        )
    return Answer(
        tokens=tokens,
        logp=logp,
        spans=spans,
        aborted=finish == "abort",
        retractions=retractions,
        routes=routes,
        truncated_logp=truncated,
    )


def completion(
    answer: Answer,
    request: SampleRequest,
    member: int,
    *,
    model: ModelInfo,
    versions: Mapping[str, int],
    engine_id: str,
) -> Completion:
    """The completion that an answer is.

    Args:
      answer: all of whose tags are known.
      request: what was asked.
      member: for which of its members.
      model: that serves.
      versions: of every tag that was verified.
      engine_id: the instance that answered.

    Raises:
      Fatal: routes are missing or misshapen.
    """
    if answer.aborted and answer.retractions:
        # Aborted between a retraction and the end of the rebuild, its routes would be nobody's, and which it was is not
        # told. Nothing is gained from it then, and it is sampled again.
        answer = NOTHING
    tokens = answer.tokens
    version = np.empty(len(tokens), np.int32)
    for span in answer.spans:
        version[span.begin : span.end] = versions[span.tag]
    trace = None
    if request.want_trace and len(tokens):
        rows = len(request.prompt_tokens) + len(tokens) - 1  # the last sampled token was never fed
        where = f"trace of {request.request_id}/{member}"
        experts_TLK = read_routes(answer.routes, (rows, model.moe_layers, model.top_k), model.num_experts, where)
        # A retraction rebuilds the whole cache, so every row is of the weights that sampled last.
        trace = Trace(experts_TLK=experts_TLK, first_row=0, version_T=np.full(rows, version[-1], np.int32))
    return Completion(
        request_id=request.request_id,
        member=member,
        tokens=tokens,
        behavior_logp=answer.logp,
        version=version,
        trace=trace,
        finish=_finish(request, tokens),
        engine_id=engine_id,
        logprob=LogprobDefinition(temperature=request.sampling.temperature or 1.0),
        truncated_logp=answer.truncated_logp,
    )


def read_routes(routes: str | None, shape: tuple[int, int, int], num_experts: int, where: str) -> np.ndarray:
    """Expert ids [T, L, K] in the smallest unsigned type that holds them.

    Raises:
      Fatal: there are none, they do not fill the shape, or an id is not of an expert.
    """
    if routes is None:
        raise Fatal(f"{where}: expected routed experts, got none; start SGLang with --enable-return-routed-experts")
    try:
        ids = np.frombuffer(base64.b64decode(routes, validate=True), "<i4")
    except (ValueError, binascii.Error) as error:
        raise Fatal(f"{where}: expected base64 of 32-bit expert ids, got {error}") from error
    if ids.size != np.prod(shape):
        raise Fatal(
            f"{where}: expected {shape[0]} rows (prompt + tokens - 1) x {shape[1]} layers x {shape[2]} experts = "
            f"{np.prod(shape)} ids, got {ids.size}"
        )
    if ids.min() < 0 or ids.max() >= num_experts:
        raise Fatal(f"{where}: expected expert ids in [0, {num_experts}), got {ids.min()} to {ids.max()}")
    return ids.astype(id_dtype(num_experts)).reshape(shape)


def _spans(meta: Mapping[str, Any], count: int) -> tuple[Span, ...]:
    """The spans of all tokens. The version at the end alone would mislabel what was sampled before an update."""
    if not count:
        return ()
    found = meta["weight_versions"]
    spans = tuple(Span(tag=str(span["version"]), begin=span["start"], end=span["end"]) for span in found)
    ends = [0, *(span.end for span in spans)]
    if [span.begin for span in spans] != ends[:-1] or ends[-1] != count:
        raise ValueError(f"version spans of {count} tokens are {found}")
    return spans


def _finish(request: SampleRequest, tokens: np.ndarray) -> Finish:
    """How it ended, by what the trainer asked for.

    SGLang also ends at the end-of-text ids of the model's own config. Where those are no stop ids of the request, the
    completion is a partial one, and whoever asked goes on from its last token.
    """
    if len(tokens) and int(tokens[-1]) in request.sampling.stop_ids:
        return Finish.STOP
    room = request.sampling.max_new_tokens - request.already_sampled
    return Finish.LENGTH if len(tokens) == room else Finish.ABORT

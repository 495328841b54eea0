"""A completion that came in parts: how the next part is asked for, and how the parts become one.

Under equal weights the result equals the undivided completion, because a member's token number t depends on the tokens
before it, the seed, the member and t alone.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rollout_bridge.messages import Completion, SampleRequest, Trace


def continuation(request: SampleRequest, member: int, parts: Sequence[Completion]) -> SampleRequest:
    """The request for what is missing of a member after its partial completions."""
    tokens = [part.tokens for part in parts]
    return dataclasses.replace(
        request,
        prompt_tokens=np.concatenate([request.prompt_tokens, *tokens]),
        members=(member,),
        already_sampled=request.already_sampled + sum(map(len, tokens)),
    )


def stitch(request: SampleRequest, parts: Sequence[Completion]) -> Completion:
    """Joins partial completions of a member, each the continuation of those before it.

    A row of the trace is taken from the first part that has its position: that is the routing under which the token
    after it was sampled. The end and the engine are the last part's.

    Args:
      request: the original one.
      parts: in order; at least one.

    Raises:
      ValueError: a part's trace begins after the rows that the parts before it left off.
    """
    last = parts[-1]
    if len(parts) == 1:
        return last
    traces = [part.trace for part in parts if part.trace is not None]
    return dataclasses.replace(
        last,
        tokens=np.concatenate([part.tokens for part in parts]),
        behavior_logp=np.concatenate([part.behavior_logp for part in parts]),
        version=np.concatenate([part.version for part in parts]),
        truncated_logp=_join([part.truncated_logp for part in parts]),
        trace=stitch_traces(traces, f"trace of {request.request_id}/{last.member}") if traces else None,
    )


def _join(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None


def stitch_traces(traces: Sequence[Trace], subject: str) -> Trace:
    """Joins the traces of calls of which each was fed everything before it; a row is of the first call that has it.

    Args:
      traces: in order; at least one.
      subject: names the trace in errors.

    Raises:
      ValueError: a trace begins after the rows that those before it left off.
    """
    experts, versions = [], []
    first = covered = traces[0].first_row
    for trace in traces:
        if trace.first_row > covered:
            raise ValueError(
                f"{subject}: expected a continuation with rows from {covered} on, got rows from {trace.first_row} on"
            )
        begin = covered - trace.first_row
        experts.append(trace.experts_TLK[begin:])
        versions.append(trace.version_T[begin:])
        covered += len(experts[-1])
    return Trace(experts_TLK=np.concatenate(experts), first_row=first, version_T=np.concatenate(versions))

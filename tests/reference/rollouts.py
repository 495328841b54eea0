"""Made-up groups and completions, valid unless told otherwise, for tests of the trainer's host side."""

import dataclasses

import numpy as np

from rollout_bridge.messages import Completion, Finish, LogprobDefinition, Trace
from train.groups import Group

LAYERS, EXPERTS, SLOTS = 2, 4, 2


def make_trace(prompt_length, count, *, first_row=0, version=0, seed: int | list[int] = 0):
    rng = np.random.default_rng(seed)
    rows = prompt_length + count - 1 - first_row
    ids = [[rng.permutation(EXPERTS)[:SLOTS] for _ in range(LAYERS)] for _ in range(rows)]
    return Trace(
        experts_TLK=np.array(ids, np.uint8).reshape(rows, LAYERS, SLOTS),
        first_row=first_row,
        version_T=np.full(rows, version, np.int32),
    )


def make_completion(ticket=0, member=0, *, prompt_length=3, count=2, version=0, stop=True, seed=0, **changes):
    rng = np.random.default_rng([seed, ticket, member])
    tokens = rng.integers(2, 12, count).astype(np.int32)
    if stop:
        tokens[-1] = 1
    completion = Completion(
        request_id=f"t{ticket}",
        member=member,
        tokens=tokens,
        behavior_logp=-rng.exponential(size=count).astype(np.float32),
        version=np.full(count, version, np.int32),
        trace=make_trace(prompt_length, count, version=version, seed=[seed, ticket, member]),
        finish=Finish.STOP if stop else Finish.LENGTH,
        engine_id="e",
        logprob=LogprobDefinition(temperature=1.0),
    )
    return dataclasses.replace(completion, **changes)


def make_group(ticket=0, *, counts=(2, 3), prompt_length=3, version=0, rewards=None, seed=0):
    prompt = np.random.default_rng([seed, ticket, 99]).integers(2, 12, prompt_length).astype(np.int32)
    completions = tuple(
        make_completion(ticket, member, prompt_length=prompt_length, count=count, version=version, seed=seed)
        for member, count in enumerate(counts)
    )
    reward = np.arange(len(counts), dtype=np.float32) if rewards is None else np.array(rewards, np.float32)
    return Group(ticket=ticket, prompt_tokens=prompt, answer="64", completions=completions, reward_M=reward)

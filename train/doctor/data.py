"""The data file, the tokenizer and the prompts' form: what is read, before anything is sampled."""

import unicodedata
from collections.abc import Sequence

import numpy as np

from train.chat import StopTokens
from train.data import Encoding, Prompt
from train.doctor.finding import Finding, fail, ok, warn
from train.tasks.example import Example
from train.tokenizer import Tokenizer

_NAMED = 3
_LOOKED_AT = 512  # examples of the slower checks


def check_examples(examples: Sequence[Example], encoding: Encoding) -> list[Finding]:
    """Every example fits: `data: lines`; how long they are: `data: lengths`."""
    bad, prompts = [], []
    for example in examples:
        try:
            prompts.append(encoding.encode(example))
        except ValueError as error:
            bad.append(str(error))
    if bad:
        return [
            fail(
                "data: lines",
                f"{len(bad)} of {len(examples)} cannot be used: {'; '.join(bad[:_NAMED])}",
                "repair them, or sat-jax prepare math --skip-bad",
            )
        ]
    length = np.array([len(prompt.tokens) for prompt in prompts])
    room = encoding.row_length - encoding.max_new_tokens
    said = (
        f"prompts of {length.min()} to {length.max()} tokens, median {int(np.median(length))}, in a room of {room}; "
        f"completions up to {encoding.max_new_tokens}"
    )
    return [ok("data: lines", f"{len(examples)} can be used"), ok("data: lengths", said)]


def check_copies(examples: Sequence[Example]) -> list[Finding]:
    """One question, one answer: `data: answers`; how many copies: `data: copies`."""
    answers: dict[str, dict[str, str]] = {}
    for example in examples:
        answers.setdefault(_key(example.prompt), {}).setdefault(example.answer, example.where)
    torn = [places for places in answers.values() if len(places) > 1]
    copies = len(examples) - len(answers)
    findings = []
    if torn:
        said = "; ".join(
            " and ".join(f"{answer!r} ({where})" for answer, where in places.items()) for places in torn[:_NAMED]
        )
        findings.append(
            fail(
                "data: answers",
                f"{len(torn)} questions come with two answers: {said}",
                "one is wrong and would be rewarded: sat-jax prepare math leaves both out",
            )
        )
    else:
        findings.append(ok("data: answers", f"{len(answers)} questions, one answer each"))
    if copies * 10 > len(examples):
        findings.append(
            warn(
                "data: copies",
                f"{copies} of {len(examples)} are copies",
                "they weigh more than others: sat-jax prepare math leaves one of each",
            )
        )
    else:
        findings.append(ok("data: copies", f"{copies} of {len(examples)}"))
    return findings


def check_overlap(train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> Finding:
    """`data: overlap`: nothing that is judged on is trained on, however spelt."""
    trained = {_key(prompt.text) for prompt in train}
    shared = [prompt.text for prompt in evaluation if _key(prompt.text) in trained]
    if shared:
        return fail(
            "data: overlap",
            f"{len(shared)} of {len(evaluation)} evaluation problems are trained on, such as {shared[0][:80]!r}",
            "leave them out: sat-jax prepare math --exclude FILE",
        )
    return ok("data: overlap", f"none of {len(evaluation)} evaluation problems is trained on")


def check_round_trip(tokenizer: Tokenizer, examples: Sequence[Example]) -> Finding:
    """`tokenizer: text`: what the policy writes comes back as it was, else a right answer may read as a wrong one."""
    looked = examples[:_LOOKED_AT]
    for example in looked:
        back = tokenizer.decode(tokenizer.encode(example.answer))
        if back != example.answer:
            return fail(
                "tokenizer: text",
                f"the answer {example.answer!r} ({example.where}) comes back as {back!r}",
                "this tokenizer cannot say it: use the checkpoint's own tokenizer.json, or a verifier that compares "
                "values",
            )
    return ok("tokenizer: text", f"{len(looked)} answers come back as they were")


def check_prompt_form(encoding: Encoding, prompts: Sequence[Prompt], has_template: bool) -> list[Finding]:
    """`prompt: form`: the checkpoint's chat template is used where there is one, and nothing begins twice."""
    tokens = prompts[0].tokens
    shown = repr(encoding.tokenizer.decode(tokens))
    shown = shown if len(shown) <= 160 else f"{shown[:100]} ... {shown[-50:]}"
    if (
        len(tokens) > 1
        and tokens[0] == tokens[1]
        and all(p.tokens[0] == p.tokens[1] for p in prompts if len(p.tokens) > 1)
    ):
        name = encoding.tokenizer.decode(tokens[:1])
        if name.startswith("<"):
            return [
                fail(
                    "prompt: form",
                    f"every prompt begins with {name!r} twice: {shown}",
                    "the chat template writes it already: take it out of prompt.template",
                )
            ]
    if has_template and encoding.chat is None:
        return [
            warn(
                "prompt: form",
                f"the checkpoint has a chat template that is not used: {shown}",
                "a base model wants it so; for an instruct model set prompt.chat=true",
            )
        ]
    return [ok("prompt: form", shown)]


def check_stops(stop_ids: Sequence[int], named: StopTokens, tokenizer: Tokenizer) -> Finding:
    """`prompt: stop`: a completion ends at every token that the checkpoint's files call an end."""
    missing = [token for token in named.ids if token not in stop_ids]
    differ = named.disagreements(tokenizer)
    words = ", ".join(f"{token} ({tokenizer.decode([token])!r})" for token in stop_ids)
    if missing:
        lacking = ", ".join(f"{token} ({tokenizer.decode([token])!r})" for token in missing)
        return fail(
            "prompt: stop",
            f"completions end at {words}, and not at {lacking}, which {', '.join(named.by_file)} name: they may "
            "never end",
            "set prompt.checkpoint_stop=true",
        )
    if differ:
        return warn(
            "prompt: stop",
            f"completions end at {words}; {'; '.join(differ)}",
            "all of them end a completion here; the fleet must ignore its own (it does behind the bridge)",
        )
    return ok("prompt: stop", f"completions end at {words}")


def _key(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split()).casefold()

"""`sat-jax prepare math`: data sets of problems -> one file of prompts and answers, and what became of every record."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from train.chat import ChatTemplate
from train.prepare.problems import Instruction, Problem, read_problem
from train.records import read_records, write_records
from train.tokenizer import FileTokenizer
from train.verify.pool import Unverified, VerifierConfig, VerifierPool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MathOptions:
    """What is read, kept and written.

    Attributes:
      sources: files, in order.
      out: `.arrayrecord`, or JSON lines.
      instruction: keep: the source's own; none: the bare question; boxed: asks for a box; answer: DAPO's "Answer:".
      tokenizer: folder of a checkpoint, or a tokenizer.json; needed by `chat` and `max_prompt_tokens`.
      chat: whether prompts are put into the checkpoint's chat template; then run with `prompt.template = "{prompt}"`.
      max_prompt_tokens: longer prompts are left out; 0 = none is.
      exclude: files whose questions are left out, such as those of an evaluation.
      check: verifier that must give a boxed gold answer 1; others are left out. Empty = not checked.
      skip_bad: whether a record that cannot be used is counted and left out; else it is an error.
      seed: of the order of the output; None = the order of the sources.
      limit: at most so many problems, the first of that order; 0 = all.
      supervised: whether records need a worked solution, which is written as "response".
    """

    sources: tuple[Path, ...]
    out: Path
    instruction: Instruction = "keep"
    tokenizer: Path | None = None
    chat: bool = False
    max_prompt_tokens: int = 0
    exclude: tuple[Path, ...] = ()
    check: str = ""
    skip_bad: bool = False
    seed: int | None = None
    limit: int = 0
    supervised: bool = False

    def __post_init__(self) -> None:
        if (self.chat or self.max_prompt_tokens) and self.tokenizer is None:
            raise ValueError("prepare: expected --tokenizer with --chat or --max-prompt-tokens, got none")
        if self.out in self.sources:
            raise ValueError(f"prepare: expected --out to be no source, got {self.out} for both")


@dataclasses.dataclass(kw_only=True, slots=True)
class Counts:
    """What became of the records; `read` is the sum of all others.

    Attributes:
      read: records of the sources.
      bad: cannot be used; the first few are in `examples`.
      duplicate: copies of a question that came before with the same answer.
      conflicting: all copies of questions that come with two answers.
      excluded: questions of the files to exclude.
      no_response: without a worked solution, with `supervised`.
      too_long: more tokens than allowed.
      unverified: whose own answer the checked verifier does not accept.
      over_limit: beyond the limit.
      written: what is left.
      examples: the first few that were left out, by kind: what and where.
    """

    read: int = 0
    bad: int = 0
    duplicate: int = 0
    conflicting: int = 0
    excluded: int = 0
    no_response: int = 0
    too_long: int = 0
    unverified: int = 0
    over_limit: int = 0
    written: int = 0
    examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def leave_out(self, kind: str, said: str, count: int = 1) -> None:
        """Counts what is left out, and keeps the first three of each kind."""
        setattr(self, kind, getattr(self, kind) + count)
        shown = self.examples.setdefault(kind, [])
        if len(shown) < 3:
            shown.append(said)

    def figures(self) -> dict[str, int]:
        """The counts by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "examples"}


def prepare_math(options: MathOptions) -> Counts:
    """Reads, filters and writes; the same options and files give the same bytes.

    Raises:
      ValueError: a file cannot be read, a record cannot be used and is not to be skipped, or nothing is left.
    """
    counts = Counts()
    excluded = _keys(options.exclude)
    problems = list(_distinct(_read(options, counts), excluded, counts))
    if options.supervised:
        problems = list(_with_response(problems, counts))
    render, length = _rendering(options)
    if options.max_prompt_tokens:
        problems = list(_short(problems, render, length, options.max_prompt_tokens, counts))
    if options.check:
        problems = list(_verified(problems, options.check, counts))
    if options.seed is not None:
        random.Random(options.seed).shuffle(problems)
    if options.limit and len(problems) > options.limit:
        counts.leave_out("over_limit", f"after the first {options.limit}", len(problems) - options.limit)
        problems = problems[: options.limit]
    if not problems:
        raise ValueError(f"prepare: expected at least one problem to be left, got none: {counts.figures()}")
    counts.written = write_records(options.out, (_record(problem, render, options) for problem in problems))
    return counts


def _read(options: MathOptions, counts: Counts) -> Iterator[Problem]:
    for path in options.sources:
        for record, where in read_records(path):
            counts.read += 1
            try:
                problem = read_problem(record, where)
            except ValueError as error:
                if not options.skip_bad:
                    raise ValueError(f"{error}; repair it, or leave such records out with --skip-bad") from error
                counts.leave_out("bad", str(error))
            else:
                yield problem


def _distinct(problems: Iterable[Problem], excluded: set[str], counts: Counts) -> Iterator[Problem]:
    """One of each question; none of those that come with two answers: nobody knows which is right."""
    first: dict[str, Problem] = {}
    copies: dict[str, int] = {}
    conflicts: dict[str, Problem] = {}
    for problem in problems:
        key = problem.key
        if key in excluded:
            counts.leave_out("excluded", problem.where)
            continue
        copies[key] = copies.get(key, 0) + 1
        known = first.setdefault(key, problem)
        if known.answer != problem.answer:
            conflicts.setdefault(key, problem)
    for key, problem in first.items():
        if key in conflicts:
            other = conflicts[key]
            said = f"{problem.where} says {problem.answer!r}, {other.where} says {other.answer!r}"
            counts.leave_out("conflicting", said, copies[key])
            continue
        if copies[key] > 1:
            counts.leave_out("duplicate", f"{problem.where} comes {copies[key]} times", copies[key] - 1)
        yield problem


def _with_response(problems: Iterable[Problem], counts: Counts) -> Iterator[Problem]:
    for problem in problems:
        if problem.response:
            yield problem
        else:
            counts.leave_out("no_response", problem.where)


def _short(
    problems: Iterable[Problem],
    render: Callable[[Problem], str],
    length: Callable[[str], int],
    most: int,
    counts: Counts,
) -> Iterator[Problem]:
    for problem in problems:
        tokens = length(render(problem))
        if tokens <= most:
            yield problem
        else:
            counts.leave_out("too_long", f"{problem.where}: {tokens} tokens")


def _verified(problems: Iterable[Problem], verifier: str, counts: Counts) -> Iterator[Problem]:
    """Those whose own answer the verifier accepts, given as a model would give it."""
    pool = VerifierPool(verifier, VerifierConfig(on_timeout="mask", on_error="mask"))
    try:
        pool.check()
        for problem in problems:
            completion = f"The final answer is \\boxed{{{problem.answer}}}.\nAnswer: {problem.answer}"
            fields = {"prompt": problem.question, "completion": completion, "answer": problem.answer, "metadata": {}}
            reward = pool.ask(fields, problem.where)
            if not isinstance(reward, Unverified) and reward > 0.5:
                yield problem
            else:
                counts.leave_out("unverified", f"{problem.where}: {problem.answer!r}")
    finally:
        pool.close()


def _rendering(options: MathOptions) -> tuple[Callable[[Problem], str], Callable[[str], int]]:
    """How a problem becomes a prompt, and how many tokens that has."""
    chat, tokenizer = None, None
    if options.tokenizer is not None:
        folder = options.tokenizer if options.tokenizer.is_dir() else options.tokenizer.parent
        file = folder / "tokenizer.json" if options.tokenizer.is_dir() else options.tokenizer
        tokenizer = FileTokenizer(file)
        chat = ChatTemplate.from_folder(folder) if options.chat else None

    def render(problem: Problem) -> str:
        text = problem.prompt(options.instruction)
        return text if chat is None else chat.render([{"role": "user", "content": text}])

    def length(text: str) -> int:
        assert tokenizer is not None, "the options ask for one"
        return len(tokenizer.encode(text))

    return render, length


def _record(problem: Problem, render: Callable[[Problem], str], options: MathOptions) -> Mapping[str, Any]:
    metadata = {"source": problem.source} if problem.source else {}
    record = {"prompt": render(problem), "answer": problem.answer, "metadata": metadata}
    return record | {"response": problem.response} if options.supervised else record


def _keys(paths: Iterable[Path]) -> set[str]:
    return {read_problem(record, where).key for path in paths for record, where in read_records(path)}

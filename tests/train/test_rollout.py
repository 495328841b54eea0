import asyncio
import dataclasses
import threading

import numpy as np
import pytest

from rollout_bridge.messages import Completion, Finish, LogprobDefinition, SampleRequest, Sampling
from tests.reference.rollouts import make_trace
from train.assemble import assemble
from train.data import Prompt
from train.groups import Group
from train.rollout import CodeRollouts, Conversation, load_rollout
from train.tasks.calculator import ALPHABET, calculate, examples, rollout
from train.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer(ALPHABET)
EOS = 1
PROMPT = Prompt(
    text="1+2=", answer="3", tokens=TOKENIZER.encode("1+2="), answer_tokens=np.array([EOS], np.int32), metadata={"k": 1}
)
REQUEST = SampleRequest(
    request_id="t0",
    prompt_tokens=PROMPT.tokens,
    sampling=Sampling(temperature=1.0, max_new_tokens=12, stop_ids=(EOS,), seed=9),
    members=(0,),
)


class Scripted:
    """Says the next of its texts ("$" is <eos>) at every call; its routes and log-probs tell which call they are of."""

    def __init__(self, *texts, versions=(0, 1, 2), first_rows=(0, 0, 0)):
        self.texts, self.versions, self.first_rows = texts, versions, first_rows
        self.requests = []
        self._lock = threading.Lock()

    def sample(self, requests):
        (request,) = requests
        with self._lock:
            turn = len(self.requests)
            self.requests.append(request)
        text = self.texts[turn]
        tokens = TOKENIZER.encode(text.removesuffix("$"))
        tokens = np.append(tokens, np.int32(EOS)).astype(np.int32) if text.endswith("$") else tokens
        count = len(tokens)
        trace = make_trace(
            len(request.prompt_tokens), count, first_row=self.first_rows[turn], version=self.versions[turn], seed=turn
        )
        stopped = int(tokens[-1]) in request.sampling.stop_ids
        yield Completion(
            request_id=request.request_id,
            member=request.members[0],
            tokens=tokens,
            behavior_logp=np.full(count, -(turn + 1), np.float32),
            version=np.full(count, self.versions[turn], np.int32),
            trace=trace,
            finish=Finish.STOP if stopped else Finish.LENGTH,
            engine_id="e",
            logprob=LogprobDefinition(temperature=1.0),
        )


def made(fleet, function=rollout, request=REQUEST):
    (trajectory,) = CodeRollouts(function, fleet, TOKENIZER, lambda _: PROMPT, 2).sample([request])
    return trajectory


def test_two_turns_become_one_trajectory_masked_token_by_token():
    fleet = Scripted("1+2?", "3$")
    trajectory = made(fleet)
    assert TOKENIZER.decode(trajectory.tokens) == "1+2?3;3<eos>"
    #                                                1      +     2     ?     3      ;      3     <eos>
    assert trajectory.sampled.tolist() == [True, True, True, True, False, False, True, True]
    assert trajectory.behavior_logp.tolist() == [-1, -1, -1, -1, 0, 0, -2, -2]
    assert trajectory.version.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (trajectory.finish, trajectory.turns, trajectory.last_turn) == (Finish.STOP, 2, 6)
    assert (trajectory.request_id, trajectory.member) == ("t0", 0)


def test_what_was_sampled_goes_into_the_next_call_as_it_was():
    fleet = Scripted("1+2?", "3$")
    made(fleet)
    first, second = fleet.requests
    assert second.prompt_tokens.tolist() == [*first.prompt_tokens, *TOKENIZER.encode("1+2?3;")]
    assert (first.request_id, second.request_id) == ("t0/0/0", "t0/0/1")
    assert (first.sampling.max_new_tokens, second.sampling.max_new_tokens) == (12, 12 - 4 - 2)
    assert first.sampling.stop_ids == (EOS, TOKENIZER.token_id("?"))
    assert second.sampling.stop_ids == (EOS,)
    assert first.sampling.seed == 9
    assert second.sampling.seed != 9


@pytest.mark.parametrize("first_row", [0, 5, 7])
def test_routes_are_stitched_by_position(first_row):
    fleet = Scripted("1+2?", "3$", first_rows=(0, first_row))
    trajectory = made(fleet)
    assert trajectory.trace is not None
    # Fed: prompt 4, tokens 8, less the last one. The first call routed 4 + 4 - 1 of these, the second the rest.
    assert trajectory.trace.experts_TLK.shape[0] == 4 + 8 - 1
    first = make_trace(4, 4, version=0, seed=0).experts_TLK
    second = make_trace(10, 2, first_row=first_row, version=1, seed=1).experts_TLK
    np.testing.assert_array_equal(trajectory.trace.experts_TLK[:7], first)
    np.testing.assert_array_equal(trajectory.trace.experts_TLK[7:], second[7 - first_row :])
    assert trajectory.trace.version_T.tolist() == [0] * 7 + [1] * 4


def test_routes_with_a_gap_are_refused():
    with pytest.raises(ValueError, match="trace of t0/0: expected a continuation with rows from 7 on") as caught:
        made(Scripted("1+2?", "3$", first_rows=(0, 8)))
    assert caught.value.__notes__ == ["rollout of t0/0: the function failed"]


def test_a_trajectory_is_assembled_with_its_mask():
    from tests.train.test_assemble import config

    trajectory = made(Scripted("1+2?", "3$", versions=(0, 0)))
    other = dataclasses.replace(trajectory, member=1)
    group = Group(
        ticket=0,
        prompt_tokens=PROMPT.tokens,
        answer="3",
        completions=(trajectory, other),
        reward_M=np.array([1, 0], np.float32),
        trained=(trajectory.sampled, other.sampled),
    )
    settings = config()
    settings = dataclasses.replace(
        settings, vocab_size=TOKENIZER.vocab_size, batch=dataclasses.replace(settings.batch, row_length=16)
    )
    micro = assemble([group], 0, settings).microbatches[0]
    assert micro.loss_mask_BT[0, :11].tolist() == [False] * 3 + [True] * 4 + [False] * 2 + [True] * 2
    assert micro.target_BT[0, :11][micro.loss_mask_BT[0, :11]].tolist() == [*TOKENIZER.encode("1+2?3").tolist(), EOS]
    assert micro.trace.present_BT[0, :11].all()


def test_a_first_turn_that_ends_the_answer_is_a_trajectory_of_one_call():
    trajectory = made(Scripted("3$", "1$"))
    assert (TOKENIZER.decode(trajectory.tokens), trajectory.turns, trajectory.finish) == ("3<eos>", 1, Finish.STOP)
    assert TOKENIZER.decode(made(Scripted("3?", "1$")).tokens) == "3?!;1<eos>"  # it asked nothing: the tool says so
    single = made(Scripted("12345678+9?1"), lambda conversation: conversation.sample())
    assert (single.turns, single.finish, single.sampled.all()) == (1, Finish.LENGTH, True)


def test_a_stretch_that_ended_by_a_stop_of_its_own_did_not_end_the_answer():
    trajectory = made(Scripted("1?"), lambda conversation: conversation.sample(stop=("?",)))
    assert trajectory.finish is Finish.LENGTH


def test_what_is_inserted_last_is_left_out():
    def late(conversation):
        conversation.sample()
        conversation.insert("12")

    assert TOKENIZER.decode(made(Scripted("3$"), late).tokens) == "3<eos>"


def test_what_does_not_fit_is_not_inserted():
    seen = {}

    def greedy(conversation):
        seen["text"] = conversation.sample(stop=("?",), max_tokens=2)
        seen["fits"] = (conversation.insert("1" * 10), conversation.room, conversation.insert("1" * 9))
        seen["left"] = conversation.room
        conversation.sample()

    fleet = Scripted("1?", "2")
    trajectory = made(fleet, greedy)
    assert seen == {"text": "1", "fits": (False, 10, True), "left": 1}
    assert fleet.requests[0].sampling.max_new_tokens == 2
    assert len(trajectory.tokens) == 12
    with pytest.raises(ValueError, match="rollout t0/0: expected room to sample, got none of 12 tokens left"):
        made(Scripted("1", "1"), lambda c: (c.sample(), c.insert("1" * 10), c.sample(), c.sample()))


def test_a_function_may_be_a_coroutine():
    async def talks(conversation):
        await asyncio.sleep(0)
        conversation.sample()

    assert made(Scripted("3$"), talks).turns == 1


def test_every_member_of_every_request_gets_a_trajectory():
    fleet = Scripted(*["3$"] * 6, versions=[0] * 6, first_rows=[0] * 6)
    requests = [dataclasses.replace(REQUEST, request_id=f"t{i}", members=(0, 1, 2)) for i in range(2)]
    code = CodeRollouts(lambda c: c.sample(), fleet, TOKENIZER, lambda _: PROMPT, 2)
    found = {(t.request_id, t.member) for t in code.sample(requests)}
    assert found == {(f"t{i}", member) for i in range(2) for member in range(3)}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda c: None, "expected at least one call of sample, got none"),
        (lambda c: c.insert("x"), "expected characters of its alphabet"),
        (lambda c: c.sample(stop=("nope",)), "expected a token of the vocabulary, got 'nope'"),
    ],
)
def test_a_function_that_fails_names_the_trajectory(function, said):
    with pytest.raises(ValueError, match=said) as caught:
        made(Scripted("3$"), function)
    assert caught.value.__notes__ == ["rollout of t0/0: the function failed"]


def test_a_conversation_shows_the_problem_and_not_its_answer():
    conversation = Conversation(Scripted(), TOKENIZER, PROMPT, REQUEST)
    assert (conversation.prompt, conversation.metadata, conversation.room) == ("1+2=", {"k": 1}, 12)
    assert conversation.stopped_by == ""
    assert not hasattr(conversation, "answer")


def test_a_function_is_found_by_name():
    assert load_rollout("train.tasks.calculator:rollout") is rollout
    for name in (
        "no_such_module:f",
        "train.tasks.calculator:nothing",
        "train.tasks.calculator:ALPHABET",
        "nonsense",
        ":",
    ):
        with pytest.raises(ValueError, match=r"rollout\.function: expected"):
            load_rollout(name)


def test_the_calculator_answers_what_it_is_asked():
    assert [calculate(text) for text in ("12+34", "7+85", "12+", "", "1+2+3", "+1")] == [
        "46;",
        "92;",
        "!;",
        "!;",
        "!;",
        "!;",
    ]
    example = next(e for e in examples() if e.prompt == "12+34=")
    assert (example.answer, example.response) == ("46", "12+34?46;46")
    assert set("".join(e.prompt + e.answer + e.response for e in examples())) <= set(ALPHABET)


def test_a_function_that_hangs_neither_stops_the_others_nor_the_closing():
    gate = threading.Event()

    def hangs(conversation):
        conversation.sample()
        if conversation._request.members[0] == 0:
            gate.wait(30)

    fleet = Scripted(*["3$"] * 2, versions=[0] * 2, first_rows=[0] * 2)
    code = CodeRollouts(hangs, fleet, TOKENIZER, lambda _: PROMPT, 2)
    arriving = code.sample([dataclasses.replace(REQUEST, members=(0, 1))])
    assert next(arriving).member == 1
    arriving.close()
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("fleet-sample"))
    gate.set()


def test_a_function_is_told_what_ended_a_stretch():
    seen = []

    def looks(conversation):
        for stop in (("?",), (), ()):
            conversation.sample(stop=stop, max_tokens=2)
            seen.append(conversation.stopped_by)

    made(Scripted("1?", "3$", "12"), looks)
    assert seen == ["?", "<eos>", ""]

import dataclasses
import threading
import time

import numpy as np
import pytest

from rollout_bridge.messages import Finish
from sat_jax.advantages import OverlongConfig
from tests.reference.rollouts import make_completion
from train.buffer import Buffer
from train.collect import Collector, CollectSettings, to_attempt
from train.data import Encoding, PromptConfig, PromptData
from train.rewards import exact_match
from train.seeds import derive_seed
from train.tasks import Example
from train.tokenizer import CharTokenizer
from train.verify.pool import Unverified

TOKENIZER = CharTokenizer("0123456789=")
EXAMPLES = [Example(prompt=f"{i}=", answer=str(i)[::-1], where=f"f:{i}") for i in range(100, 200)]
DATA = PromptData(
    EXAMPLES,
    [],
    Encoding(
        tokenizer=TOKENIZER,
        prompt=PromptConfig(template="{prompt}", stop=("<eos>",)),
        max_new_tokens=4,
        row_length=12,
    ),
    seed=0,
)
SETTINGS = CollectSettings(
    seed=7, group_size=2, temperature=0.7, max_new_tokens=4, stop_ids=(1,), want_trace=True, shown=3
)


class FakeFleet:
    """Answers every request, member 0 rightly and the others with "9"; `change` may spoil a completion."""

    def __init__(self, change=lambda c: c, shuffle=False, version=0):
        self.requests = []
        self.calls = 0
        self.threads = set()
        self._change = change
        self._shuffle = shuffle
        self._version = version

    def sample(self, requests):
        self.calls += 1
        self.requests += requests
        self.threads.add(threading.get_ident())
        wanted = [(request, member) for request in requests for member in request.members]
        if self._shuffle:
            wanted = [wanted[i] for i in np.random.default_rng(0).permutation(len(wanted))]
        for request, member in wanted:
            text = TOKENIZER.decode(request.prompt_tokens).removesuffix("=")[::-1] if member == 0 else "9"
            tokens = np.append(TOKENIZER.encode(text), np.int32(1)).astype(np.int32)
            made = make_completion(0, member, prompt_length=len(request.prompt_tokens), count=len(tokens))
            made = dataclasses.replace(
                made,
                request_id=request.request_id,
                tokens=tokens,
                version=np.full(len(tokens), self._version, np.int32),
            )
            changed = self._change(made)
            if changed is not None:
                yield changed


@pytest.fixture
def collect():
    """Makes collectors over a fleet; closes them afterwards."""
    made = []

    def start(fleet, verifier=exact_match, **changes):
        buffer = Buffer(max_lag=10, deadline=5.0)
        settings = dataclasses.replace(SETTINGS, **changes)
        collector = Collector(fleet, DATA, TOKENIZER, verifier, buffer, settings)
        made.append(collector)
        return collector, buffer

    yield start
    for collector in made:
        collector.close()


def test_requested_prompts_become_scored_groups(collect):
    fleet = FakeFleet()
    collector, buffer = collect(fleet)
    collector.request(range(4))
    groups = buffer.take(4, 0)
    assert [group.ticket for group in groups] == [0, 1, 2, 3]
    for group in groups:
        prompt = DATA[group.ticket]
        assert group.answer == prompt.answer
        assert group.prompt_tokens.tolist() == prompt.tokens.tolist()
        assert [completion.member for completion in group.completions] == [0, 1]
        assert group.reward_M.tolist() == [1.0, 0.0]
        assert group.reward_M.dtype == np.float32
    assert fleet.calls == 1
    assert fleet.threads != {threading.get_ident()}


def test_requests_say_what_is_wanted_and_each_has_its_own_seed(collect):
    fleet = FakeFleet()
    collector, buffer = collect(fleet)
    collector.request(range(3))
    buffer.take(3, 0)
    for ticket, request in enumerate(fleet.requests):
        assert (request.request_id, request.members) == (f"t{ticket}", (0, 1))
        assert (request.want_trace, request.already_sampled) == (True, 0)
        sampling = request.sampling
        assert (sampling.temperature, sampling.max_new_tokens, sampling.stop_ids) == (0.7, 4, (1,))
        assert (sampling.top_p, sampling.top_k) == (1.0, -1)
        assert sampling.seed == derive_seed(7, "sample", ticket)


def test_the_order_of_arrival_changes_nothing(collect):
    taken = []
    for shuffle in (False, True):
        collector, buffer = collect(FakeFleet(shuffle=shuffle))
        collector.request(range(20))
        taken.append(buffer.take(20, 0))
    for left, right in zip(*taken, strict=True):
        assert left.ticket == right.ticket
        assert left.reward_M.tolist() == right.reward_M.tolist()
        assert [c.tokens.tolist() for c in left.completions] == [c.tokens.tolist() for c in right.completions]


def test_windows_are_sampled_one_after_the_other(collect):
    fleet = FakeFleet()
    collector, buffer = collect(fleet)
    collector.request(range(4))
    collector.request(range(4, 6))
    collector.request(range(6, 6))
    assert [group.ticket for group in buffer.take(6, 0)] == list(range(6))
    assert fleet.calls == 2


def test_prompts_are_requested_in_order(collect):
    collector, _ = collect(FakeFleet())
    with pytest.raises(ValueError, match="draw: expected ticket 0, got 3"):
        collector.request(range(3, 5))


def test_lost_prompts_of_a_restored_buffer_are_requested_again(collect):
    collector, buffer = collect(FakeFleet(change=lambda c: None if c.request_id == "t1" else c))
    collector.request(range(3))
    with pytest.raises(ValueError, match="unfinished when the fleet ended"):
        buffer.wait(range(3))
    snapshot = buffer.snapshot()
    assert snapshot.ledger.out == (1,)
    again, restored = collect(FakeFleet())
    restored.restore(snapshot)
    again.request_again(snapshot.ledger.out)
    again.request(range(3, 5))
    assert [group.ticket for group in restored.take(5, 0)] == list(range(5))


spoiled = [
    ({"finish": Finish.ABORT}, "expected a whole completion, got 4 tokens that ended by abort"),
    ({"tokens": np.zeros(0, np.int32)}, "expected a whole completion, got 0 tokens"),
    (
        {"finish": Finish.LENGTH},
        r"exactly when its last token is one of \(1,\), got length after token 1; check prompt",
    ),
    ({"tokens": np.array([2, 3, 4, 5], np.int32)}, "got stop after token 5"),
    ({"member": 2}, r"completion t1/2 of engine e: expected a wanted member, each once"),
    ({"member": 0}, r"completion t1/0 .* expected a wanted member, each once"),
    ({"request_id": "t99"}, r"completion t99/1 .* expected a wanted member"),
    ({"version": np.array([0, 0, 1, 1], np.int32)}, r"expected every token of version 0, got \[0, 1\]"),
]


@pytest.mark.parametrize(("changes", "message"), spoiled)
def test_a_wrong_completion_stops_the_run_and_is_named(collect, changes, message):
    def spoil(completion):
        if (completion.request_id, completion.member) != ("t1", 1):
            return completion
        return dataclasses.replace(completion, **({"tokens": np.array([2, 3, 4, 1], np.int32)} | changes))

    collector, buffer = collect(FakeFleet(change=spoil))
    collector.request(range(3), version=0)
    with pytest.raises(ValueError, match=message):
        buffer.take(3, 0)


def test_a_schedule_that_was_not_kept_is_an_error(collect):
    collector, buffer = collect(FakeFleet(version=8))
    collector.request(range(1), version=4)
    with pytest.raises(ValueError, match=r"completion t0/0 .*expected every token of version 4, got \[8\]"):
        buffer.take(1, 8)


def test_a_missing_completion_is_an_error_when_the_fleet_ends(collect):
    collector, buffer = collect(FakeFleet(change=lambda c: None if (c.request_id, c.member) == ("t1", 1) else c))
    collector.request(range(3))
    with pytest.raises(ValueError, match="expected all 2 members of each, got 1 of t1 and 1 prompts unfinished"):
        buffer.take(3, 0)


def test_what_the_fleet_or_the_verifier_raises_is_raised_where_it_is_waited_for(collect):
    def broken(_):
        raise KeyError("unit")

    collector, buffer = collect(FakeFleet(), verifier=broken)
    collector.request(range(1))
    with pytest.raises(KeyError) as caught:
        buffer.take(1, 0)
    assert "t0/0" in caught.value.__notes__[0]

    class Gone:
        def sample(self, requests):
            raise ConnectionError("no engine")

    collector, buffer = collect(Gone())
    collector.request(range(1))
    with pytest.raises(ConnectionError, match="no engine"):
        buffer.take(1, 0)


def test_completions_count_as_progress_before_a_group_is_whole(collect):
    def slowly(completion):
        time.sleep(0.4)
        return completion

    fleet = FakeFleet(change=slowly)
    buffer = Buffer(max_lag=10, deadline=1.5)
    with Collector(fleet, DATA, TOKENIZER, exact_match, buffer, dataclasses.replace(SETTINGS, group_size=4)) as made:
        made.request(range(1))
        assert len(buffer.take(1, 0)) == 1


def test_the_newest_completions_are_kept_for_display(collect):
    collector, buffer = collect(FakeFleet())
    assert collector.samples() == ()
    collector.request(range(4))
    buffer.take(4, 0)
    lines = collector.samples()
    assert len(lines) == 3
    assert lines[-1].prompt == DATA[3].text
    assert (lines[-1].completion, lines[-1].answer, lines[-1].reward) == ("9", DATA[3].answer, 0.0)
    assert lines[-2].reward == 1.0


def test_an_attempt_is_the_text_up_to_the_stop_token():
    prompt = DATA.train[0]
    stopped = make_completion(count=3)
    stopped = dataclasses.replace(stopped, tokens=np.array([2, 3, 1], np.int32))
    cut = dataclasses.replace(stopped, tokens=np.array([2, 3, 4], np.int32), finish=Finish.LENGTH)
    assert (
        to_attempt(5, prompt, stopped, TOKENIZER).completion,
        to_attempt(5, prompt, stopped, TOKENIZER).stopped,
    ) == (
        "01",
        True,
    )
    assert (to_attempt(5, prompt, cut, TOKENIZER).completion, to_attempt(5, prompt, cut, TOKENIZER).stopped) == (
        "012",
        False,
    )


def test_closing_ends_the_thread_between_completions():
    sent = []

    def slowly(completion):
        time.sleep(0.02)
        sent.append(completion)
        return completion

    buffer = Buffer(max_lag=1, deadline=5.0)
    collector = Collector(FakeFleet(change=slowly), DATA, TOKENIZER, exact_match, buffer, SETTINGS)
    collector.request(range(100))
    buffer.take(1, 0)
    collector.close(5.0)
    assert len(sent) < 100


def test_a_fleet_that_blocks_is_named_when_closing():
    started, release = threading.Event(), threading.Event()

    class Stuck:
        def sample(self, requests):
            started.set()
            release.wait(10)
            yield from ()

    collector = Collector(Stuck(), DATA, TOKENIZER, exact_match, Buffer(max_lag=1, deadline=5.0), SETTINGS)
    collector.request(range(1))
    started.wait(30)
    with pytest.raises(TimeoutError, match=r"expected its thread to end within 0\.1 s"):
        collector.close(0.1)
    release.set()
    collector.close(5.0)


def test_nothing_fails_the_run_once_it_is_closing():
    started, release = threading.Event(), threading.Event()

    class Closed:
        def sample(self, requests):
            started.set()
            release.wait(5)
            raise ConnectionError("closed")
            yield

    buffer = Buffer(max_lag=1, deadline=0.1)
    collector = Collector(Closed(), DATA, TOKENIZER, exact_match, buffer, SETTINGS)
    collector.request(range(1))
    started.wait(30)
    threading.Timer(0.1, release.set).start()
    collector.close(5.0)
    with pytest.raises(TimeoutError):  # and not ConnectionError
        buffer.take(1, 0)


def test_a_completion_without_a_verdict_is_masked_and_no_member_of_its_group(collect):
    verdicts = {0: 1.0, 1: Unverified.TIMEOUT}
    collector, buffer = collect(FakeFleet(), verifier=lambda given: verdicts[given.member])
    collector.request(range(2))
    for group in buffer.take(2, 0):
        assert group.reward_M.tolist() == [1.0, 0.0]
        assert group.verified_M.tolist() == [True, False]
        assert group.trained[0].all()
        assert not group.trained[1].any()
    assert [line.reward for line in collector.samples()] == [1.0, 1.0]


def test_a_slow_verifier_holds_up_neither_arrivals_nor_other_verdicts(collect):
    begun, gate = threading.Semaphore(0), threading.Event()

    def slow(given):
        begun.release()
        assert gate.wait(30)
        return 1.0

    fleet = FakeFleet()
    collector, buffer = collect(fleet, verifier=slow, scorers=4)
    collector.request(range(4))
    for _ in range(4):
        assert begun.acquire(timeout=30)  # four at once, of two groups
    assert buffer.stats().out == 4
    gate.set()
    assert [group.ticket for group in buffer.take(4, 0)] == [0, 1, 2, 3]


def test_long_completions_are_punished_where_the_config_says_so(collect):
    collector, buffer = collect(FakeFleet(), overlong=OverlongConfig(max_length=4, cache=2))
    collector.request(range(1))
    # Member 0 answers rightly with three digits and the stop token: 4 of 4; member 1 with two tokens: no punishment.
    assert buffer.take(1, 0)[0].reward_M.tolist() == [0.0, 0.0]

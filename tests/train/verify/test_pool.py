import subprocess
import sys
import threading
import time

import pytest

from train.verify.pool import Unverified, VerifierConfig, VerifierPool

FAULTY = "tests.reference.faulty_rewards"
FIELDS = {"prompt": "p", "completion": "c", "answer": "c", "metadata": {}}


@pytest.fixture
def pool():
    """Makes pools of one process; closes them afterwards."""
    made = []

    def make(name, **changes):
        config = VerifierConfig(**{"workers": 1, "seconds": 20.0, **changes})
        made.append(VerifierPool(name if ":" not in name[:1] else FAULTY + name, config))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_function_is_given_what_it_asks_for_and_its_process_is_kept(pool):
    asked = pool(":good")
    assert asked.ask(FIELDS, "t0/0") == 1.0
    assert asked.ask({**FIELDS, "completion": "d", "metadata": {"bonus": 0.25}}, "t0/1") == 0.25
    counts = asked.counts()
    assert (counts.attempts, counts.timeouts, counts.errors, counts.starts) == (2, 0, 0, 1)


def test_a_coroutine_is_awaited(pool):
    assert pool(":slow_but_good").ask(FIELDS, "t0/0") == 1.0


def test_a_function_that_hangs_is_killed_counted_and_hinders_nobody(pool):
    asked = pool(":hangs", seconds=1.0)
    assert asked.ask(FIELDS, "t0/0") == 1.0
    began = time.monotonic()
    assert asked.ask({**FIELDS, "completion": "hang"}, "t0/1") is Unverified.TIMEOUT
    assert time.monotonic() - began < 10
    assert asked.ask(FIELDS, "t0/2") == 1.0
    counts = asked.counts()
    assert (counts.attempts, counts.timeouts, counts.errors, counts.starts) == (3, 1, 0, 2)


@pytest.mark.parametrize(("does", "reward"), [("zero", 0.0), ("mask", Unverified.TIMEOUT)])
def test_a_time_out_is_what_the_config_makes_of_it(pool, does, reward):
    assert pool(":hangs_in_c", seconds=0.5, on_timeout=does).ask(FIELDS, "t0/1") == reward


def test_a_time_out_may_stop_the_run(pool):
    with pytest.raises(ValueError, match=r"reward of t4/1: .*got none in 0\.5 s; .*verifier\.on_timeout"):
        pool(":hangs_in_c", seconds=0.5, on_timeout="stop").ask(FIELDS, "t4/1")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (":raises", r"KeyError: 'no such unit'"),
        (":exits", r"SystemExit: 3"),
        (":dies", r"the end of its process by exit code 7"),
        (":eats_memory", r"MemoryError"),
        (":returns_none", r"expected a finite number, got None \(NoneType\)"),
        (":returns_nan", r"expected a finite number, got nan"),
        (":returns_a_tensor", r"expected a finite number, got tensor\(1\.\) \(Tensor\)"),
        (":returns_text", r"expected a finite number, got '1' \(str\)"),
    ],
)
def test_a_function_that_fails_is_named_and_never_a_reward(pool, name, said):
    stops, masks = pool(name), pool(name, on_error="mask")
    with pytest.raises(ValueError, match=rf"reward of t3/1: expected a finite number from .*{said}.*on_error"):
        stops.ask(FIELDS, "t3/1")
    assert masks.ask(FIELDS, "t3/1") is Unverified.ERROR
    assert masks.counts().errors == 1


def test_a_function_that_prints_a_lot_reads_input_or_forks_gives_its_own_answer_once(pool):
    assert pool(":prints").ask(FIELDS, "t0/0") == 1.0
    assert pool(":reads_input").ask(FIELDS, "t0/0") == 1.0
    forks = pool(":forks_and_both_return")
    # The child's 0 must neither be taken for the answer nor for that of the next attempt.
    assert [forks.ask(FIELDS, f"t0/{member}") for member in range(4)] == [1.0] * 4


def test_what_a_function_leaves_running_is_killed(pool, tmp_path):
    mark = tmp_path / "mark"
    asked = pool(":forks_and_leaves_a_child")
    assert asked.ask({**FIELDS, "metadata": {"mark": str(mark)}}, "t0/0") == 1.0
    time.sleep(1.5)
    assert not mark.exists()
    asked.ask({**FIELDS, "metadata": {"mark": str(mark)}}, "t0/1")
    assert asked.counts().starts == 2


def test_attempts_run_side_by_side_in_as_many_processes_as_there_are_workers(pool):
    asked = pool(":says_which_process", workers=2)
    found, gate = set(), threading.Barrier(2)

    def ask():
        gate.wait(30)
        for member in range(20):
            found.add(asked.ask(FIELDS, f"t0/{member}"))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert 1 <= len(found) <= 2
    assert asked.counts().attempts == 40


def test_a_long_completion_passes_the_pipe(pool):
    long = "é" * 300_000
    assert pool(":good").ask({**FIELDS, "completion": long, "answer": long}, "t0/0") == 1.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module_anywhere:f", "ModuleNotFoundError"),
        (f"{FAULTY}:no_such_function", "AttributeError"),
        (f"{FAULTY}:FAULTY", "AttributeError"),
        ("math:pi", "expected math:pi to be a function, got float"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_before_the_run(pool, name, said):
    with pytest.raises(ValueError, match=rf"reward: expected a function that loads, got '{name}': .*{said}"):
        pool(name).check()


def test_a_closed_pool_answers_no_more(pool):
    asked = pool(":good")
    asked.ask(FIELDS, "t0/0")
    asked.close()
    with pytest.raises(ValueError, match="expected a verifier that is open"):
        asked.ask(FIELDS, "t0/1")


def test_a_process_knows_no_jax_and_so_starts_at_once():
    code = "import sys, train.verify.worker, train.verify.dapo, train.verify.pool; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

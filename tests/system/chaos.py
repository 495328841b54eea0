"""Runs that are killed and lied to, by a seeded schedule, and what must hold of them afterwards.

Bounded runs sample from fake engines in processes of their own, behind misbehaving proxies; batch-wise ones from the
local engine. The trainer is the real program in its own process, started again after every end but a good one.
"""

import collections
import contextlib
import dataclasses
import json
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tests.system.victims import ROOT, Engine, Trainer, model_of
from train.checkpoint import read_ledger, read_meta
from train.config import load, to_toml
from train.ledger import audit
from train.ledger_log import read_entries
from train.run_folder import EVENTS, METRICS, read_lines

SMALL = (
    "name=chaos",
    "policy.width=16",
    "policy.layers=1",
    "policy.query_heads=2",
    "policy.kv_heads=1",
    "policy.head_dim=8",
    "policy.expert_hidden=16",
    "policy.remat=none",
    "batch.groups_per_step=4",
    "batch.group_size=4",
    "batch.rows=4",
    "rollout.slots=16",
    "rollout.deadline=60",
    "reward=random",  # the small policy never answers rightly, and equal rewards train nothing
    "objective.kl_coef=0",
    "warm_start.steps=0",
    "eval.prompts=0",
    "data.holdout=0",
)
BOUNDED = (
    "schedule.mode=bounded",
    "schedule.max_lag=3",
    "schedule.request_deadline=4",
    "schedule.attempts=50",
    "checkpoint.every=5",
    "rollout.engine=remote",
    "rollout.probe_tolerance=1.0",  # a fake engine reproduces no probe, and the probe's difference is capped at one
)
# Faults that the run gets over by itself, and those that must stop it: a completion or a push that cannot be believed.
MILD = ("DUPLICATE", "LOST", "DROP", "REFUSE", "HANG", "FAIL_STAGE")
GRAVE = ("WRONG_VERSION", "NAN_LOGP", "POSITIVE_LOGP", "UNKNOWN_TOKEN", "WRONG_ROWS", "WRONG_TEMPERATURE")
STALL_SECONDS = 600.0  # a start on a crowded machine compiles for minutes; waits have deadlines of their own


@dataclasses.dataclass
class Record:
    """What was done to a run, and how often it had to begin again."""

    seed: int
    steps: int
    faults: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    kills: int = 0
    starts: int = 0
    errors: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    longest_silence: float = 0.0
    max_lag: int = 0
    facts: dict[str, float] = dataclasses.field(default_factory=dict)


def write_config(folder: Path, *overrides: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "chaos.toml"
    path.write_text(to_toml(load(ROOT / "configs" / "quickstart.toml", [*SMALL, *overrides])))
    return path


def version_of(folder: Path) -> int:
    """The last whole line of the run's metrics; 0 of none."""
    rows = (folder / METRICS).read_bytes().split(b"\n")[:-1] if (folder / METRICS).exists() else []
    return int(json.loads(rows[-1])["version"]) if rows else 0


def bounded(folder: Path, cache: Path, *, seed: int, steps: int, kills: int, faults: int) -> Record:
    """A bounded run over two engines, one slow, with faults and kills spread over its steps."""
    config = write_config(folder, *BOUNDED, f"steps={steps}", 'rollout.endpoints=["127.0.0.1:1", "127.0.0.1:2"]')
    model = model_of(load(config))
    engines = [Engine(model, 0.004), Engine(model, 0.03)]
    try:
        endpoints = ", ".join(f'"127.0.0.1:{engine.proxy.port}"' for engine in engines)
        write_config(folder, *BOUNDED, f"steps={steps}", f"rollout.endpoints=[{endpoints}]")
        return _Siege(folder, config, cache, engines, Record(seed=seed, steps=steps)).run(kills, faults)
    finally:
        for engine in engines:
            engine.proxy.close()
            engine.kill()


class _Siege:
    def __init__(self, folder: Path, config: Path, cache: Path, engines: Sequence[Engine], record: Record) -> None:
        self._runs, self._config, self._cache = folder, config, cache
        self._folder = folder / "chaos"
        self._engines = engines
        self._record = record
        self._random = random.Random(record.seed)
        self._trainer: Trainer | None = None
        self._moved = time.monotonic()
        self._seen = -1
        self._disk_full = False
        self._errors = 0  # that the run had named before the present start

    def run(self, kills: int, faults: int) -> Record:
        began = time.monotonic()
        plan = self._plan(kills, faults)
        self._start()
        while self._alive():
            version = self._look()
            if plan and version >= plan[0][0]:
                _, name = plan.pop(0)
                time.sleep(self._random.uniform(0.0, 0.2))
                self._strike(name)
            time.sleep(0.02)
        assert not plan, f"expected every fault to strike, {plan} did not"
        self._record.seconds = time.monotonic() - began
        check_bounded(self._folder, self._record)
        self._record.facts["pieces corrupted on their way"] = sum(e.proxy.corrupted for e in self._engines)
        return self._record

    def _plan(self, kills: int, faults: int) -> list[tuple[int, str]]:
        """Which fault strikes once which version is reached."""
        kinds = [*MILD, "engine killed", "engine stopped", "connections cut", "bytes delayed", "chunk corrupted"]
        grave = [*GRAVE, "disk full", "preempted"]
        few = max(faults // 10, 2)
        names = [grave[index % len(grave)] for index in range(few)]
        names += [kinds[index % len(kinds)] for index in range(faults - few)] + ["trainer killed"] * kills
        self._random.shuffle(names)
        last = self._record.steps - 3
        return [(1 + index * last // len(names), name) for index, name in enumerate(names)]

    def _start(self) -> None:
        self._record.starts += 1
        self._disk_full = False
        self._errors = len(self._named_errors())
        # Half of the starts live with a clock that jumps.
        self._trainer = Trainer(self._config, self._runs, self._cache, jumping_clock=self._record.starts % 2 == 0)
        self._moved = time.monotonic()

    def _alive(self) -> bool:
        """Whether the run goes on; starts the trainer again if it ended, but for a good end."""
        assert self._trainer is not None
        code = self._trainer.process.poll()
        if code is None:
            return True
        if code == 0:
            return False
        if code == 1:
            self._record.errors.append(self._named_error())
        assert code in (1, 75, -signal.SIGKILL), f"exit code {code}: {self._output()}"
        # Versions only grow at an engine, and the run goes back to its cut.
        for engine in self._engines:
            engine.restart()
        self._start()
        return True

    def _named_error(self) -> str:
        """What the run said before it ended; a process that may not write says nothing."""
        if self._disk_full:
            return "(its disk was full)"
        said = self._named_errors()[self._errors :]
        assert said, f"exit code 1 without an error: {self._output()}"
        return said[-1]

    def _named_errors(self) -> list[str]:
        return [event["text"] for event in read_lines(self._folder / EVENTS) if event["kind"] == "error"]

    def _output(self) -> str:
        assert self._trainer is not None
        return self._trainer.output.read_text(errors="replace")[-3000:]

    def _look(self) -> int:
        version = version_of(self._folder)
        now = time.monotonic()
        if version != self._seen:
            self._record.longest_silence = max(self._record.longest_silence, now - self._moved)
            self._seen, self._moved = version, now
        silence = now - self._moved
        assert silence < STALL_SECONDS, f"a hang: version {version} for {silence:.0f} s, see {self._runs}"
        return version

    def _strike(self, name: str) -> None:
        assert self._trainer is not None
        engine = self._random.choice(self._engines)
        match name:
            case "trainer killed":
                self._record.kills += 1
                self._trainer.kill()
            case "engine killed":
                engine.restart()
            case "engine stopped":
                self._stop_for_a_while(engine)
            case "connections cut":
                engine.proxy.cut()
            case "bytes delayed":
                engine.proxy.delay(self._random.uniform(0.2, 1.0))
            case "chunk corrupted":
                engine.proxy.corrupt()
            case "disk full":
                self._disk_full = True
                self._trainer.fill_disk()
            case "preempted":
                self._trainer.process.terminate()
            case fault:
                engine.tell({"fault": fault, "times": 1})
        if name != "trainer killed":
            self._record.faults[name] += 1

    def _stop_for_a_while(self, engine: Engine) -> None:
        assert engine.process is not None
        engine.process.send_signal(signal.SIGSTOP)
        time.sleep(self._random.uniform(0.2, 1.0))
        engine.process.send_signal(signal.SIGCONT)


def check_bounded(folder: Path, record: Record) -> None:
    """Nothing lost, nothing twice, nothing too old, nothing left behind."""
    rows = read_lines(folder / METRICS)
    assert [row["version"] for row in rows] == list(range(1, record.steps + 1))
    state = read_ledger(read_meta(folder / "checkpoints", record.steps))
    audit(read_entries(folder, record.steps), state)
    assert state.trained == record.steps * 4
    record.max_lag = int(max(row["lag/max"] for row in rows))
    assert_no_remains(folder)
    bound = load(folder / "config.toml").schedule.max_lag
    assert record.max_lag <= bound
    assert all(int(lag) <= bound for row in rows for lag in row["lag/histogram"])
    record.facts = {
        "prompts drawn": state.next_ticket,
        "trained": state.trained,
        "dropped": sum(state.dropped.values()),
        "sampled again": sum(state.reissued.values()),
    }


def batch_wise(folder: Path, cache: Path, *, seed: int, steps: int, kills: int) -> Record:
    """A batch-wise run killed at random moments, against one that was left alone."""
    record, chance, began = Record(seed=seed, steps=steps), random.Random(seed), time.monotonic()
    settings = (f"steps={steps}", "schedule.lag=2", "checkpoint.every=2")
    calm = write_config(folder / "calm", *settings)
    assert Trainer(calm, folder / "calm", cache).process.wait(600) == 0
    config = write_config(folder / "killed", *settings)
    run = folder / "killed" / "chaos"
    for moment in _moments(chance, steps, kills):
        trainer = Trainer(config, folder / "killed", cache)
        record.starts += 1
        _wait_for(trainer, run, moment, chance)
        engines = trainer.engines()
        trainer.kill()
        record.kills += 1
        _must_end(engines, 5.0)
    trainer = Trainer(config, folder / "killed", cache)
    record.starts += 1
    assert trainer.process.wait(600) == 0, trainer.output.read_text()[-3000:]
    record.seconds = time.monotonic() - began
    same_end(folder / "calm" / "chaos", run, steps)
    assert [row["version"] for row in read_lines(run / METRICS)] == list(range(1, steps + 1))
    state = read_ledger(read_meta(run / "checkpoints", steps))
    audit(read_entries(run, steps), state)
    assert_no_remains(run)
    return record


def assert_no_remains(folder: Path) -> None:
    """No half checkpoint, no half-written file."""
    remains = [*(folder / "checkpoints").glob("*tmp*"), *folder.rglob("*.partial*")]
    assert not remains, f"remains of kills: {remains}"


def _moments(chance: random.Random, steps: int, kills: int) -> list[tuple[str, int]]:
    """When to kill: while it starts, at a step, in a save, right after a publication."""
    kinds = ["step", "save", "step", "start", "publish"]
    return [(kinds[index % 5], 1 + index * (steps - 2) // kills) for index in range(kills)]


def _wait_for(trainer: Trainer, run: Path, moment: tuple[str, int], chance: random.Random) -> None:
    kind, version = moment
    if kind == "start":
        time.sleep(chance.uniform(0.5, 4.0))
        return
    end = time.monotonic() + STALL_SECONDS
    while version_of(run) < version or not _within(kind, run):
        assert trainer.process.poll() is None, trainer.output.read_text()[-3000:]
        assert time.monotonic() < end, f"a hang before version {version}"
        time.sleep(0.002)
    time.sleep(chance.uniform(0.0, 0.3) if kind in ("step", "publish") else chance.uniform(0.0, 0.03))


def _within(kind: str, run: Path) -> bool:
    if kind == "save":
        return any((run / "checkpoints").glob("*.orbax-checkpoint-tmp*"))
    return True


def _must_end(pids: Sequence[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < end, f"engines {alive} outlived their parent by {seconds} s"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def same_end(left: Path, right: Path, version: int) -> None:
    one, two = final_arrays(left, version), final_arrays(right, version)
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)


def final_arrays(folder: Path, version: int) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore((folder / "checkpoints" / str(version) / "state").absolute())
    return {name: np.asarray(array) for name, array in found.items()}


@contextlib.contextmanager
def emptied(folder: Path) -> Iterator[Path]:
    """A folder for one siege; what it leaves is removed when it ended well."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)

"""A run folder belongs to one process and to one config."""

import contextlib
import dataclasses
import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from train.config import RunConfig, load, to_toml
from train.run_folder import CONFIG, write_atomic
from train.store import cut_folder, versions
from train.strict_toml import nearest
from train.team import Team

_LOCK = "lock"
# What may differ when a run is resumed: where and how often, never what is computed.
_HARMLESS = (
    "alarms.",
    "checkpoint.",
    "eval.",
    "optim.moments_memory",
    "rollout.endpoints",
    "rollout.listen",
    "rollout.deadline",
    "rollout.chunk_bytes",
    "schedule.request_deadline",
    "watchdog.",
    "rollout.tls_ca",
    "rollout.token_file",
)


@contextlib.contextmanager
def claim(folder: Path, config: RunConfig, allowed: Sequence[str] = ()) -> Iterator[None]:
    """Holds the folder for this process; writes the resolved config, or checks that it is that of the run.

    Args:
      folder: of the run.
      config: to run or resume.
      allowed: dotted keys, or sections, that may differ from those of the run that is there.

    Raises:
      ValueError: another process holds it, or it holds a run of another config; the differing keys are named.
      OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        path = folder / CONFIG
        cuts = cut_folder(folder, config)
        if versions(cuts):
            if not path.exists():
                raise ValueError(
                    f"{folder}: expected the {CONFIG} of the run whose checkpoints are in {cuts}, got none; put it "
                    "back, give this run a name of its own (--set name=...), or set them aside (--fresh does, where "
                    "they are in the run folder)"
                )
            _check_same(folder, load(path), config, allowed)
        write_atomic(path, to_toml(config))
        yield


@contextlib.contextmanager
def claim_together(team: Team, folder: Path, config: RunConfig, allowed: Sequence[str] = ()) -> Iterator[None]:
    """As `claim`, for all processes of a run: the first one holds the folder, which the others must see.

    Raises:
      ValueError: as `claim`; or the processes were started with different configs, or see different folders.
    """
    configs = team.exchange("config", to_toml(config))
    different = [process for process, theirs in enumerate(configs) if theirs != configs[0]]
    if different:
        raise ValueError(f"config: expected that of process 0 in every process, got another one in {different}")
    if team.share.process == 0:
        with claim(folder, config, allowed):
            team.exchange("claim", None)
            yield
        return
    team.exchange("claim", None)
    found = (folder / CONFIG).read_text(encoding="utf-8") if (folder / CONFIG).exists() else ""
    if found != to_toml(config):
        raise ValueError(
            f"{folder}: expected the folder that process 0 has claimed, got {'another' if found else 'none'} in "
            f"process {team.share.process}; --runs must be on a file system that all hosts share"
        )
    yield


def _check_same(folder: Path, found: RunConfig, config: RunConfig, allowed: Sequence[str]) -> None:
    before, now = _flat(found), _flat(config)
    for key in allowed:
        if not any(_within(known, key) for known in now):
            raise ValueError(f"--allow-changed {key}: expected a key or section of the config; {nearest(key, now)}")
    changed = [
        f"{key} = {before.get(key)!r} there, {now.get(key)!r} here"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and not key.startswith(_HARMLESS)
        and not any(_within(key, name) for name in allowed)
    ]
    if changed:
        raise ValueError(
            f"{folder}: expected the config of the run that is in it, got another: {'; '.join(changed)}; resume it "
            f"with its own ({folder / CONFIG}), give this run a name of its own (--set name=...), set the "
            "old one aside (--fresh), or go on with the change on purpose (--allow-changed KEY)"
        )


def _within(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted key."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= _flat(value, f"{prefix}{field.name}.")
        else:
            flat[f"{prefix}{field.name}"] = value
    return flat


def set_aside(folder: Path) -> Path | None:
    """Renames a run folder that is there to the first free `<name>.<number>`; returns where it went.

    Raises:
      ValueError: another process holds it.
    """
    if not folder.exists():
        return None
    number = next(n for n in range(1, 10**6) if not folder.with_name(f"{folder.name}.{n}").exists())
    with _lock(folder):
        return folder.rename(folder.with_name(f"{folder.name}.{number}"))


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder}: expected a run folder that no other process uses, got one that a running sat-jax holds; "
                "wait for it, or give this run its own name: --set name=..."
            ) from None
        yield

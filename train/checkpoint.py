"""The cut: everything that a run needs to go on as if it had not stopped, saved atomically by Orbax.

A cut is taken at the trained frontier: what it counts as trained is in its parameters. It holds the parameters and the
optimizer state, the finished groups that wait (they were sampled by weights that no longer exist), and the ledger: the
next ticket, from which every later prompt, seed and key follows, and the prompts that are out with their attempts. A
batch-wise cut is taken at a window's edge, where nothing is out.

A save copies what it needs to the host and returns; threads of Orbax write it, and only when all of it is there does it
count. On a file system a folder is renamed then; a store without an atomic rename gets a marker file last.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy

from train.buffer import BufferSnapshot
from train.digest import digest, digests
from train.group_parts import pack_groups, template, unpack_groups
from train.ledger import LedgerState, ledger_from
from train.state import TrainState

_FORMAT = 4
_SCORE = "score"
# What Orbax writes last into a cut, or a part of one, where it cannot rename a folder.
_MARKER = "commit_success.txt"

Folder = Path | epath.Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """What a cut must agree about with the run that restores it; each is a digest ("" = none)."""

    policy: str
    tokenizer: str
    data: str
    reference: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """A consistent moment of a run.

    Attributes:
      identity: of the run.
      state: parameters, optimizer state, version.
      buffer: finished groups that have not been trained on, and the data cursor.
      counters: numbers that go on over a restart, by name (the evaluation before the run, say).
      score: how good it is, higher is better, for `keep_best`; None = never among the best.
    """

    identity: Identity
    state: TrainState
    buffer: BufferSnapshot
    counters: Mapping[str, float]
    score: float | None = None


class Checkpoints:
    """The cuts of one run folder. A context manager; one process at a time."""

    def __init__(
        self,
        folder: Folder,
        keep: int,
        *,
        keep_best: int = 0,
        atomic_rename: bool = True,
        read_only: bool = False,
    ) -> None:
        """Opens the folder; remains of broken saves are removed and never count.

        Args:
          folder: `<run>/checkpoints`, or wherever the config says (`store`).
          keep: how many of the newest cuts stay.
          keep_best: how many of those with the highest score stay beside them.
          atomic_rename: whether the file system renames a folder in one step; "gs://" never counts as such.
          read_only: change nothing there; a run in progress may be saving.
        """
        self._folder = _absolute(folder)
        self._read_only = read_only
        self._marks = not atomic_rename or str(folder).startswith("gs://")
        self._saving: int | None = None
        self._removes = not read_only and jax.process_index() == 0
        if self._removes:
            self._remove_partials("*")
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_preserved(keep, keep_best, read_only=read_only),
            best_fn=_score if keep_best and not read_only else None,
            enable_async_checkpointing=not read_only,
            temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath if self._marks else None,
            # Ours, above: Orbax does it in a thread that may still be at work when the first save begins.
            cleanup_tmp_directories=False,
            create=not read_only,
            read_only=read_only,
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.settle()
        except OSError as failed:
            if error is None:
                raise
            error.add_note(str(failed))
        finally:
            self._manager.close()
            # Threads of a failed save may have written once more after it was removed; now they have ended.
            if self._removes:
                self._remove_partials("*")

    def latest(self) -> int | None:
        """Version of the newest whole cut, or None."""
        return self._manager.latest_step()

    def save(self, cut: Cut) -> None:
        """Begins to save a cut, and returns once what it needs is on the host; it counts only when it is whole.

        A save that is still under way is waited for first.

        Raises:
          OSError: this one or the one before it could not be written (a full disk, say); earlier cuts are untouched.
        """
        self.settle()
        version = cut.state.version
        if version == self.latest():
            return  # a batch-wise run is a function of its config and seed: the cut that is there is this one
        arrays = flatten(cut.state)
        packed, said = pack_groups(cut.buffer.groups)
        meta = {
            "format": _FORMAT,
            "version": version,
            "identity": dataclasses.asdict(cut.identity),
            "ledger": dataclasses.asdict(cut.buffer.ledger),
            "groups": said,
            "arrays": digests(arrays),
            "counters": dict(cut.counters),
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays),
            groups=ocp.args.StandardSave({"packed": packed}),
            meta=ocp.args.JsonSave(meta),
        )
        metrics = None if cut.score is None else {_SCORE: float(cut.score)}
        self._saving = version
        with self._written():
            self._manager.save(version, args=items, metrics=metrics, force=True)

    def settle(self) -> None:
        """Waits until the last save is whole.

        Raises:
          OSError: it could not be written; earlier cuts are untouched.
        """
        with self._written():
            self._manager.wait_until_finished()
        self._saving = None

    def raise_failed(self) -> None:
        """Raises what has befallen the last save, without waiting for it.

        Raises:
          OSError: it could not be written; earlier cuts are untouched.
        """
        with self._written():
            self._manager.check_for_errors()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Turns what Orbax raises, in whichever thread, into one error, and removes what it left."""
        version = self._saving
        try:
            yield
        except Exception as error:
            self._saving = None
            if version is None:
                raise
            # Other threads of Orbax may still be writing there: they fail one by one.
            self._remove_partials(str(version), tries=40)
            raise OSError(
                f"checkpoint: version {version} could not be written under {self._folder}: {error}; earlier "
                f"checkpoints are whole: free some space and start the same command again to resume"
            ) from error

    def _remove_partials(self, version: str, *, tries: int = 1) -> None:
        """Removes saves that are not whole: they never count, but on a full disk their bytes are needed."""
        for _ in range(tries if self._removes else 0):
            partials = list(self._folder.glob(f"{version}.orbax-checkpoint-tmp*"))
            if self._marks:
                found = [path for path in self._folder.glob(version) if path.name.isdecimal()]
                partials += [path for path in found if not (path / _MARKER).exists()]
            if not partials:
                return
            for partial in partials:
                _remove(partial)
            if tries > 1:
                time.sleep(0.05)

    def check(self, identity: Identity, *, but: tuple[str, ...] = ()) -> None:
        """Checks that the newest cut is of this run, before anything is built for it.

        Args:
          identity: of the run.
          but: fields of it that are not known yet.

        Raises:
          ValueError: it is of another model, tokenizer, data set or reference, or damaged.
        """
        version = self.latest()
        if version is not None:
            self._check(version, self._restore(version, meta=ocp.args.JsonRestore())["meta"], identity, but)

    def restore(self, state: TrainState, identity: Identity, version: int | None = None) -> Cut | None:
        """The newest cut, or None when there is none.

        Args:
          identity: of the run that wants it.
          state: a state of this run's structure, for shapes, types and shardings.
          version: of another cut that is kept, in place of the newest.

        Raises:
          ValueError: the cut is of another model, tokenizer, data set or reference, or is damaged.
          OSError: one that was being saved could not be written.
        """
        self.settle()
        version = self.latest() if version is None else version
        if version is None:
            return None
        meta = self._restore(version, meta=ocp.args.JsonRestore())["meta"]
        self._check(version, meta, identity)
        abstract = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in flatten(state).items()
        }
        packed = {"packed": template(meta["groups"])}
        found = self._restore(
            version, state=ocp.args.StandardRestore(abstract), groups=ocp.args.StandardRestore(packed)
        )
        for name, seen in digests(found["state"]).items():
            if seen != meta["arrays"].get(name):
                raise ValueError(
                    f"checkpoint {version}: expected {name} of digest {meta['arrays'].get(name)}, got {seen} "
                    f"({self._folder}); the file is damaged: delete that folder to resume from the checkpoint before it"
                )
        try:
            groups = unpack_groups(found["groups"]["packed"], meta["groups"])
        except ValueError as error:
            raise ValueError(
                f"checkpoint {version}: {error} ({self._folder}); the file is damaged: delete that folder to resume "
                f"from the checkpoint before it"
            ) from error
        return Cut(
            identity=identity,
            state=unflatten(state, found["state"], version),
            buffer=BufferSnapshot(
                groups=groups,
                ledger=read_ledger(meta),
            ),
            counters=meta["counters"],
        )

    def _restore(self, version: int, **items: Any) -> Mapping[str, Any]:
        try:
            return self._manager.restore(version, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises ValueError, KeyError and plain Exception alike
            raise ValueError(
                f"checkpoint {version}: expected whole files, got {type(error).__name__}: {str(error)[:300]} "
                f"({self._folder / str(version)}); delete that folder to resume from the checkpoint before it"
            ) from error

    def _check(self, version: int, meta: Mapping[str, Any], identity: Identity, but: tuple[str, ...] = ()) -> None:
        if meta.get("format") != _FORMAT:
            raise ValueError(f"checkpoint {version}: expected format {_FORMAT}, got {meta.get('format')}")
        for name, expected in dataclasses.asdict(identity).items():
            found = meta["identity"].get(name)
            if found != expected and name not in but:
                raise ValueError(
                    f"checkpoint {version}: expected the {name} of this run ({expected or 'none'}), got another one "
                    f"({found or 'none'}) in {self._folder}; give this run its own name (--set name=...) or restore "
                    f"the settings that the checkpoint was made with"
                )


def _score(metrics: Any) -> float:
    return float(metrics[_SCORE])


def _preserved(keep: int, keep_best: int, *, read_only: bool) -> preservation_policy.PreservationPolicy:
    if read_only:
        return preservation_policy.PreserveAll()
    newest = preservation_policy.LatestN(keep)
    if not keep_best:
        return newest
    best = preservation_policy.BestN(get_metric_fn=_score, n=keep_best, keep_checkpoints_without_metrics=False)
    return preservation_policy.AnyPreservationPolicy([newest, best])


def flatten(state: TrainState) -> dict[str, jax.Array]:
    """Every array of a state by its path, so that a checkpoint does not depend on the classes around them."""
    tree = {"params": state.params, "opt_state": state.opt_state}
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten(template: TrainState, arrays: dict[str, jax.Array], version: int) -> TrainState:
    """The state whose `flatten` is `arrays`, in the structure of `template`."""
    tree = {"params": template.params, "opt_state": template.opt_state}
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [arrays[jax.tree_util.keystr(path)] for path, _ in paths]
    whole = jax.tree_util.tree_unflatten(structure, leaves)
    return TrainState(version=version, params=whole["params"], opt_state=whole["opt_state"])


def _absolute(folder: Folder) -> epath.Path:
    return epath.Path(folder if "://" in str(folder) else Path(folder).absolute())


def _remove(folder: epath.Path) -> None:
    # Threads of a failed save may add to it, or take from it, meanwhile: whoever calls looks again.
    with contextlib.suppress(OSError):
        folder.rmtree()


def read_meta(folder: Folder, version: int) -> dict[str, Any]:
    """What a cut says of itself, without its arrays (for people and for tests)."""
    return json.loads((epath.Path(folder) / str(version) / "meta" / "metadata").read_text())


def parameter_reader(folder: Folder, version: int) -> Callable[[tuple[str, ...]], np.ndarray]:
    """Reads a cut's parameters one by one, on the host, whatever devices they were saved from.

    Args:
      folder: `<run>/checkpoints`.
      version: of the cut.

    Returns:
      A function that gives the leaf at a path of the policy's state, e.g. `("layers", "gate_EDF")`.

    Raises:
      ValueError: there is no such cut or leaf, or its bytes are not those that were saved.
    """
    try:
        known = read_meta(folder, version)["arrays"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"checkpoint {version}: expected a whole one, got {error!r} ({folder})") from error
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    where = _absolute(folder)

    def read(path: tuple[str, ...]) -> np.ndarray:
        name = "['params']" + "".join(f"[{part!r}]" for part in path) + ".value"
        wanted = ocp.args.PyTreeRestore(
            item={name: 0}, restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
        )
        try:
            array = reader.restore(where / str(version) / "state", args=wanted)[name]
        except Exception as error:  # as in `Checkpoints._restore`
            raise ValueError(
                f"checkpoint {version}: expected {name}, got {type(error).__name__}: {str(error)[:300]} ({folder})"
            ) from error
        if (seen := digest(array)) != known.get(name):
            raise ValueError(
                f"checkpoint {version}: expected {name} of digest {known.get(name)}, got {seen} "
                f"({folder}); the file is damaged: convert another version"
            )
        return array

    return read


def read_ledger(meta: Mapping[str, Any]) -> LedgerState:
    """The books of a cut, from what `read_meta` gives."""
    return ledger_from(meta["ledger"])

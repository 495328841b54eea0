"""Where a run's cuts are: in its folder, or in a store that the config names."""

from pathlib import Path

from etils import epath

from train.checkpoint import Checkpoints, Folder
from train.config import RunConfig
from train.run_folder import CHECKPOINTS


def cut_folder(folder: Path, config: RunConfig) -> Folder:
    """The folder of a run's cuts: `<run>/checkpoints`, or `<checkpoint.path>/<name of the run>`.

    Raises:
      ValueError: the store cannot be reached from here (a package is missing, say).
    """
    path = config.checkpoint.path
    if not path:
        return folder / CHECKPOINTS
    where = epath.Path(path) / config.name
    try:
        where.exists()
    except (ImportError, OSError) as error:
        raise ValueError(
            f"checkpoint.path: expected a store that can be reached, got {path!r}: {error}; for gs:// install the "
            "extra gcs (pip install 'sat-jax[gcs]') and see that this machine may use the bucket"
        ) from error
    return where if "://" in path else Path(where)


def versions(cuts: Folder) -> list[int]:
    """Versions of the cuts in a folder, oldest first; on a store without renames also of those that are not whole."""
    return sorted(int(path.name) for path in cuts.glob("*") if path.name.isdecimal())


def open_checkpoints(folder: Path, config: RunConfig, *, read_only: bool = False) -> Checkpoints:
    """The cuts of a run.

    Args:
      folder: of the run.
      config: of the run.
      read_only: change nothing there; a run in progress may be saving.

    Raises:
      ValueError: the store cannot be reached.
    """
    settings = config.checkpoint
    return Checkpoints(
        cut_folder(folder, config),
        settings.keep,
        keep_best=settings.keep_best,
        atomic_rename=settings.atomic_rename,
        read_only=read_only,
    )

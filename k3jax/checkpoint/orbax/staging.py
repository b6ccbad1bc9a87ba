"""A directory that appears complete or not at all, even if the power fails."""

import contextlib
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator

from k3jax.errors import UserError


def check_destination(destination: pathlib.Path) -> None:
    """Refuses a place where no directory can be put, before any work is done.

    Args:
      destination: absolute, symbolic links resolved.

    Raises:
      UserError: something is there, or the folder around it is missing.
    """
    if destination.is_dir():
        with writing(destination):
            empty = not any(destination.iterdir())
        if not empty:
            raise UserError(f"{destination} is not empty; choose another directory or remove it")
        if destination.is_mount():
            raise UserError(f"{destination} is a mount point, which cannot be replaced; name a directory inside it")
    elif destination.exists():
        raise UserError(f"{destination} exists and is not a directory; choose another name")
    elif not destination.parent.is_dir():
        raise UserError(f"no directory {destination.parent} to make {destination.name} in; make it first")


@contextlib.contextmanager
def staged_directory(destination: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a hidden directory beside `destination`, which becomes it at the end and is removed after a failure.

    Args:
      destination: has passed `check_destination`.

    Raises:
      UserError: it cannot be written.
    """
    staging = destination.with_name(f".{destination.name}.partial-{secrets.token_hex(4)}")
    with writing(destination):
        staging.mkdir()
    try:
        yield staging
        with writing(destination):
            _sync(staging)
            staging.rename(destination)
            _sync_path(destination.parent)
    except BaseException:
        # The first error says what is wrong; a second one could only hide it.
        shutil.rmtree(staging, ignore_errors=True)
        raise


@contextlib.contextmanager
def writing(destination: pathlib.Path) -> Iterator[None]:
    """Reports a failing disk as a mistake of the user."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {destination}: {error.strerror}") from error


def _sync(directory: pathlib.Path) -> None:
    """Waits until everything in a directory is on the disk: a rename may get there before what it renames."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            _sync_path(os.path.join(folder, name))
        _sync_path(folder)


def _sync_path(path: str | os.PathLike) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

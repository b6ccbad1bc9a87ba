"""An .npz of logits, written chunk by chunk: a long prompt's logits do not fit into memory."""

import contextlib
import os
import pathlib
import secrets
import stat
import zipfile

import numpy as np

from k3jax.errors import UserError


class LogitsFile:
    """Writes float32 `logits` [rows, vocabulary] and puts the file in place only once every row is there.

    Use it as a context manager. Entering it finds out whether the place is writable; leaving it with rows missing, or
    with an exception, removes what was written.

    Args:
      path: the .npz to make or replace.
      rows: how many rows will come.

    Raises:
      UserError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike, rows: int):
        self.path = pathlib.Path(path)
        if not self.path.name:
            raise UserError(f"cannot write {str(path)!r}: it names no file")
        self.rows = rows
        self.rows_written = 0
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.npz.tmp")

    @property
    def complete(self) -> bool:
        return self.rows_written == self.rows

    def __enter__(self) -> "LogitsFile":
        try:
            # A device or a folder must not be replaced by the rename.
            if self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode):
                raise UserError(f"cannot write {self.path}: it exists and is not a regular file")
            self._file = self._temporary.open("xb")
        except OSError as error:
            raise self._failure(error) from error
        self._archive = zipfile.ZipFile(self._file, "w")
        self._member = None
        return self

    def write(self, first_position: int, logits: np.ndarray) -> None:
        """Appends the logits [n, vocabulary] of the positions from `first_position` on, which come in order."""
        if first_position != self.rows_written:
            raise ValueError(f"logits of position {first_position} came, expected {self.rows_written}")
        try:
            if self._member is None:
                self._member = self._archive.open("logits.npy", "w", force_zip64=True)
                header = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, logits.shape[1])}
                np.lib.format.write_array_header_1_0(self._member, header)
            self._member.write(np.ascontiguousarray(logits, "<f4").data.cast("B"))
        except OSError as error:
            raise self._failure(error) from error
        self.rows_written += len(logits)

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if kind is None and self.complete:
                self._member.close()
                self._archive.close()
                self._file.close()
                os.replace(self._temporary, self.path)
        except OSError as failure:
            raise self._failure(failure) from failure
        finally:
            # After a failure closing tries to write once more; the first error has said what is wrong.
            for part in (self._member, self._archive, self._file):
                with contextlib.suppress(OSError):
                    if part is not None:
                        part.close()
            self._temporary.unlink(missing_ok=True)

    def _failure(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self.path}: {error.strerror}; --logits-out needs a file in a writable folder")

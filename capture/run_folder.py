"""A folder anywhere that fsspec reaches, in which files are only ever written whole."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class RunFolder:
    """Whole files in a folder: written, read, listed and removed, never appended to.

    On a local disk a file is written under a temporary name and then renamed, so that it is there
    in full or not at all. Object stores do the same by themselves.

    Args:
        url: A path, or a URL such as ``s3://bucket/runs/today`` whose protocol fsspec knows.

    Raises:
        ValueError: the protocol is not known.
        ImportError: the package that serves the protocol is not installed; the message names it.

    Example:
        >>> folder = RunFolder("memory://examples/folder")
        >>> folder.write("a/b.txt", b"text")
        >>> folder.read("a/b.txt"), folder.names("a"), folder.names("nowhere")
        (b'text', ['b.txt'], [])
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        given = os.fspath(url)
        self.url = given if given.endswith("://") else given.rstrip("/\\") or given
        filesystem, root = fsspec.core.url_to_fs(self.url)
        self._fs: Any = filesystem
        self._root = str(root).rstrip("/")
        self.is_local = isinstance(filesystem, LocalFileSystem)

    def path(self, name: str) -> str:
        """Where a file lies, as the file system names it."""
        return f"{self._root}/{name}"

    def within(self, name: str) -> RunFolder:
        """A folder inside."""
        inner = RunFolder.__new__(RunFolder)
        inner.url, inner._root = f"{self.url}/{name}", self.path(name)
        inner._fs, inner.is_local = self._fs, self.is_local
        return inner

    def make(self, name: str = "") -> None:
        """Make a folder and those above it; object stores need none."""
        if self.is_local:
            Path(self.path(name)).mkdir(parents=True, exist_ok=True)
        else:
            with contextlib.suppress(NotImplementedError):
                self._fs.makedirs(self.path(name).rstrip("/"), exist_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """Write a file, in place of one of that name.

        Raises:
            OSError: it cannot be written; whatever had the name is still there.
        """
        if not self.is_local:
            self._fs.pipe_file(self.path(name), data)
            return
        with self.writing(name, durable=False) as file:
            file.write(data)

    @contextlib.contextmanager
    def writing(self, name: str, durable: bool = True) -> Iterator[IO[bytes]]:
        """A file to write to that takes its name at the end, unless something was raised.

        Args:
            name: The file.
            durable: Wait until the data is on the disk itself before the name is given.
        """
        if not self.is_local:
            whole = io.BytesIO()
            yield whole
            self.write(name, whole.getvalue())
            return
        temporary = Path(self.path(f"{name}.{secrets.token_hex(4)}.tmp"))
        try:
            with temporary.open("wb") as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(self.path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def read(self, name: str) -> bytes:
        """A file's bytes.

        Raises:
            FileNotFoundError: there is none of that name.
        """
        return bytes(self._fs.cat_file(self.path(name)))

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self.path(name)))

    def names(self, folder: str = "") -> list[str]:
        """Names of the files and folders in a folder, sorted; none if there is no such folder."""
        self._fs.invalidate_cache()
        place = self.path(folder).rstrip("/")
        try:
            found = self._fs.ls(place, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {str(path).rstrip("/").replace("\\", "/").rpartition("/")[2] for path in found}
        return sorted(names)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self.path(name))

    def remove_empty(self, name: str = "") -> None:
        """Remove a folder that holds nothing any more; only disks have such folders."""
        if self.is_local:
            with contextlib.suppress(OSError):
                Path(self.path(name)).rmdir()

"""Who writes to a run: one process at a time, named in a file beside the data."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from neuraldbg.capture.run_folder import RunFolder
from neuraldbg.capture.run_format import LOCK

_TRIES = 5


class RunInUseError(OSError):
    """Another process writes to the run; the message names it and what to do."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that writes to a run.

    Attributes:
        host: Name of its machine.
        machine: What tells machines (and containers) apart that have the same name.
        pid: Its number there.
        started: When it started, by that machine's count; with the number it names a process for
            good. Empty where the system does not tell.
        since: When it began to write, UTC.
        token: Of this lock, so that a process knows its own.
    """

    host: str
    machine: str
    pid: int
    started: str
    since: str
    token: str

    @classmethod
    def current(cls) -> Holder:
        """This process."""
        return cls(
            host=platform.node(),
            machine=_machine(),
            pid=os.getpid(),
            started=_start_of(os.getpid()),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            token=secrets.token_hex(8),
        )

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, where this process can see it."""
        return (self.host, self.machine) == (platform.node(), _machine())

    @property
    def is_surely_dead(self) -> bool:
        """Whether it ran here and does no more."""
        # Signal 0 asks whether a process is there; on Windows it would be an interrupt.
        if os.name != "posix" or not self.is_here or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return bool(self.started) and _start_of(self.pid) != self.started


def _machine() -> str:
    """The running kernel and the space in which process numbers are counted, where they show."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty for one that is dead or unknown."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = line.rpartition(")")[2].split()  # the name before may hold anything
    return "" if fields[0] in "ZX" else fields[19]


def read_holder(folder: RunFolder, name: str = LOCK) -> Holder | None:
    """Who has written to a folder and not said that it is done; None where nobody has."""
    try:
        told = json.loads(folder.read(name))
        return Holder(
            str(told["host"]),
            str(told["machine"]),
            int(told["pid"]),
            str(told["started"]),
            str(told["since"]),
            str(told["token"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


class RunLock:
    """The right to write to a folder, until `release`.

    A lock left behind by a process of this machine that is dead is taken over.

    Raises:
        RunInUseError: somebody else holds it, or may do so.
        OSError: the folder cannot be written to.

    Example:
        >>> folder = RunFolder("memory://examples/lock")
        >>> lock = RunLock(folder)
        >>> RunLock(folder)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        neuraldbg.capture.run_lock.RunInUseError: memory://examples/lock is being written by ...
        >>> lock.release()
        >>> RunLock(folder).release()
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.holder = Holder.current()
        for _ in range(_TRIES):
            if self._create():
                return
            other = self._read()
            if other is not None and other.is_surely_dead:
                self._remove_stale(other)
                continue
            if other is not None or not self._folder.exists(LOCK):
                break
            time.sleep(0.02)  # a lock without content is only just being written
        self._refuse()

    def release(self) -> None:
        """Let others write; a lock that somebody else took meanwhile is left alone."""
        holder = self._read()
        if holder is not None and holder.token == self.holder.token:
            self._folder.remove(LOCK)

    def _create(self) -> bool:
        """Make the lock's file, unless there is one."""
        content = json.dumps(asdict(self.holder)).encode()
        if not self._folder.is_local:
            # Few object stores can create a file only if there is none: look, write, look again.
            if self._folder.exists(LOCK):
                return False
            self._folder.write(LOCK, content)
            written = self._read()
            return written is not None and written.token == self.holder.token
        path = Path(self._folder.path(LOCK))
        prepared = path.with_name(f"{LOCK}.{self.holder.token}.tmp")
        prepared.write_bytes(content)
        try:
            os.link(prepared, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            with contextlib.suppress(FileExistsError), path.open("xb") as file:
                file.write(content)
                return True
            return False
        finally:
            prepared.unlink(missing_ok=True)
        return True

    def _remove_stale(self, dead: Holder) -> None:
        """Remove a dead process's lock, and no other that has come in its place meanwhile."""
        if not self._folder.is_local:
            self._folder.remove(LOCK)
            return
        aside = f"{LOCK}.{self.holder.token}.tmp"
        path, moved = Path(self._folder.path(LOCK)), Path(self._folder.path(aside))
        with contextlib.suppress(OSError):
            path.rename(moved)
            taken = self._read(aside)
            if taken is not None and taken.token != dead.token:
                os.link(moved, path)  # it was another's already: give it back
        moved.unlink(missing_ok=True)

    def _read(self, name: str = LOCK) -> Holder | None:
        return read_holder(self._folder, name)

    def _refuse(self) -> None:
        holder = self._read()
        who, remedy = "somebody", ""
        if holder is not None:
            who = f"process {holder.pid} on {holder.host} (since {holder.since})"
            if holder.pid == os.getpid() and holder.is_here:
                who = f"this very process (since {holder.since})"
        if holder is None or not holder.is_here or os.name != "posix":
            remedy = (
                " Whether it still runs cannot be seen from here: if it does not, delete "
                f"{self._folder.url}/{LOCK}."
            )
        raise RunInUseError(
            f"{self._folder.url} is being written by {who}: choose another folder for this run, "
            f"or wait until that one has ended.{remedy}"
        )

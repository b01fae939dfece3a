"""One writer per run directory: a lock that the kernel releases when its process dies."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from utils.errors import ConfigError
from utils.rundir.folders import creation_error

TRIES = 100  # each fails if another process removes the file or folder meanwhile
# what file systems without flock answer
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
NOT_MINE = (errno.EACCES, errno.EPERM, errno.EROFS)

_held: set[Lock] = set()


class Lock:
    """A lock file beside the directory, so that it stays when a former run is moved aside."""

    def __init__(self, directory: Path) -> None:
        self._directory = Path(
            os.path.realpath(directory)
        )  # one lock for all spellings of the path
        self._path = (
            self._directory.with_name(f".{self._directory.name}.lock")
            if self._directory.name
            else self._directory / ".lock"
        )
        self._descriptor: int | None = None
        self._made: list[Path] = []  # folders that were not there before, outermost first

    def acquire(self) -> str:
        """Locks until `release` or the end of this process. Returns who holds it, if another does.

        On file systems without locks it succeeds.
        """
        if self._descriptor is not None:
            return ""
        inside = self._directory / ".lock"
        while True:
            try:
                return self._take()
            except OSError as error:
                if error.errno in (errno.EISDIR, errno.ELOOP):
                    what = f"{self._path} is no regular file; remove it, a run locks it"
                    raise ConfigError(f"checkpoint_path={self._directory}: {what}") from None
                if (
                    error.errno not in NOT_MINE
                    or not self._directory.is_dir()
                    or self._path == inside
                ):
                    raise creation_error(self._directory, error) from None
            # the directory was made for this user, where it could not make one itself
            self._path = inside

    def release(self) -> None:
        """Removes the file and the empty folders that were made for it; may be called twice."""
        if (descriptor := self._descriptor) is not None:
            # removed while held: a process that waits notices that the file changed
            with suppress(OSError):
                if _is_at(descriptor, self._path):
                    self._path.unlink()
            _held.discard(self)
            self._descriptor = None
            os.close(descriptor)
        with suppress(OSError):
            while self._made:
                self._made.pop().rmdir()
        self._made = []

    def _take(self) -> str:
        for _ in range(TRIES):
            try:
                self._make_folders()
                descriptor = self._open()
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _read(descriptor) or "which has just begun"
            except OSError as error:
                unused = os.fstat(descriptor).st_size == 0
                os.close(descriptor)
                if error.errno not in NO_LOCKS:
                    raise
                with suppress(OSError):
                    if unused:
                        self._path.unlink()
                return ""
            if _is_at(descriptor, self._path):
                self._keep(descriptor)
                return ""
            os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _keep(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _held.add(self)
        with suppress(OSError):  # on a full disk or in another user's file only the text is lost
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"pid {os.getpid()} on host {socket.gethostname()}\n".encode())

    def _open(self) -> int:
        # never through a link, which could lead to any file, and never waiting for the other end of
        # a pipe
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | flags, 0o666)
        except PermissionError:
            if not self._path.exists():
                raise
            descriptor = os.open(self._path, os.O_RDONLY | flags)  # another user's
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise IsADirectoryError(errno.EISDIR, "no regular file")
        return descriptor

    def _make_folders(self) -> None:
        for folder in reversed([folder for folder in self._path.parents if not folder.exists()]):
            with suppress(FileExistsError):
                folder.mkdir()
                self._made.append(folder)


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(OSError):  # somebody has removed it
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _read(descriptor: int) -> str:
    """Returns who holds the lock, as written in its file."""
    try:
        return " ".join(os.pread(descriptor, 300, 0).decode(errors="replace").split())
    finally:
        os.close(descriptor)


def _let_go() -> None:
    """Closes inherited locks in forked loaders, which may outlive the run and would hold them."""
    for lock in list(_held):
        if lock._descriptor is not None:
            os.close(lock._descriptor)
        lock._descriptor, lock._made = None, []
    _held.clear()


os.register_at_fork(after_in_child=_let_go)

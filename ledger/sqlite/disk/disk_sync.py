"""Sync a file (fdatasync) without blocking the event loop, one sync at a time.

On Linux a sync is requested by `io_submit` (IOCB_CMD_FDSYNC, since Linux 4.18). The kernel reports
the end of the sync by an eventfd that the event loop watches. A thread would have to wake, take the
interpreter's lock and wake the loop again, which takes as long as the sync of a fast disk. A thread
is used only on other systems, or if the kernel or the file system does not support such requests.

Source: linux/aio_abi.h for the structures, io_submit(2) for the calls.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tailrace.ledger.sqlite.disk.work_thread import WorkThread

_CALLS = {  # system call numbers of io_setup, io_destroy, io_getevents and io_submit
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
    "riscv64": (0, 1, 4, 2),
}
_FDSYNC = 3  # IOCB_CMD_FDSYNC: the request is an fdatasync
_RESFD = 1  # IOCB_FLAG_RESFD: the kernel reports the end through an eventfd
# Linux's struct iocb, which is a request, with these fields: data, key, rw_flags, opcode, priority,
# fd, buffer, bytes, offset, reserved, flags, resfd.
_IOCB = struct.Struct("<QIIHhIQQqQII")
# Linux's struct io_event, which is a result, with the fields data, iocb, result, result2.
_EVENT = struct.Struct("<QQqq")

Failed = Callable[[OSError], Exception]
"""Type of functions that convert the OSError of a failed sync into the error for its waiters."""


class DiskSync(Protocol):
    """Syncs one file, so that earlier writes survive a power cut."""

    def begin(self) -> asyncio.Future[None]:
        """Return a future that is done when the file is synced; a `Failed` converts its error."""

    async def close(self) -> None: ...


SyncOf = Callable[[Path, WorkThread, Failed], DiskSync]
"""Type of the function `sync_of`, and of functions that replace it for simulated disks."""


def sync_of(path: Path, thread: WorkThread, failed: Failed) -> DiskSync:
    """Return the quickest way to sync the file at `path`, which must not be replaced.

    Raises OSError if there is no such file.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        return KernelSync(descriptor, failed)
    except OSError:
        return ThreadSync(descriptor, thread, failed)


class ThreadSync:
    """Syncs a file by `os.fdatasync` in a thread. `close` also closes the descriptor."""

    def __init__(self, descriptor: int, thread: WorkThread, failed: Failed) -> None:
        self._descriptor = descriptor
        self._thread = thread
        self._failed = failed

    def begin(self) -> asyncio.Future[None]:
        return self._thread.run(self._sync)

    async def close(self) -> None:
        await self._thread.run(lambda: os.close(self._descriptor))

    def _sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise self._failed(error) from error


class KernelSync:
    """Syncs a file by Linux AIO; the constructor raises OSError if that is not supported.

    `close` also closes the descriptor.
    """

    def __init__(self, descriptor: int, failed: Failed) -> None:
        self._descriptor = descriptor
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._event = ctypes.create_string_buffer(_EVENT.size)
        self._queue = _Queue()
        try:
            self._ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except BaseException:
            self._queue.close()
            raise
        request = _IOCB.pack(0, 0, 0, _FDSYNC, 0, descriptor, 0, 0, 0, 0, _RESFD, self._ended)
        self._request = ctypes.create_string_buffer(request, _IOCB.size)
        self._requests = (ctypes.c_void_p * 1)(ctypes.addressof(self._request))
        try:
            self._probe()
            self._loop.add_reader(self._ended, self._end)
        except BaseException:
            self._close_queue()
            raise

    def begin(self) -> asyncio.Future[None]:
        assert self._waiting is None, "one sync at a time"
        waiting = self._waiting = self._loop.create_future()
        try:
            self._queue.submit(self._requests)
        except OSError as error:
            self._waiting = None
            waiting.set_exception(self._failed(error))
        return waiting

    async def close(self) -> None:
        if self._waiting is not None:
            await asyncio.wait([self._waiting])
        self._loop.remove_reader(self._ended)
        self._close_queue()
        os.close(self._descriptor)

    def _probe(self) -> None:
        """Run one sync as a test, because not every file system supports AIO syncs."""
        self._queue.submit(self._requests)
        self._result(at_least=1)
        os.eventfd_read(self._ended)

    def _end(self) -> None:
        os.eventfd_read(self._ended)
        waiting, self._waiting = self._waiting, None
        try:
            self._result(at_least=0)
        except OSError as error:
            if waiting is not None and not waiting.done():
                waiting.set_exception(self._failed(error))
            return
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _result(self, at_least: int) -> None:
        if self._queue.events(at_least, self._event) != 1:
            raise OSError(errno.EIO, "a sync ended without a result")
        *_, result, _ = _EVENT.unpack(self._event)
        if result < 0:
            raise OSError(-result, os.strerror(-result))

    def _close_queue(self) -> None:
        self._queue.close()
        os.close(self._ended)


class _Queue:
    """A Linux AIO context (io_setup(2)) for one request. glibc does not wrap these system calls."""

    def __init__(self) -> None:
        numbers = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
        if numbers is None or sys.byteorder != "little":
            raise OSError(errno.ENOSYS, "no io_submit here")
        self._setup, self._destroy, self._getevents, self._submit = map(ctypes.c_long, numbers)
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        context = ctypes.c_ulong(0)
        self._checked(self._call(self._setup, ctypes.c_uint(1), ctypes.byref(context)))
        self._context = context
        self._one = ctypes.c_long(1)

    def submit(self, requests: ctypes.Array[ctypes.c_void_p]) -> None:
        self._checked(self._call(self._submit, self._context, self._one, requests))

    def events(self, at_least: int, event: ctypes.Array[ctypes.c_char]) -> int:
        """Wait for `at_least` (0 or 1) completed requests; return how many completed (0 or 1)."""
        wanted = ctypes.c_long(at_least)
        got = self._call(self._getevents, self._context, wanted, self._one, event, None)
        return self._checked(got)

    def close(self) -> None:
        """Destroy the context. The system call waits for requests in progress."""
        self._call(self._destroy, self._context)

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

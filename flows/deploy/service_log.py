# SPDX-License-Identifier: Apache-2.0
"""Writes what comes in to a file that does not grow for ever: `python service_log.py FILE BYTES` at a pipe's end.

The file and the one before it, FILE.1, have at most BYTES each, to a line. It ends when everyone has closed the pipe,
and not before: a pipe that nobody reads ends whoever writes into it, as Prefect's worker, and its flow runs with it.
What cannot be written, as on a full disk, is dropped, and the file says how much once it can be written again.
"""

import os
import sys
from contextlib import suppress
from typing import BinaryIO


class Log:
    """The file, which is opened again after an error: whoever made room may have put another one there."""

    def __init__(self, file: str, largest: int):
        self._file, self._largest, self._dropped = file, largest, 0
        self._log: BinaryIO | None = None

    def add(self, line: bytes) -> None:
        """Write a line, or count it as dropped."""
        try:
            if self._dropped:
                self._write(b"[%d lines could not be written and are left out here]\n" % self._dropped)
                self._dropped = 0
            self._write(line)
        except OSError:
            self._dropped += 1
            with suppress(OSError):
                self.close()

    def _write(self, line: bytes) -> None:
        """Raises OSError."""
        log = self._log = self._log or self._open()
        if log.tell() and log.tell() + len(line) > self._largest:
            self.close()
            os.replace(self._file, f"{self._file}.1")
            log = self._log = self._open()
        while line:  # a disk that is nearly full takes a part of it
            line = line[log.write(line) :]

    def _open(self) -> BinaryIO:
        return open(self._file, "ab", buffering=0)

    def close(self) -> None:
        """Until the next line."""
        log, self._log = self._log, None
        if log is not None:
            log.close()


def write(lines: BinaryIO, file: str, largest: int) -> None:
    """Copy lines to the file as they come."""
    log = Log(file, largest)
    for line in iter(lambda: lines.readline(1 << 16), b""):
        log.add(line)


if __name__ == "__main__":
    write(sys.stdin.buffer, sys.argv[1], int(sys.argv[2]))

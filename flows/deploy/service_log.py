# SPDX-License-Identifier: Apache-2.0
"""Writes what comes in to a file that does not grow for ever: `python service_log.py FILE BYTES` at a pipe's end.

The file and the one before it, FILE.1, have at most BYTES each, to a line. It ends when everyone has closed the pipe.
"""

import os
import sys
from typing import BinaryIO


def write(lines: BinaryIO, file: str, largest: int) -> None:
    """Copy lines to the file as they come."""
    log = open(file, "ab", buffering=0)  # noqa: SIM115  it changes within the loop
    for line in iter(lambda: lines.readline(1 << 16), b""):
        if log.tell() and log.tell() + len(line) > largest:
            log.close()
            os.replace(file, f"{file}.1")
            log = open(file, "ab", buffering=0)  # noqa: SIM115
        log.write(line)
    log.close()


if __name__ == "__main__":
    write(sys.stdin.buffer, sys.argv[1], int(sys.argv[2]))

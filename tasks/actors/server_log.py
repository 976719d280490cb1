# SPDX-License-Identifier: Apache-2.0
"""What a server below an actor writes, and what of it belongs into an error."""

import fcntl
import os
import re
import sys
import tempfile

READ_BYTES = 2**20
"""At most, of the log's end: a server that lived for days has a line a request."""
MOST_BYTES = 64 * READ_BYTES
"""Of the log, before all but its end goes: a file without a name fills the disk where `du` does not show it."""
SHOWN_ERRORS, SHOWN_LINES, LINES_AFTER_ERRORS, SHOWN_CHARACTERS = 4, 15, 2, 400
EXCEPTION = re.compile(r"(?:^|[\])] )([A-Za-z_][\w.]*(?:Error|Exception): .+)$")
"""A traceback's last line, also behind a logger's prefixes: `(EngineCore pid=7) ERROR 11-26 17:15 [core.py:3] `."""


class ServerLog:
    """A file without a name, so that whoever is killed, nothing of it stays.

    Attributes:
        descriptor: for the server's output.
    """

    def __init__(self, secret: str):
        self._secret = secret
        self.descriptor, path = tempfile.mkstemp()
        os.unlink(path)
        # Whoever has this descriptor writes at the end then, wherever that is once the file was cut.
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, os.O_APPEND | fcntl.fcntl(self.descriptor, fcntl.F_GETFL))

    def clear(self) -> None:
        """For the next server."""
        os.truncate(self.descriptor, 0)

    def trim(self) -> None:
        """Keep the end of a log that has grown long; a line that the server writes at that moment may be lost."""
        if os.fstat(self.descriptor).st_size > MOST_BYTES:
            end = self._end()
            os.truncate(self.descriptor, 0)
            os.write(self.descriptor, end)

    def reason(self) -> str:
        """Its last exceptions, in their order, and its last lines.

        A server of several processes ends with the traceback of the one that waited; what went wrong stands further up,
        in that of the one that failed.
        """
        lines = [line.strip()[:SHOWN_CHARACTERS] for line in self._text().splitlines() if line.strip()]
        errors = [*dict.fromkeys(found[1] for line in lines if (found := EXCEPTION.search(line)))][-SHOWN_ERRORS:]
        last = lines[-LINES_AFTER_ERRORS if errors else -SHOWN_LINES :]
        named = f"the errors in its log: {' | '.join(errors)}; " if errors else ""
        return f"{named}the end of its log: {' | '.join(last) or 'empty'}"

    def keep(self) -> None:
        """Write it to this process' own log, which Ray keeps where a run ends with an error."""
        print(f"--- what the server wrote ---\n{self._text()}\n---", file=sys.stderr, flush=True)

    def _text(self) -> str:
        """Its end, without the secret."""
        return self._end().decode(errors="replace").replace(self._secret, "***")

    def _end(self) -> bytes:
        size = os.fstat(self.descriptor).st_size
        return os.pread(self.descriptor, READ_BYTES, max(0, size - READ_BYTES))

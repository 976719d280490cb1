# SPDX-License-Identifier: Apache-2.0
"""What a server below an actor writes, and what of it belongs into an error."""

import os
import re
import sys
import tempfile

READ_BYTES = 2**20
"""At most, of the log's end: a server that lived for days has a line a request."""
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

    def clear(self) -> None:
        """For the next server."""
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        os.truncate(self.descriptor, 0)

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
        size = os.fstat(self.descriptor).st_size
        last = os.pread(self.descriptor, READ_BYTES, max(0, size - READ_BYTES)).decode(errors="replace")
        return last.replace(self._secret, "***")

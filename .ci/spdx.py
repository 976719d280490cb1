# SPDX-License-Identifier: Apache-2.0
"""Write the licence's line into every tracked Python file that lacks it, after a shebang: `python .ci/spdx.py`."""

import subprocess
from pathlib import Path

LINE = "# SPDX-License-Identifier: Apache-2.0\n"


def with_line(text: str) -> str:
    """The text with the line first, or second after a shebang."""
    shebang, body = text.split("\n", 1) if text.startswith("#!") else ("", text)
    if body.startswith(LINE):
        return text
    return (f"{shebang}\n" if shebang else "") + LINE + body


def main() -> None:
    """All tracked Python files."""
    for name in subprocess.run(["git", "ls-files", "*.py"], check=True, capture_output=True, text=True).stdout.split():
        file = Path(name)
        text = file.read_text()
        if with_line(text) != text:
            file.write_text(with_line(text))


if __name__ == "__main__":
    main()

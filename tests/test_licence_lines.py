# SPDX-License-Identifier: Apache-2.0
"""Every Python file names its licence."""

import subprocess
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
LINE = "# SPDX-License-Identifier: Apache-2.0"


def test_every_python_file_names_its_licence() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = listed.split()
    assert files
    lacking = [name for name in files if LINE not in (ROOT / name).read_text().splitlines()[:2]]
    assert lacking == [], f"add {LINE!r} as the first line: python .ci/spdx.py does it"

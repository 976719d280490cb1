"""A run's record leads back to its code: the commit and the patch give the files that ran."""

import subprocess
from pathlib import Path

import pytest

from tasks.lineage import LARGEST_UNTRACKED, dvc_hashes, lineage


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / ".gitignore").write_text("ignored\n")
    (folder / "code.py").write_text("a = 1\n")
    (folder / "picture").write_bytes(bytes(range(256)))
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def test_commit_and_patch_give_back_the_files_that_ran(repository: Path, tmp_path: Path) -> None:
    """Changed, deleted, new, staged and binary files; the repository itself is left as it was."""
    (repository / "code.py").write_text("a = 2\n")
    (repository / "picture").write_bytes(bytes(reversed(range(256))))
    (repository / "new.py").write_text("b = 'ü'\n")
    (repository / "ignored").write_text("secret")
    before = git(repository, "status", "--porcelain")
    record = lineage([], repository)
    assert git(repository, "status", "--porcelain") == before
    assert record.tags["doubleflow.git_dirty"] == "true"

    copy, patch = tmp_path / "copy", tmp_path / "code.patch"
    git(tmp_path, "clone", "--quiet", str(repository), str(copy))
    git(copy, "checkout", "--quiet", record.tags["mlflow.source.git.commit"])
    patch.write_bytes(record.patch)
    git(copy, "apply", str(patch))
    for name in ("code.py", "picture", "new.py"):
        assert (copy / name).read_bytes() == (repository / name).read_bytes()
    assert not (copy / "ignored").exists()


def test_a_clean_repository_has_no_patch_and_large_new_files_are_only_named(repository: Path) -> None:
    assert lineage([], repository).patch == b""
    assert lineage([], repository).tags["doubleflow.git_dirty"] == "false"
    (repository / "video").write_bytes(bytes(LARGEST_UNTRACKED + 1))
    record = lineage([], repository)
    assert record.patch == b""
    assert record.environment["untracked_left_out"] == ["video"]
    assert record.tags["doubleflow.git_dirty"] == "true"


def test_only_the_data_that_a_run_reads_is_its_input(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    outs = [{"path": "data/model", "md5": "aa.dir"}, {"path": "data/other", "md5": "bb"}]
    (tmp_path / "dvc.lock").write_text(str({"stages": {"one": {"outs": outs}}}))
    (tmp_path / "data/prompts.parquet.dvc").write_text(str({"outs": [{"path": "prompts.parquet", "md5": "cc"}]}))
    assert dvc_hashes(tmp_path) == {"data/model": "aa.dir", "data/other": "bb", "data/prompts.parquet": "cc"}
    monkeypatch.chdir(tmp_path)
    inputs = lineage([Path("data/prompts.parquet"), Path("data/model/part")], repository).datasets
    assert {(item.dataset.name, item.dataset.digest) for item in inputs} == {
        ("data/model", "aa.dir"),
        ("data/prompts.parquet", "cc"),
    }
    assert lineage([], tmp_path).tags == {}  # no repository

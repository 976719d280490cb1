# SPDX-License-Identifier: Apache-2.0
"""A run's record leads back to its code: the commit and the patch give the files that ran."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from tasks.records.code_difference import LARGEST_UNTRACKED
from tasks.records.lineage import Start, dvc_hashes, lineage, other_packages


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
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


def test_packages_of_another_version_than_the_run_s_are_told(repository: Path) -> None:
    """By them its numbers may come out otherwise."""
    then = lineage([], repository).environment
    assert other_packages(then) == ""
    installed, python = then["packages"]["torch"], then["python"]
    changed = {"python": "3.4.0", "packages": then["packages"] | {"torch": "0.4", "left-pad": "1.0"}}
    told = {
        f"python was 3.4.0 and is {python}",
        f"torch was 0.4 and is {installed}",
        "left-pad was 1.0 and is not there",
    }
    assert {*other_packages(changed).split(", ")} == told
    many = {"packages": {f"gone-{number}": "1" for number in range(20)}}
    assert other_packages(many).endswith("gone-7 was 1 and is not there and 12 more")


def test_a_clean_repository_has_no_patch_and_large_new_files_are_only_named(repository: Path) -> None:
    assert lineage([], repository).patch == b""
    assert lineage([], repository).tags["doubleflow.git_dirty"] == "false"
    (repository / "video").write_bytes(bytes(LARGEST_UNTRACKED + 1))
    record = lineage([], repository)
    assert record.patch == b""
    assert list(record.environment["untracked_left_out"]) == ["video"]
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


def test_a_pipeline_below_the_data_has_its_outputs_where_its_stages_work(tmp_path: Path) -> None:
    """A `wdir` of its own, the folder of its dvc.yaml, and that of a stage for each of several."""
    (tmp_path / "data/mine").mkdir(parents=True)
    stages = {"up": {"wdir": "../.."}, "here": {}, "each": {"foreach": ["a"], "do": {"wdir": ".."}}}
    (tmp_path / "data/mine/dvc.yaml").write_text(str({"stages": stages}))
    made = {"up": "data/mine/model", "here": "prompts.parquet", "each@a": "other"}
    locked = {name: {"outs": [{"path": path, "md5": f"of-{name[:2]}"}]} for name, path in made.items()}
    (tmp_path / "data/mine/dvc.lock").write_text(str({"stages": locked}))
    assert dvc_hashes(tmp_path) == {
        "data/mine/model": "of-up",
        "data/mine/prompts.parquet": "of-he",
        "data/other": "of-ea",
    }


KEY = "sk-" + "plantedplantedplanted0123"
PRIVATE = "-----BEGIN OPENSSH PRIVATE" + " KEY-----\nplanted\n"


def test_a_staged_new_file_is_in_the_patch(repository: Path) -> None:
    (repository / "staged.py").write_text("c = 1\n")
    git(repository, "add", "staged.py")
    record = lineage([], repository)
    assert b"+c = 1" in record.patch
    assert git(repository, "status", "--porcelain") == "A  staged.py"


def test_a_planted_key_never_reaches_the_patch(repository: Path) -> None:
    """In every place where people keep one: files called so, key files, notebooks, folders, and inside of code."""
    new = {
        ".env": f"OPENAI_API_KEY={KEY}",
        "sub/.env.local": KEY,
        ".envrc": KEY,
        "id_rsa": PRIVATE,
        "id_ed25519.old": PRIVATE,
        "server.pem": PRIVATE,
        "tls.KEY": PRIVATE,
        ".netrc": f"machine h login u password {KEY}",
        "gcp_Credentials.json": KEY,
        "client_secret.json": KEY,
        "hub_token.txt": KEY,
        ".aws/config": KEY,
        "look.ipynb": KEY,
        "run.log": KEY,
        "venv/lib/site.py": KEY,
        "notes.txt": f"the key is {KEY}",
        "deep/er/plain.py": f'password = "{KEY[3:]}"',
        "settings.yaml": f"url: postgresql://me:{KEY}@host/db",
        "fetch.py": 'headers = {"Authorization": "Bearer hf_' + "a" * 34 + '"}',
    }
    for name, content in new.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(content)
    (repository / "good.py").write_text("max_tokens = 5\ntokenizer = 'a'\napi_key_env = 'JUDGE_KEY'\n")
    record = lineage([], repository)
    assert b"planted" not in record.patch
    assert b"hf_a" not in record.patch
    assert record.environment["untracked_left_out"].keys() == new.keys()
    assert b"max_tokens = 5" in record.patch, "what is none goes along"


def test_a_key_in_a_committed_file_never_reaches_the_patch(repository: Path) -> None:
    (repository / "deploy.env").write_text("A=1\n")
    (repository / "secrets.py").write_text("names = 1\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "second")
    (repository / "deploy.env").write_text(f"A={KEY}\n")
    (repository / "code.py").write_text(f"a = 1\nclient = Client({KEY!r})\n")
    (repository / "secrets.py").write_text("names = 2\n")
    record = lineage([], repository)
    assert b"planted" not in record.patch
    assert record.environment["tracked_left_out"].keys() == {"deploy.env", "code.py"}
    assert b"+names = 2" in record.patch
    assert record.tags["doubleflow.git_dirty"] == "true"


def test_names_and_repositories_that_git_stumbles_over_stop_no_start(repository: Path, tmp_path: Path) -> None:
    """A name that is no UTF-8, names that are patterns, nested repositories, and a file that cannot be read."""
    Path(os.fsdecode(os.fsencode(repository) + b"/caf\xe9.py")).write_text("d = 1\n")
    (repository / "*.py").write_text("e = 1\n")
    (repository / ":(exclude)x").write_text("f = 1\n")
    for nested in ("empty", "whole"):
        (repository / nested).mkdir()
        git(repository / nested, "init", "--quiet")
    git(repository / "whole", "commit", "--quiet", "--allow-empty", "-m", "theirs")
    record = lineage([], repository)
    assert record.environment["untracked_left_out"].keys() == {"empty/", "whole/"}
    copy, patch = tmp_path / "copy", tmp_path / "code.patch"
    git(tmp_path, "clone", "--quiet", str(repository), str(copy))
    patch.write_bytes(record.patch)
    git(copy, "apply", str(patch))
    names = {name for name in os.listdir(os.fsencode(copy)) if name != b".git"}
    assert names == {b".gitignore", b"code.py", b"picture", b"caf\xe9.py", b"*.py", b":(exclude)x"}


def test_more_names_than_a_command_line_holds(repository: Path) -> None:
    """Paths of 3000 characters, so that 900 files are enough for two MiB of names."""
    deep = Path(*["d" * 240] * 12)
    (repository / deep).mkdir(parents=True)
    names = [deep / f"{number}.py" for number in range(900)]
    for name in names:
        (repository / name).touch()
    assert sum(len(str(name)) for name in names) > 2**21
    record = lineage([], repository)
    assert not record.environment["untracked_left_out"]
    assert record.patch.count(b"\nnew file mode") + record.patch.startswith(b"diff") >= len(names)


def test_the_sum_has_a_cap_and_what_is_beyond_it_is_named(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.records.code_difference.LARGEST_SUM", 5000)
    (repository / "code.py").write_text("a" * 2000)
    for name, size in (("large", 4000), ("small", 2500)):
        (repository / name).write_bytes(b"z" * size)
    record = lineage([], repository)
    assert record.environment["untracked_left_out"].keys() == {"large"}
    assert not record.environment["tracked_left_out"]
    assert b"+++ b/small" in record.patch


def test_each_start_has_a_tag_with_its_commit_and_the_digest_of_its_patch(repository: Path) -> None:
    (repository / "code.py").write_text("a = 2\n")
    record = lineage([], repository)
    digest = hashlib.sha256(record.patch).hexdigest()
    assert record.start_tag(Start(7)) == {
        "doubleflow.lineage.000007": f"{git(repository, 'rev-parse', 'HEAD')} sha256:{digest}"
    }
    assert lineage([], repository.parent).start_tag(Start(0)) == {}


def test_starts_sort_as_they_were_and_are_read_from_their_names() -> None:
    starts = [Start(0), Start(0, 2), Start(10), Start(10, 2), Start(10, 10), Start(11), Start(1_000_000)]
    names = [str(start) for start in starts]
    assert names[2:5] == ["000010", "000010-2", "000010-10"]
    assert [Start.parsed(name) for name in names] == starts
    by_name = sorted(starts, key=str)
    assert sorted(by_name) == starts != by_name
    assert {Start.parsed(name) for name in ("", "x", "10", "000010-", "000010-2/x")} == {None}

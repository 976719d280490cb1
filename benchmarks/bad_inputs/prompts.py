# SPDX-License-Identifier: Apache-2.0
"""Prompt files, through the prompt table and back."""

import io
import json
import random
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bad_inputs.cases import Case, damaged, draws
from tasks.data.prompts import Prompt, build_prompt_table, load_prompts

PROMPTS = "prompt files, through the table and back"
TEXTS = ("a red cup", "a sign that says “open”", "日本の猫", "two dogs 🐕‍🦺", "שלום", "the number 472", "naïve café")
LONGEST = 20_000
ODD_TEXTS = (
    *(
        "a\0b",
        "\x1b[31mred",
        "a\u202egnp.exe",
        "\u200b",
        "\u200b\u200d",
        "\ufeffa",
        "a\ufeffb",
        "a\rb",
        "\r",
        "\x7f",
        "\x85a",
    ),
    *("x" * 30_000_000, "\u2066a", "\u0301", "\u00a0", "\u3000", "\v", "\f", "a\u2028b", "a\u2029b", "\x1ca", "\x08"),
)
ODD_LINES = (
    *(
        '{"prompt": "a", "prompt": "b"}',
        '{"prompt": "a", "x": NaN}',
        '{"prompt": "a", "x": Infinity}',
        '{"prompt": "\\ud800"}',
    ),
    *(
        '{"prompt": "a", "x": ' + "[" * 100_000,
        '{"prompt": "a", "x": ' + "9" * 5000 + "}",
        '{"prompt": "a", "x": 1e999}',
    ),
    *(
        '{"prompt": 1}',
        '{"prompt": null}',
        '{"prompt": ["a"]}',
        "[]",
        "null",
        "1",
        '"a"',
        "{}",
        '{"Prompt": "a"}',
        "{prompt: a}",
    ),
    *('{"prompt": "a", "uid": "a/b"}', '{"prompt": "a", "uid": "__metadata__"}', '{"prompt": "a", "uid": "negative"}'),
    *(
        '{"prompt": "a", "uid": ""}',
        '{"prompt": "a", "uid": 5}',
        '{"prompt": "a", "uid": "../x"}',
        '{"prompt": "a", "uid": "\\u0000"}',
    ),
    *('{"prompt": "a", "split": "Train"}', '{"prompt": "a", "split": ["test"]}', '{"prompt": "a", "target": 7}'),
    *('{"prompt": "a", "target": "\\u0000"}', '{"prompt": "a", "x": "\\udfff"}', '{"prompt": "a", "\\ud800": 1}'),
    *(
        '{"prompt": "a", "x": ' + "[" * 900 + "]" * 900 + "}",
        '{"prompt": "a"} {"prompt": "b"}',
        '{"prompt": "a",}',
        "{'prompt': 'a'}",
    ),
    *(
        '{"prompt": "a", "x": {"y": 1, "y": 2}}',
        '{"prompt": "a\\u0000b"}',
        '{"prompt": "\\u200b"}',
        '{"prompt": "a", "x": -0.0}',
    ),
)
ODD_COLUMNS: tuple[tuple[str, Any], ...] = (
    *(
        ("prompt", pa.array([1, 2, 3])),
        ("prompt", pa.array([b"a", b"\xff", b"c"])),
        ("prompt", pa.array([["a"], ["b"], ["c"]])),
    ),
    *(
        ("prompt", pa.array([None, "b", "c"])),
        ("prompt", pa.array(["a", "b", "c"]).dictionary_encode()),
        ("Prompt", pa.array(["a", "b", "c"])),
    ),
    *(
        ("uid", pa.array([1, 2, 3])),
        ("uid", pa.array(["a/b", "c", "d"])),
        ("uid", pa.array(["a", "a", "b"])),
        ("split", pa.array(["x", "y", "z"])),
    ),
    *(
        ("target", pa.array([1.5, None, 2])),
        ("x", pa.array([float("nan"), 1.0, float("inf")])),
        ("x", pa.array([b"\0", b"\1", None])),
    ),
    *(("x", pa.array([datetime(2020, 1, 1)] * 3)), ("x", pa.array([0, 1, 2], pa.timestamp("us", "No/Where")))),
    *(
        ("x", pa.array([Decimal("1.5")] * 3)),
        ("x", pa.array([2**63 - 1] * 3, pa.timestamp("ns"))),
        ("x", pa.array([2**62] * 3, pa.duration("s"))),
    ),
    *(
        ("x", pa.array([2**40] * 3, pa.date64())),
        ("x", pa.array([{"a": [1]}, None, {"a": []}])),
        ("x", pa.array([[("k", 1)]] * 3, pa.map_(pa.string(), pa.int64()))),
    ),
    *(
        ("x", pa.array([None] * 3)),
        ("metadata", pa.array(["{}", "x", None])),
        ("", pa.array([1, 2, 3])),
        ("x", pa.array([3e38] * 3, pa.float32())),
    ),
)


def prompt_files(seed: int) -> list[Case]:
    """Damaged files of the three kinds, and whole ones with contents that no one can have meant."""
    cases = [_damage_case(number, seed) for number in range(150)]
    cases += [
        _whole_case(f"txt line {text[:20]!r}", "p.txt", f"a cat\n{text}\na dog\n".encode("utf-8", "surrogatepass"))
        for text in ODD_TEXTS
    ]
    cases += [
        _whole_case(f"jsonl {line[:60]}", "p.jsonl", f'{{"prompt": "a cat"}}\n{line}\n'.encode()) for line in ODD_LINES
    ]
    cases += [
        _whole_case(f"parquet {name} {column.type}", "p.parquet", _with_column(name, column))
        for name, column in ODD_COLUMNS
    ]
    for name, content in _odd_files():
        cases.append(_whole_case(f"{name} {content[:20]!r}", name, content))
    return cases


def _odd_files() -> list[tuple[str, bytes]]:
    text = "\n".join(TEXTS)
    files = [("p.txt", text.encode(code, "ignore")) for code in ("utf-16", "utf-32", "utf-16-le", "shift_jis", "cp037")]
    files += [
        ("p.txt", b"old\rmac\rlines"),
        ("p.txt", b"\xef\xbb\xbf" * 2 + b"a\nb"),
        ("p.txt", b"a\r\nb\r\n"),
        ("p.txt", b"\n\n\n"),
    ]
    files += [
        ("p.txt", b"a\n\nb"),
        ("p.txt", b"a\na\nb"),
        ("p.txt", bytes(range(128))),
        ("p.txt", b"\x7fELF\x02\x01" + bytes(60)),
    ]
    files += [
        ("p.txt", b"%PDF-1.4\n1 0 obj\n\x01\x02"),
        ("p.jsonl", b"[" * 200_000),
        ("p.jsonl", b'{"prompt": "a"}\r{"prompt": "b"}'),
    ]
    files += [
        ("p.parquet", b"PAR1" + bytes(20) + b"PAR1"),
        ("p.parquet", b"PAR1PAR1"),
        ("p.csv", b"prompt\na"),
        ("p.TXT", b"a\nb"),
    ]
    return files


def _with_column(name: str, column: pa.Array) -> bytes:
    columns = {"prompt": pa.array(["a cat", "a dog", "a cow"])} | {name: column}
    return _parquet(pa.table(columns))


def _parquet(table: pa.Table) -> bytes:
    """With checksums: without them a page's flipped bit is another text that nobody knows from the right one."""
    stream = io.BytesIO()
    pq.write_table(table, stream, write_page_checksum=True, compression="NONE")
    return stream.getvalue()


def _damage_case(number: int, seed: int) -> Case:
    rng = draws(PROMPTS, number, seed)
    kind = ("p.txt", "p.jsonl", "p.parquet")[number % 3]
    whole = _whole_file(kind)
    what, content = damaged(whole, rng)
    if kind == "p.txt" and rng.random() < 0.3:
        content, what = _swapped_text(whole, rng), "an odd character"
    expected = _rows_of(kind, whole) if kind == "p.parquet" else None
    return _whole_case(f"#{number} {kind} {what}", kind, content, expected)


def _swapped_text(whole: bytes, rng: random.Random) -> bytes:
    text = whole.decode()
    place = rng.randrange(len(text))
    return (
        text[:place] + rng.choice(["\0", "\x1b", "\u202e", "\r", "\ufeff", "\u200b", "\x85", "é"]) + text[place:]
    ).encode()


def _whole_file(kind: str) -> bytes:
    rows = [
        {"prompt": text, "target": f"t{number}", "level": number, "tags": ["x", "y"]}
        for number, text in enumerate(TEXTS)
    ]
    if kind == "p.txt":
        return "".join(f"{text}\n" for text in TEXTS).encode()
    if kind == "p.jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    return _parquet(pa.Table.from_pylist(rows))


def _whole_case(name: str, file: str, content: bytes, expected: list[dict[str, Any]] | None = None) -> Case:
    """The oracle reads the file again by itself; of a damaged parquet file it knows what was written."""

    def act(folder: Path) -> list[Prompt]:
        table = build_prompt_table([str(folder / file)], n_test=1, n_train=None, seed=0, target_pattern=None)
        table.to_parquet(folder / "table.parquet", index=False)
        return load_prompts(folder / "table.parquet")

    def fault(taken: list[Prompt]) -> str | None:
        try:
            rows = _rows_of(file, content) if expected is None else expected
        except ValueError as error:
            return f"the file cannot be read: {error}"
        return fault_of_rows(taken, rows)

    return Case(PROMPTS, name, lambda folder: _write(folder / file, content), act, fault)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _rows_of(file: str, content: bytes) -> list[dict[str, Any]]:
    """What is in a file. Raises ValueError where that is not clear."""
    if file.endswith(".parquet"):
        return pq.read_table(io.BytesIO(content)).to_pylist()
    lines = content.decode("utf-8-sig").split("\n")
    while lines and not lines[-1].strip(" \t\r"):
        lines.pop()
    if file.endswith(".txt"):
        return [{"prompt": line} for line in lines]
    return [json.loads(line, object_pairs_hook=_once, parse_constant=_no_number) for line in lines]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def fault_of_rows(taken: list[Prompt], rows: list[dict[str, Any]]) -> str | None:
    wanted: list[tuple[str, str | None, dict[str, Any]]] = []
    for row in rows:
        if not isinstance(row.get("prompt"), str):
            return f"a row without a prompt: {row!r:.100}"
        rest = {name: value for name, value in row.items() if name not in ("prompt", "uid", "target", "split")}
        one = (row["prompt"].strip(), row.get("target"), rest)
        wanted += [one] if one not in wanted else []
    found = [(prompt.prompt, prompt.target, prompt.metadata) for prompt in taken]
    if json.dumps(found, sort_keys=True) != json.dumps(wanted, sort_keys=True, default=repr):
        return f"read as {found!r:.150}, written as {wanted!r:.150}"
    for prompt in taken:
        fault = next(filter(None, (_fault_of_text(text) for text in (prompt.prompt, prompt.target or "x"))), None)
        if fault:
            return f"{prompt.prompt!r:.60}: {fault}"
    return None


def _fault_of_text(text: str) -> str | None:
    """What no one writes and nobody sees, by the numbers of the characters."""
    for character in text:
        number = ord(character)
        if (number < 32 and character not in "\t\n") or 0x7F <= number < 0xA0 or 0xD800 <= number < 0xE000:
            return f"U+{number:04X}"
        if number == 0xFEFF or 0x202A <= number <= 0x202E or 0x2066 <= number <= 0x2069:
            return f"U+{number:04X}"
    if len(text) > LONGEST:
        return f"{len(text)} characters"
    return None if any(character.isalnum() or 0x20 < ord(character) < 0x7F for character in text) else "nothing to see"


def whole() -> list[Case]:
    """The three kinds, undamaged."""
    return [_whole_case(f"whole {kind}", kind, _whole_file(kind)) for kind in ("p.txt", "p.jsonl", "p.parquet")]

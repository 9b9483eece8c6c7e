"""[run]: what it takes, and how secrets are looked up."""

from __future__ import annotations

from pathlib import Path

import pytest

from onejob.core.job import parse_job
from onejob.core.spec import counted
from onejob.errors import JobFileError
from onejob.runs.spec import RunSpec, Secret, secret_values


def mistakes(lines: str) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        parse_job(f"name = 'x'\n[run]\n{lines}", {}, RunSpec)
    return caught.value.mistakes


def test_only_seed_and_plain_variables_count() -> None:
    spec = RunSpec(
        executor="slurm", seed=7, secrets={"TOKEN": Secret(env="MINE")}, env={"MODE": "fast"}, warnings="error"
    )
    assert counted(spec) == {"seed": 7, "env": {"MODE": "fast"}}


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ("secrets = { A = {} }", "secrets.A: give one of 'env' (a variable's name) and 'file' (a path)"),
        ("secrets = { A = { env = 'X', file = 'y' } }", "secrets.A: give one of 'env' (a variable's name) and 'file'"),
        ("secrets = { A = 'hunter2' }", "secrets.A: 'hunter2' is not a table"),
        ("secrets = { A = { env = 's3cret!' } }", "secrets.A: 'env' is the name of an environment variable, not"),
        ("secrets = { 'A B' = { env = 'X' } }", "secrets: not the name of an environment variable: 'A B'"),
        ("env = { '1' = 'x' }", "env: not the name of an environment variable: '1'"),
        ("env = { A = 1 }", "env.A: 1 is not text (in quotes)"),
        ("env = { A = 'x' }\nsecrets = { A = { env = 'X' } }", ": in 'env' and in 'secrets': A; a variable has"),
        ("seed = -1", "seed: -1 must be at least 0"),
        ("seed = 9223372036854775808", "seed: 9223372036854775808 must be less than 9223372036854775808"),
        ("warnings = 'errors'", "warnings: 'errors' is not 'warn' or 'error'. Did you mean 'error'?"),
    ],
)  # fmt: skip
def test_mistakes(lines: str, line: str) -> None:
    (found,) = mistakes(lines)
    assert found.startswith("job.toml [run]" + (line if line.startswith(":") else f" {line}"))


def test_secrets_come_from_variables_and_files(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "token").write_text("one\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "key").write_text("two\nlines\r\n")
    spec = RunSpec(
        secrets={
            "A": Secret(env="MINE"),
            "B": Secret(file="token"),
            "C": Secret(file="~/key"),
            "D": Secret(file=str(tmp_path / "project" / "token")),
        }
    )
    environ = {"MINE": "hunter2", "HOME": str(tmp_path / "home"), "B": "not this one"}
    assert secret_values(spec, tmp_path / "project", environ) == {
        "A": "hunter2",
        "B": "one",
        "C": "two\nlines",
        "D": "one",
    }
    assert "hunter2" not in spec.model_dump_json()


def test_secrets_that_are_not_there_are_told_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "zero").write_bytes(b"a\0b")
    spec = RunSpec(
        secrets={
            "OK": Secret(env="GOOD"),
            "A": Secret(env="UNSET"),
            "B": Secret(env="EMPTY"),
            "C": Secret(file="gone"),
            "D": Secret(file="empty"),
            "E": Secret(file="binary"),
            "F": Secret(file="."),
            "G": Secret(file="zero"),
        }
    )
    with pytest.raises(JobFileError) as caught:
        secret_values(spec, tmp_path, {"GOOD": "hunter2", "EMPTY": ""})
    assert caught.value.mistakes == [
        "[run] secrets.A: the environment variable UNSET is not set. Set it where onejob is started.",
        "[run] secrets.B: the environment variable EMPTY is empty. Set it where onejob is started.",
        f"[run] secrets.C: there is no file '{tmp_path}/gone'. Make it, with the secret as its text.",
        f"[run] secrets.D: '{tmp_path}/empty' is empty. Put the secret in it.",
        f"[run] secrets.E: '{tmp_path}/binary' is not UTF-8 text.",
        f"[run] secrets.F: '{tmp_path}' can't be read: Is a directory.",
        f"[run] secrets.G: '{tmp_path}/zero' holds a zero byte, which no environment variable can hold.",
    ]
    assert "hunter2" not in str(caught.value)

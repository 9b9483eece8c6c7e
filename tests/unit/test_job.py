"""The job file: what is read from it, and how every mistake is told, all at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BeforeValidator, Field, model_validator

from onejob.core.job import NAME_WORDS, Job, parse_job
from onejob.core.mistakes import spell
from onejob.core.spec import Duration, Model, StageSpec, uncounted
from onejob.errors import JobFileError, OnejobError, from_json


class Column(Model):
    name: str = Field(description="What it is called.")
    kind: Literal["number", "category"] = "number"


class Split(Model):
    test: float = Field(0.1, gt=0, lt=1)
    by: str = "time"


class Data(StageSpec):
    source: str = Field(description="Where the rows are.")
    steps: list[str | dict[str, Split]] = Field([])
    columns: list[Column] = Field([])
    tables: dict[str, str | Column] = Field({})
    between: dict[str, tuple[float, float]] = Field({})
    limit: int | None = Field(None, ge=1)
    rest: dict[str, Any] = Field({})


def _even(value: Any) -> Any:
    if isinstance(value, int) and value % 2:
        raise ValueError("must be\neven")
    return value


class Train(StageSpec):
    epochs: int = 4
    lr: float = 0.001
    verbose: bool = False
    hidden: tuple[int, ...] = (8, 8)
    batch: Annotated[int, BeforeValidator(_even)] = 2
    wait: Duration = 60.0
    log: Path = uncounted(Path("log"))

    @model_validator(mode="after")
    def _sane(self) -> Train:
        if self.epochs > 100 and self.lr > 1:
            raise ValueError("'epochs' over 100 and 'lr' over 1 don't go together")
        return self


class Run(Model):
    seed: int = 0


STAGES: Mapping[str, type[StageSpec]] = {"train": Train, "data": Data}
GOOD = 'name = "movies"\n[data]\nsource = "x.csv"\n'


def parse(text: str, *sets: str) -> Job:
    return parse_job(text, STAGES, Run, sets)


def mistakes(text: str, *sets: str) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        parse(text, *sets)
    assert all("\n" not in line for line in caught.value.mistakes)
    return caught.value.mistakes


def data(lines: str, *sets: str) -> list[str]:
    """Mistakes of a [data] table with these lines."""
    return mistakes(f"{GOOD}{lines}", *sets)


# ---- what is read ------------------------------------------------------------------------------------------------


def test_a_job_has_its_tables_in_the_order_of_the_work() -> None:
    job = parse(f"{GOOD}[run]\nseed = 7\n[train]\nhidden = [4]\nwait = '2m'\nlr = 1\nlog = 'a/b'\n")
    assert job.name == "movies"
    assert list(parse("name='x'\n[train]\n[data]\nsource='y'").stages) == ["data", "train"]
    assert job.run == Run(seed=7)
    assert job.stages["train"] == Train(hidden=(4,), wait=120.0, lr=1.0, log=Path("a/b"))


def test_tables_that_are_left_out_are_left_out_but_run_has_defaults() -> None:
    job = parse('name = "x"')
    assert job.stages == {}
    assert job.run == Run(seed=0)


def test_dates_are_text_in_open_tables() -> None:
    spec = parse(f"{GOOD}rest = {{ at = 2013-02-20, until = 2013-02-20T01:02:03Z, clock = 07:30:00 }}").stages["data"]
    assert spec.rest == {"at": "2013-02-20", "until": "2013-02-20T01:02:03+00:00", "clock": "07:30:00"}  # type: ignore[attr-defined]


def test_a_job_as_json_has_every_option() -> None:
    job = parse(f"{GOOD}[train]\n")
    plain = job.to_json()
    assert set(plain) == {"name", "run", "data", "train"}
    assert plain["train"]["epochs"] == 4
    assert Train(**plain["train"]) == job.stages["train"]


def test_a_file_gives_path_and_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / 'it\'s a "folder"'
    folder.mkdir()
    (folder / "job.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    monkeypatch.chdir(folder)
    job = parse_job(Path("job.toml"), STAGES, Run)
    assert (job.path, job.project) == (Path("job.toml"), folder)
    assert job.text == GOOD


# ---- overrides ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("data.rest.x=1", {"x": 1}),
        ("data.rest.x=1.5", {"x": 1.5}),
        ("data.rest.x=true", {"x": True}),
        ("data.rest.x=[1, 2]", {"x": [1, 2]}),
        ("data.rest.x={ a = 'b' }", {"x": {"a": "b"}}),
        ("data.rest.x='1'", {"x": "1"}),
        ("data.rest.x=plain text", {"x": "plain text"}),
        ("data.rest.x=a=b", {"x": "a=b"}),
        ("data.rest.x=", {"x": ""}),
        ("data.rest.x=1\ny = 2", {"x": "1\ny = 2"}),
        ('data.rest."a.b"=1', {"a.b": 1}),
        ("data.rest.x.y.z=1", {"x": {"y": {"z": 1}}}),
        ("data.rest={ x = 2 }", {"x": 2}),
    ],
)
def test_an_override_is_a_value_of_toml_or_else_text(word: str, value: dict[str, Any]) -> None:
    assert parse(GOOD, word).stages["data"].rest == value  # type: ignore[attr-defined]


def test_overrides_are_applied_in_order_and_before_the_check() -> None:
    text = f"{GOOD}steps = ['a', {{ split = {{ test = 9 }} }}]"
    job = parse(text, "data.steps[1].split.test=0.3", "data.steps[1].split.test=0.2", "name=other", "train.epochs=9")
    assert job.stages["data"].steps == ["a", {"split": Split(test=0.2)}]  # type: ignore[attr-defined]
    assert job.name == "other"
    assert job.stages["train"].epochs == 9  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("train.lr=x", "--set train.lr=x: 'x' is not a number"),
        ("train.lrr=1", "--set train.lrr=1: unknown key 'lrr'. Did you mean 'lr'?"),
        ("train.modle.x=1", "--set train.modle.x=1: unknown key 'modle'. Known keys: "),
        ("trian.lr=1", "--set trian.lr=1: unknown table [trian]. Did you mean [train]?"),
        ("name=My Job", "--set name=My Job: 'My Job' is not a name for a job: lower-case letters, "),
        ("data.columns=[{name='a', kind='x'}]", "--set data.columns=[{name='a', kind='x'}] [0].kind: 'x' is not "),
        ("train.lr", "--set train.lr: write it as table.key=value, such as train.epochs=4."),
        ("=1", "--set =1: write it as table.key=value, such as train.epochs=4."),
        ("train..lr=1", "--set train..lr=1: write it as table.key=value, such as train.epochs=4."),
        ("data.source.x=1", "--set data.source.x=1: data.source is 'x.csv', which holds no 'x'."),
        ("data.steps[3]=1", "--set data.steps[3]=1: data.steps has 1 entries, counted from 0, and no [3]."),
        ("data.steps.x=1", "--set data.steps.x=1: data.steps is a list; name an entry, such as [0]."),
        ("data[0]=1", "--set data[0]=1: data is a table."),
        ("train.lr=inf", "--set train.lr=inf: inf is not a finite number"),
        ("train=4", "--set train=4: 4 is not a table."),
    ],
)
def test_a_mistake_in_an_override_names_the_override(word: str, line: str) -> None:
    (found,) = data("steps = ['a']", word)
    assert found.startswith(line)


def test_a_mistake_of_the_file_is_not_put_on_an_override_beside_it() -> None:
    assert mistakes(f"{GOOD}[train]\nlr = 'x'\nmodle = {{}}", "train.epochs=1", "train.modle.x=1") == [
        "job.toml [train] lr: 'x' is not a number",
        "job.toml [train] modle: unknown key 'modle'. Known keys: resources, timeout, retries, imports, reads, epochs, "
        "lr, verbose, hidden, batch, wait, log.",
    ]


# ---- mistakes in values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ("resources = { gpu = 1 }", "resources.gpu: unknown key 'gpu'. Did you mean 'gpus'?"),
        ("Source = 'x'", "Source: unknown key 'Source'. Did you mean 'source'?"),
        ("lr = 1", "lr: unknown key 'lr'. It is a key of [train]."),
        ("timeout = '30 minutes'", "timeout: '30 minutes': a duration is a number of seconds, or text such as '90s"),
        ("timeout = -1", "timeout: -1 must be greater than 0"),
        ("limit = 0", "limit: 0 must be at least 1"),
        ("limit = '4'", "limit: '4' is not a whole number"),
        ("limit = 4.0", "limit: 4.0 is not a whole number"),
        ("limit = true", "limit: true is not a whole number"),
        ("limit = 2013-02-20", "limit: '2013-02-20' is not a whole number"),
        ("imports = 'helper'", "imports: 'helper' is not a list"),
        ("imports = ['a', 3]", "imports[1]: 3 is not text (in quotes)"),
        ("resources = 3", "resources: 3 is not a table"),
        ("columns = [{ kind = 'number' }]", "columns[0].name: is missing. What it is called."),
        (
            "columns = [{ name = 'a', kind = 'numbr' }]",
            "columns[0].kind: 'numbr' is not 'number' or 'category'. Did you mean 'number'?",
        ),
        ("columns = [{ name = 'a' }, 'b']", "columns[1]: 'b' is not a table"),
        ("steps = ['a', { split = { test = 'x' } }]", "steps[1].split.test: 'x' is not a number"),
        ("steps = ['a', { split = { tset = 0.1 } }]", "steps[1].split.tset: unknown key 'tset'. Did you mean 'test'?"),
        ("steps = [5]", "steps[0]: 5 is not text (in quotes) or a table"),
        ("tables = { a = { nam = 'x', name = 'y' } }", "tables.a.nam: unknown key 'nam'. Did you mean 'name'?"),
        ("tables = { 'a b' = 3 }", "tables.\"a b\": 3 is not text (in quotes) or a table"),
        ("between = { a = [1] }", "between.a[1]: is missing."),
        ("between = { a = [1, 2, 3] }", "between.a: [1,2,3] must have at most 2 entries"),
        ("between = { a = [1, nan] }", "between.a[1]: nan is not a finite number"),
        ("rest = { a = [inf] }", "rest.a[0]: inf is not a finite number"),
        (f"limit = '{'x' * 99}'", f"limit: '{'x' * 56}... is not a whole number"),
    ],
)  # fmt: skip
def test_a_mistake_names_table_key_and_value_and_what_is_expected(lines: str, line: str) -> None:
    (found,) = data(lines)
    assert found.startswith(f"job.toml [data] {line}")


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ("verbose = 1", "verbose: 1 is not true or false"),
        ("verbose = 'true'", "verbose: 'true' is not true or false"),
        ("lr = '1e-3'", "lr: '1e-3' is not a number"),
        ("hidden = [8, 1.5]", "hidden[1]: 1.5 is not a whole number"),
        ("batch = 3", "batch: 3 must be even"),
        ("log = 3", "log: 3 is not text (in quotes)"),
    ],
)
def test_nothing_is_converted_silently(lines: str, line: str) -> None:
    assert mistakes(f"{GOOD}[train]\n{lines}") == [f"job.toml [train] {line}"]


def test_a_models_own_check_is_told_at_its_table() -> None:
    assert mistakes("name='x'\n[train]\nepochs = 200\nlr = 2.0") == [
        "job.toml [train]: 'epochs' over 100 and 'lr' over 1 don't go together"
    ]


def test_a_missing_key_says_what_it_is_for() -> None:
    assert mistakes("name = 'x'\n[data]") == ["job.toml [data] source: is missing. Where the rows are."]


# ---- mistakes in tables ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[data]\nsource = 'x'", "job.toml name: is missing. Give the job a name: lower-case letters"),
        ("name = 3", "job.toml name: 3 is not a name for a job: lower-case letters, "),
        ("name = 'My Job'", "job.toml name: 'My Job' is not a name for a job: "),
        ("name = '1st'", "job.toml name: '1st' is not a name for a job: "),
        ("name = ''", "job.toml name: '' is not a name for a job: "),
        ("name = 'a\\n'", "job.toml name: "),
        ('name = "a\\n"', "job.toml name: 'a\\n' is not a name for a job: "),
        ("name = 'ä'", "job.toml name: 'ä' is not a name for a job: "),
        ("name = 'a'\n[Train]", "job.toml: unknown table [Train]. Did you mean [train]?"),
        ("name = 'a'\n[serve]", "job.toml: unknown table [serve]. Tables: data, train, run."),
        ("name = 'a'\nepochs = 4", "job.toml: unknown key 'epochs'. It is a key of [train]: write it below that line."),
        ("name = 'a'\nnmae = 4", "job.toml: unknown key 'nmae'. Did you mean 'name'?"),
        ("name = 'a'\nzzz = 4", "job.toml: unknown key 'zzz'. Tables: data, train, run."),
        ("name = 'a'\ntrain = 4", "job.toml [train]: 4 is not a table."),
        ("name = 'a'\n[[train]]\n", "job.toml [train]: [{}] is not a table. Write [train] once, not [[train]]."),
    ],
)  # fmt: skip
def test_mistakes_outside_the_tables(text: str, line: str) -> None:
    (found,) = mistakes(text)
    assert found.startswith(line)


def test_ten_mistakes_are_reported_at_once() -> None:
    text = """
name = "My Job"
epochs = 3
[trian]
[data]
steps = [{ split = { test = "x" } }, 5]
timeout = "soon"
resources = { gpu = 1, processes = 0 }
[train]
lr = "x"
[run]
sed = 1
"""
    assert mistakes(text, "train.epochs=x") == [
        f"job.toml name: 'My Job' is not a name for a job: {NAME_WORDS}.",
        "job.toml: unknown key 'epochs'. It is a key of [train]: write it below that line.",
        "job.toml: unknown table [trian]. Did you mean [train]?",
        "job.toml [data] resources.processes: 0 must be at least 1",
        "job.toml [data] resources.gpu: unknown key 'gpu'. Did you mean 'gpus'?",
        "job.toml [data] timeout: 'soon': a duration is a number of seconds, or text such as '90s', '15m', '2h', '1d'",
        "job.toml [data] source: is missing. Where the rows are.",
        "job.toml [data] steps[0].split.test: 'x' is not a number",
        "job.toml [data] steps[1]: 5 is not text (in quotes) or a table",
        "--set train.epochs=x: 'x' is not a whole number",
        "job.toml [train] lr: 'x' is not a number",
        "job.toml [run] sed: unknown key 'sed'. Did you mean 'seed'?",
    ]


def test_the_error_survives_the_way_through_json() -> None:
    with pytest.raises(JobFileError) as caught:
        parse("name = 3\nx = 1")
    again: OnejobError = from_json(caught.value.to_json())
    assert isinstance(again, JobFileError)
    assert again.mistakes == caught.value.mistakes


# ---- files that can't be read ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "name = 'x'\n[data\nsource = 1",
            "job.toml:2:6: not TOML: Expected ']' at the end of a table declaration: '[data'",
        ),
        ("name = 'x'\n\n  lr 3\n", "job.toml:3:6: not TOML: Expected '=' after a key in a key/value pair: 'lr 3'"),
        ("name = 'x'\na = [1,\n", "job.toml:2: not TOML: Invalid value: 'a = [1,'"),
        ("a = 1\na = 2\nb = 3\n", "job.toml:2:6: not TOML: Cannot overwrite a value: 'a = 2'"),
        ("a = " + "[" * 5000, "job.toml: not TOML that can be read: nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_not_toml_is_told_with_its_line(text: str, line: str) -> None:
    assert mistakes(text) == [line]


def read_mistake(path: Path) -> str:
    with pytest.raises(JobFileError) as caught:
        parse_job(path, STAGES, Run)
    (line,) = caught.value.mistakes
    return line


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert read_mistake(tmp_path / "job.toml") == (
        f"{tmp_path}/job.toml: there is no such file. `onejob init` writes a first one."
    )
    (tmp_path / "job.toml").touch()
    assert read_mistake(tmp_path / "jop.toml").endswith(f"no such file. Did you mean '{tmp_path}/job.toml'?")
    assert "there is no such file" in read_mistake(tmp_path / "job.toml" / "x.toml")


def test_a_folder(tmp_path: Path) -> None:
    assert read_mistake(tmp_path) == f"{tmp_path} is a folder. Name the job file in it, such as {tmp_path}/job.toml."


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"# caf\xe9\n".rjust(12, b"\n"))
    assert read_mistake(path) == f"{path}:6: not UTF-8 text (byte 0xe9 at 10). Save it as UTF-8."


def test_paths_are_spelt_as_they_are_written() -> None:
    assert spell(("steps", 2, "split", "a b", 0)) == 'steps[2].split."a b"[0]'

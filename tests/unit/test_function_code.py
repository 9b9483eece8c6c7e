"""A user's Python file as a model: what is one, and what is wrong with others, in words."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onejob.core.tensor import TensorSpec
from onejob.engines.declared import fit
from onejob.engines.function.code import Code, load, specs
from onejob.errors import InferenceError

TABLES = 'INPUTS = {"x": ("FP32", [-1, 2])}\nOUTPUTS = {"y": ("FP32", [-1, 2])}\n'


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Loading puts the folder on the path and the file among the modules."""
    path, modules, quiet = list(sys.path), set(sys.modules), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    yield
    sys.path[:], sys.dont_write_bytecode = path, quiet
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def written(folder: Path, text: str, **options: Any) -> Code:
    (folder / "model.py").write_text(text)
    return load(folder, **options)


def test_a_function_with_tables_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("FACTOR = 2\n")
    code = written(tmp_path, f"from beside import FACTOR\n{TABLES}def infer(x):\n    return {{'y': FACTOR * x}}\n")
    assert code.inputs == (TensorSpec("x", "FP32", (-1, 2)),)
    assert code.outputs == (TensorSpec("y", "FP32", (-1, 2)),)
    found = code.infer({"x": np.ones((3, 2), np.float32)})
    assert found["y"].dtype == np.float32
    assert found["y"].tolist() == [[2, 2]] * 3
    assert code.close() is None


def test_a_class_is_told_what_it_asks_for_and_says_itself_what_it_takes(tmp_path: Path) -> None:
    text = """
class Model:
    outputs = {"y": ("INT64", [-1])}
    def __init__(self, threads, folder=None):
        self.inputs = {"x": ("INT64", [-1])}
        self.told = (folder, threads)
    def infer(self, **arrays):
        return arrays["x"] + 1
    def close(self):
        self.told = "closed"
INPUTS = {"other": ("FP32", [-1])}
"""
    code = written(tmp_path, text, threads=3)
    assert [spec.name for spec in code.inputs] == ["x"]
    model: Any = code.close.__self__  # type: ignore[attr-defined]
    assert model.told == (tmp_path, 3)
    assert code.infer({"x": np.array([1, 2])})["y"].tolist() == [2, 3], "a single output needs no dict"
    code.close()
    assert model.told == "closed"


def test_a_class_that_asks_for_nothing_and_one_that_takes_all(tmp_path: Path) -> None:
    method = "    def infer(self, x):\n        return x\n"
    assert written(tmp_path, f"{TABLES}class Model:\n{method}").infer({"x": np.ones((1, 2), np.float32)})
    asks = "    def __init__(self, **given):\n        assert {*given} == {'folder', 'threads'}\n"
    written(tmp_path, f"{TABLES}class Model:\n{asks}{method}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"neither a class Model nor a function infer. Write `def infer"),
        ("infer = 3\n" + TABLES, "model.py: it has neither"),
        (TABLES + "class Model:\n    pass\n", "the class Model has no method infer"),
        ("def infer(x):\n    return x\n", r"model.py: INPUTS is not there. Write, say, INPUTS = "),
        ("INPUTS = {}\ndef infer(x):\n    return x\n", "INPUTS is empty"),
        ('INPUTS = {"x": "FP32"}\ndef infer(x):\n    return x\n', r"INPUTS: 'x' is 'FP32', not a datatype and a shape"),
        (TABLES + "def infer(y):\n    return y\n", "can't be called with the inputs x: missing a required"),
        (TABLES + "def infer():\n    return 1\n", "can't be called with the inputs x: got an unexpected"),
    ],
)
def test_what_is_no_model_is_told_with_a_cure(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(InferenceError, match=told):
        written(tmp_path, text)


def test_a_module_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing_of_the_kind"):
        written(tmp_path, "import nothing_of_the_kind\n")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InferenceError, match=r"other\.py: there is no such file"):
        load(tmp_path, "other.py")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (("float32", [-1]), "unknown datatype 'float32'. Did you mean 'FP32'"),
        (("FP31", [-1]), "Did you mean 'FP"),
        (("wide", [-1]), "Known: BOOL"),
        (("FP32", [-2]), r"the shape \[-2\]"),
        (("FP32", 3), "not a datatype and a shape"),
    ],
)
def test_tables_that_do_not_say_what_they_should(value: Any, told: str) -> None:
    with pytest.raises(InferenceError, match=told):
        specs({"x": value}, "INPUTS", "model.py")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("None", "infer gave nothing, not a dict"),
        ("[1, 2]", "infer gave a list, not a dict"),
        ("{'y': x}", "infer gave y, where OUTPUTS has y, z"),
        ("{'y': x, 'z': x, 'more': x}", "where OUTPUTS has y, z"),
    ],
)
def test_answers_with_other_names_are_refused(answer: str, told: str, tmp_path: Path) -> None:
    tables = TABLES.removesuffix("}\n") + ', "z": ("FP32", [-1, 2])}\n'
    code = written(tmp_path, f"{tables}def infer(x):\n    return {answer}\n")
    with pytest.raises(InferenceError, match=told):
        code.infer({"x": np.ones((1, 2), np.float32)})


WIDE = np.iinfo(np.int64).max


@pytest.mark.parametrize(
    ("datatype", "value", "expected"),
    [
        ("FP32", [1, 2], [1.0, 2.0]),
        ("FP32", np.array([0.5, 0.25]), [0.5, 0.25]),
        ("FP16", np.array([0.5, 2], np.float32), [0.5, 2.0]),
        ("INT32", [1, -2], [1, -2]),
        ("UINT8", np.array([0, 255]), [0, 255]),
        ("BOOL", [True, False], [True, False]),
        ("BYTES", ["a", "ü"], ["a", "ü"]),
        ("BYTES", [b"a\0", None], [b"a\0", None]),
        ("BYTES", np.array(["a", "bc"]), ["a", "bc"]),
    ],
)
def test_values_are_taken_where_nothing_is_lost(datatype: str, value: Any, expected: list[Any]) -> None:
    array = fit(TensorSpec("y", datatype, (-1,)), value, "mine.py")
    assert array.tolist() == expected


@pytest.mark.parametrize(
    ("datatype", "value", "told"),
    [
        ("INT32", [WIDE, 0], "is INT64, not INT32"),
        ("UINT8", [-1, 0], "is INT64, not UINT8"),
        ("INT64", [0.5, 1], "is FP64, not INT64"),
        ("FP32", ["a", "b"], "not FP32"),
        ("FP32", [True, False], "is BOOL, not FP32"),
        ("BOOL", [0, 1], "is INT64, not BOOL"),
        ("BYTES", [1, "a"], "holds 1, where text is declared"),
        ("BYTES", np.array([1.0, 2.0]), "holds 1.0, where text"),
        ("FP32", [[1.0], [2.0]], r"has shape \[2, 1\], not \[-1\]"),
        ("FP32", 1.0, r"has shape \[\], not \[-1\]"),
    ],
)
def test_values_that_would_change_are_refused(datatype: str, value: Any, told: str) -> None:
    with pytest.raises(InferenceError, match=told):
        fit(TensorSpec("y", datatype, (-1,)), value, "mine.py")


def test_a_size_that_is_declared_must_be_met() -> None:
    with pytest.raises(InferenceError, match=r"mine\.py: output 'y' has shape \[2, 3\], not \[-1, 4\]"):
        fit(TensorSpec("y", "FP32", (-1, 4)), np.ones((2, 3)), "mine.py")


@pytest.mark.parametrize(
    ("example", "found"),
    [
        ("", None),
        ("EXAMPLE = {'x': [[1, 2]], 'text': ['ab']}", ([[1, 2]], ["ab"])),
        ("EXAMPLE = {'x': [[1, 2], [3, 4]], 'text': [b'{}', b'']}", ([[1, 2], [3, 4]], [b"{}", b""])),
    ],
)
def test_an_example_is_what_it_can_be_asked(example: str, found: Any, tmp_path: Path) -> None:
    model = written(tmp_path, f"{TAKES_TEXT}\n{example}\n")
    if found is None:
        assert model.example is None
        return
    assert model.example is not None
    assert (model.example["x"].tolist(), model.example["text"].tolist()) == found
    assert model.example["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("example", "told"),
    [
        ("[1]", r"model\.py EXAMPLE: it should have x, text"),
        ("{'x': [[1, 2]]}", "it should have x, text"),
        ("{'x': [[1, 2, 3]], 'text': ['a']}", r"input 'x' has shape \[1, 3\], not \[-1, 2\]"),
        ("{'x': [['a', 'b']], 'text': ['a']}", "input 'x' is"),
        ("{'x': [[1, 2]], 'text': ['a', 'b']}", "as many rows, one at least"),
    ],
)
def test_an_example_that_does_not_fit_is_named(example: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(InferenceError, match=told):
        written(tmp_path, f"{TAKES_TEXT}\nEXAMPLE = {example}\n")


TAKES_TEXT = """
INPUTS = {"x": ("FP32", [-1, 2]), "text": ("BYTES", [-1])}
OUTPUTS = {"y": ("FP32", [-1, 2])}


def infer(x, text):
    return x
"""

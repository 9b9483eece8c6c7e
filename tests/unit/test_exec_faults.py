"""Every fault point in the code of processes is in the table, and the other way round."""

import re
from pathlib import Path

import pytest

import onejob
from onejob.core.faults import VARIABLE
from onejob.testing.faults import POINTS, armed

PARTS = ("local.", "shim.", "step.")


def test_the_table_is_complete() -> None:
    source = "".join(path.read_text() for path in (Path(onejob.__file__).parent / "exec").glob("*.py"))
    assert set(re.findall(r'\breach\("([^"]+)"\)', source)) == {name for name in POINTS if name.startswith(PARTS)}


def test_arming() -> None:
    assert armed("shim.before_exit") == {VARIABLE: "shim.before_exit:1"}
    assert armed("shim.before_exit", nth=3) == {VARIABLE: "shim.before_exit:3"}
    with pytest.raises(AssertionError, match="no fault point"):
        armed("shim.nowhere")

"""Every fault point in the code is listed with a sentence, and every listed one is in the code."""

import re
from pathlib import Path

import onejob
from onejob.testing.faults import POINTS


def test_the_table_of_fault_points_is_the_code():
    source = Path(onejob.__file__).parent
    found: set[str] = set()
    for path in source.rglob("*.py"):
        if path.relative_to(source).as_posix() not in ("core/faults.py", "testing/faults.py"):
            found |= set(re.findall(r'\breach\("([^"]+)"\)', path.read_text()))
    assert found == set(POINTS)

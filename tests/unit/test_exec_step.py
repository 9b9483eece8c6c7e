"""How a step runner turns exceptions into errors that name a place."""

from onejob.errors import DataError
from onejob.exec.step import as_onejob_error


def test_an_engines_error_about_the_users_code_names_the_users_line(tmp_path):
    (tmp_path / "helper.py").write_text("def prepare():\n    raise AttributeError('no such column')\n")
    space: dict[str, object] = {}
    exec(compile((tmp_path / "helper.py").read_text(), str(tmp_path / "helper.py"), "exec"), space)
    try:
        try:
            space["prepare"]()  # type: ignore[operator]
        except AttributeError as cause:
            raise DataError("no such column", place="[data] steps[0] helper:prepare", cure="Look.") from cause
    except DataError as error:
        told = as_onejob_error(error, "data", tmp_path)
    assert type(told) is DataError
    assert str(told) == "[data] steps[0] helper:prepare: no such column (helper.py:2 in prepare). Look."

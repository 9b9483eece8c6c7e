"""The trial that four known tools fail: a step calls a helper in another module, and the helper changes.

Whole jobs with the real command line: what must make a step run again does, what must not doesn't, and `why` says it.
"""

from __future__ import annotations

from conftest import HELPER, SCALING, Project, rows_csv


def ran(project: Project, *args: str) -> tuple[bool, str]:
    step = project.steps(*args)["data"]
    return not step["cached"], step["reason"]


def distances(project: Project) -> float:
    shown = project.json("show", "tiny/dataset@latest")
    profile = next(f for f in shown["artifacts"][0]["files"] if f["path"] == "train/00000.arrow")
    return profile["digest"]


def test_a_changed_helper_in_another_module_reruns_the_step_and_why_names_the_function(project):
    assert ran(project) == (True, "first time")
    before = distances(project)
    assert ran(project)[0] is False
    project.write("scaling.py", SCALING.replace("column * 2", "column * 100"))
    again, reason = ran(project)
    assert again
    assert "scaling.py changed (function scale)" in reason
    assert distances(project) != before
    why = project.json("why", "tiny/dataset@latest")["steps"][0]
    assert "scaling.py changed (function scale)" in why["reason"]


def test_a_comment_and_formatting_do_not_rerun_the_step(project):
    project.steps()
    project.write(
        "scaling.py", "# a comment\n" + SCALING.replace("return column * 2", "return (column\n            * 2)")
    )
    assert ran(project)[0] is False


def test_a_module_constant_and_a_decorator_rerun_the_step(project):
    project.steps()
    project.write("helper.py", HELPER.replace("FACTOR = 1.0", "FACTOR = 3.0"))
    again, reason = ran(project)
    assert again
    assert "constant FACTOR" in reason
    decorated = SCALING.replace("def scale", "def twice(f):\n    return lambda c: f(f(c))\n\n\n@twice\ndef scale")
    project.write("scaling.py", decorated)
    again, reason = ran(project)
    assert again
    assert "scaling.py changed" in reason
    assert "decorator" in reason


def test_a_changed_input_row_and_option_rerun_the_step(project):
    project.steps()
    project.write("rows.csv", rows_csv().replace(",AA,", ",UA,", 1))
    again, reason = ran(project)
    assert again
    assert "rows.csv" in reason or "source" in reason
    job = (project.folder / "job.toml").read_text()
    project.write("job.toml", job.replace("test = 0.25", "test = 0.5"))
    again, reason = ran(project)
    assert again
    assert "0.25 -> 0.5" in reason


def test_a_changed_package_version_reruns_the_step(project, tmp_path):
    site = tmp_path / "site"
    (site / "tinyunits").mkdir(parents=True)
    (site / "tinyunits" / "__init__.py").write_text("TWO = 2\n")
    about = site / "tinyunits-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tinyunits\nVersion: 1.0\n")
    (about / "RECORD").write_text("tinyunits/__init__.py,,\ntinyunits-1.0.dist-info/METADATA,,\n")
    project.write("scaling.py", "from tinyunits import TWO\n\n\ndef scale(column):\n    return column * TWO\n")
    env = {"PYTHONPATH": str(site)}
    assert project.steps(env=env)["data"]["cached"] is False
    assert project.steps(env=env)["data"]["cached"] is True
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tinyunits\nVersion: 1.1\n")
    about.rename(site / "tinyunits-1.1.dist-info")
    step = project.steps(env=env)["data"]
    assert step["cached"] is False
    assert "tinyunits 1.0 -> 1.1" in step["reason"]


def test_what_can_not_be_followed_is_warned_about_or_declared(project):
    project.write("extra.py", "TWO = 2\n")
    dynamic = (
        "import importlib\n\n\ndef scale(column):\n    return column * importlib.import_module('ex' + 'tra').TWO\n"
    )
    project.write("scaling.py", dynamic)
    view = project.json("run", "job.toml")
    assert any("scaling.py" in warning for warning in view["warnings"])
    job = (project.folder / "job.toml").read_text()
    project.write("job.toml", job.replace("retries = 0", 'retries = 0\nimports = ["extra", "scaling.py:scale"]'))
    view = project.json("run", "job.toml")
    assert not view["warnings"]
    project.write("extra.py", "TWO = 3\n")
    again, reason = ran(project)
    assert again
    assert "extra.py changed (constant TWO)" in reason


def test_the_same_bytes_stop_the_cascade(project):
    job = (project.folder / "job.toml").read_text()
    project.write("job.toml", job + "\n[train]\nepochs = 1\nbatch = 64\nmodel = { hidden = [4] }\n")
    project.steps()
    project.write("scaling.py", SCALING.replace("column * 2", "column + column"))
    steps = project.steps()
    assert steps["data"]["cached"] is False
    assert steps["train"]["cached"] is True


def test_force_and_from_run_what_is_there(project):
    project.steps()
    assert ran(project, "--force")[0] is True
    assert ran(project, "--from", "data")[0] is True
    assert ran(project)[0] is False
    done = project.cli("run", "job.toml", "--from", "trian")
    assert done.returncode == 2
    assert "no stage is called 'trian'" in done.stderr

"""Bad days: each gets a clear error or simply works, and nothing is lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from conftest import DATA, HELPER, Project, make_project


def start(project: Project, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "onejob", *args],
        cwd=project.folder,
        env={**os.environ, "ONEJOB_HOME": str(project.home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_runs_of_the_same_job_at_once_do_the_work_once(project):
    slow = HELPER.replace("def prepare(rows: pl.LazyFrame) -> pl.LazyFrame:", "def prepare(rows):\n    time.sleep(2)")
    project.write("helper.py", slow.replace("import polars", "import time\n\nimport polars"))
    both = [start(project, "run", "job.toml", "--json") for _ in range(2)]
    views = [json.loads(run.communicate(timeout=60)[0]) for run in both]
    assert [view["state"] for view in views] == ["done", "done"]
    assert len({view["steps"][0]["execution"] for view in views}) == 1
    assert len(list((project.home / "work").iterdir())) == 1


def test_fifty_small_jobs_at_once_on_sqlite(tmp_path):
    projects = []
    for index in range(50):
        one = make_project(tmp_path / str(index))
        one = Project(one.folder, tmp_path / "home")
        one.write("job.toml", DATA.replace('"tiny"', f'"tiny{index}"').replace("test = 0.25", f"test = 0.{index + 10}"))
        projects.append(one)
    runs = [start(one, "run", "job.toml", "--json") for one in projects]
    ended = [(run.communicate(timeout=170), run.returncode) for run in runs]
    for (out, err), code in ended:
        assert code == 0, out + err
        assert json.loads(out)["state"] == "done"
    assert len(list((tmp_path / "home" / "work").iterdir())) == 50


def test_a_job_file_with_ten_mistakes_reports_all_of_them(project):
    project.write(
        "job.toml",
        """
name = "Tiny Job"
[data]
familly = "tabular"
source = 7
steps = ["helper:prepare", { split = { by = "tme", test = 2 } }]
columns = { label = "late", categories = "carrier", numbers = ["distance"] }
[train]
epochs = -1
lr = "fast"
resources = { gpu = 1 }
[run]
sed = 7
[serv]
port = 8000
""",
    )
    done = project.cli("check", "job.toml")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "job.toml" in line]
    assert len(lines) >= 10, done.stderr
    for hint in ("'family'", "'gpus'", "'seed'", "[serve]"):
        assert hint in done.stderr, hint


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: (p / "rows.csv").unlink(), "rows.csv"),
        (lambda p: (p / "rows.csv").write_text(""), "empty"),
        (lambda p: (p / "rows.csv").write_text("day,carrier,distance,hour,late\n2024-01-01,AA"), "rows.csv"),
        (lambda p: (p / "rows.csv").write_text("day,carrier,distance,hour\n2024-01-01,AA,5,6\n"), "late"),
    ],
    ids=["missing", "empty", "truncated", "without-its-label"],
)
def test_a_bad_source_is_named(project, spoil, says):
    spoil(project.folder)
    done = project.cli("run", "job.toml")
    assert done.returncode in (2, 4), done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named_and_the_run_goes_on_once_it_is_free(tmp_path):
    project = make_project(tmp_path, stages="all")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = (project.folder / "job.toml").read_text()
        project.write("job.toml", job.replace("[serve]", f"[serve]\nport = {port}"))
        done = project.cli("run", "job.toml")
        assert done.returncode == 7, done.stderr
        assert str(port) in done.stderr
    try:
        view = project.json("run", "job.toml")
        assert view["endpoint"]["url"].endswith(f":{port}")
        assert all(step["cached"] for step in view["steps"]), "nothing was lost"
    finally:
        project.cli("stop", "tiny")
    assert project.processes() == []


def test_a_step_that_hangs_is_ended_at_its_limit(project):
    project.write("helper.py", "import time\n\n\ndef prepare(rows):\n    time.sleep(600)\n    return rows\n")
    job = (project.folder / "job.toml").read_text()
    project.write("job.toml", job.replace("retries = 0", 'retries = 0\ntimeout = "2s"'))
    done = project.cli("run", "job.toml")
    assert done.returncode == 5
    assert "limit" in done.stderr
    assert "timeout" in done.stderr
    assert project.processes() == []


def test_a_failing_step_names_the_line_of_the_user(project):
    project.write("helper.py", "def prepare(rows):\n    return rows.with_colums(1)\n")
    done = project.cli("run", "job.toml")
    assert done.returncode == 5
    assert "helper.py:2" in done.stderr
    assert "with_colums" in done.stderr


def test_a_home_that_can_not_be_written(tmp_path):
    project = make_project(tmp_path)
    project.home.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(project.home)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.decode()}")
    try:
        done = project.cli("run", "job.toml")
        assert done.returncode == 6
        assert "read-only" in done.stderr
        assert "--home" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        subprocess.run(["umount", "-l", str(project.home)], check=False)


def test_a_path_with_spaces_and_quotes(tmp_path):
    project = make_project(tmp_path / 'it\'s "my" folder ü')
    assert project.steps()["data"]["state"] == "done"
    assert project.cli("verify", "tiny/dataset@latest").returncode == 0


def test_secrets_reach_the_step_and_nothing_else(project):
    job = (project.folder / "job.toml").read_text()
    project.write("job.toml", job + '\n[run]\nsecrets = { TOKEN = { env = "MY_TOKEN" } }\n')
    body = '    import os\n\n    print("token is", os.environ["TOKEN"], flush=True)\n    return rows'
    project.write("helper.py", f"def prepare(rows):\n{body}\n")
    missing = project.cli("run", "job.toml")
    assert missing.returncode == 2
    assert "MY_TOKEN" in missing.stderr
    secret = "s3cr3t-0123456789"
    key = project.steps(env={"MY_TOKEN": secret})["data"]
    assert key["state"] == "done"
    newest = project.json("ps", "-a")["runs"][0]["run"]
    assert "token is ***TOKEN***" in project.cli("logs", f"{newest}/data").stdout
    for path in [*project.home.rglob("*")]:
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
    assert project.steps(env={"MY_TOKEN": "another"})["data"]["cached"], "a secret's value is not in the key"


def test_a_clock_that_jumps_neither_loses_nor_doubles_work(project):
    """A run under a clock a day ahead, then one a day behind: cached, and leases of the dead are taken over."""
    project.steps()
    from onejob.loop import commands

    for jump in (86_400.0, -86_400.0):
        with commands.open(project.home, clock=lambda jump=jump: time.time() + jump) as session:
            view = commands.run(session, project.folder / "job.toml")
            assert view.steps[0].cached
            view = commands.run(session, project.folder / "job.toml", force=True)
            assert view.state == "done"
            assert not view.steps[0].cached
    assert project.steps()["data"]["cached"]
    assert project.processes() == []

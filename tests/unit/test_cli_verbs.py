"""Every verb: its arguments reach the command, its result is drawn or is JSON, its errors have exit codes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onejob.cli import VERBS, main, output, trace
from onejob.core.ports import Support
from onejob.errors import CancelledError, JobFileError, NotFoundError, RankError, StoreError
from onejob.loop import commands
from onejob.loop.commands.bench import BenchView, TargetView
from onejob.loop.commands.label import LabelView
from onejob.loop.commands.promote import PromotionView
from onejob.loop.commands.signal import SignalView
from onejob.loop.views import (
    ArtifactView,
    BackupView,
    Change,
    CheckView,
    Damage,
    DemoView,
    DiffView,
    DoctorView,
    EndpointView,
    ExecutionView,
    GcView,
    InitView,
    ListView,
    Node,
    PlannedStep,
    RunView,
    ShowView,
    StepView,
    StepWhy,
    StopView,
    TraceView,
    VerifyView,
    WhyView,
)
from onejob.serve.bench.outcome import Outcome
from onejob.serve.bench.report import measured
from onejob.serve.bench.schedule import Load

DIGEST = "91bc3fa0" * 8
OTHER = "0123abcd" * 8
RUN = RunView(
    job="flights",
    run=12,
    state="done",
    steps=(
        StepView("data", "done", cached=True, reason="the same key as in run 11"),
        StepView("train", "done", seconds=2.1, reason="options.lr 0.001 -> 0.01"),
    ),
    endpoint=EndpointView("flights", "ready", "http://127.0.0.1:8080", DIGEST, ready=2, replicas=2, requests=1234),
    created=1000.0,
    seconds=3.4,
    warnings=("train: helper.py reads a file by path",),
)
NODES = (
    Node(0, "request", "r-1", DIGEST, "1 row"),
    Node(1, "engine", "flights/engine@champion", DIGEST),
    Node(2, "source", "flights.csv"),
)
ARTIFACT = ArtifactView(
    DIGEST,
    "engine",
    2048,
    ({"path": "model.onnx", "digest": OTHER, "size": 2048},),
    {"precision": "int8"},
    ("flights/engine@champion",),
)


def load_of(ms: float, count: int) -> Outcome:
    """A load whose answers all took as long."""
    made = Outcome(Load("open", 8, 100.0), seconds=1.0, arrived=count)
    made.latency.record([round(ms * 1e6)] * count)
    return made


RESULTS: dict[str, tuple[list[str], Any, list[str]]] = {
    "demo": (
        ["flights"],
        DemoView(
            "flights", "flights", RUN, {"carrier": "UA"}, {"late": 0.2}, "curl -s x", (("onejob why flights", "why"),)
        ),
        ["run 12 is done", '{"late": 0.2}', "curl -s x", "onejob why flights"],
    ),
    "init": (
        ["here"],
        InitView("here", ("here/job.toml",), ("the label is 'y'",)),
        ["wrote here/job.toml", "the label is 'y'"],
    ),
    "check": (
        ["job.toml", "--set", "train.lr=0.1"],
        CheckView(
            "flights",
            "job.toml",
            (PlannedStep("data", "cached"), PlannedStep("train", "run", "helper.py changed")),
            "flights",
        ),
        ["2 steps: 1 cached, 1 to run", "helper.py changed", "endpoint flights"],
    ),
    "run": (
        ["job.toml"],
        RUN,
        ["run 12 is done, 3.4 s", "cached", "the same key as in run 11", "http://127.0.0.1:8080", "warning: train: "],
    ),
    "serve": (["model.onnx", "--port", "8080"], RUN, ["endpoint flights is ready http://127.0.0.1:8080"]),
    "up": (["-q"], None, []),
    "ps": ([], ListView((RUN,), (RUN.endpoint,)), ["cached 1, done 1", "2/2", "1,234"]),
    "show": (
        ["12"],
        ShowView(
            "12",
            "run",
            run=RUN,
            artifacts=(ARTIFACT,),
            executions=(
                ExecutionView(
                    "e1f2a3b4c5d6e7f8", "train", "flights", 12, "done", "local", "box", measured={"auc": 0.7031}
                ),
            ),
            lineage=NODES,
            metrics={"train": ({"split": "train", "step": 1, "loss": 0.9}, {"split": "train", "step": 2, "loss": 0.4})},
        ),
        [
            "run 12 is done",
            "auc  0.7031",
            "train: train loss by step: 0.4",
            "┤",
            "model.onnx",
            "2.0 KiB",
            "Lineage",
        ],
    ),
    "logs": (["12/train"], ["epoch 1", "epoch 2\n"], ["epoch 1\nepoch 2\n"]),
    "doctor": (
        [],
        DoctorView(
            "0.1.0",
            "/srv/onejob",
            {"cpus": 2},
            (Support("openvino", "engine", False, "not installed", "pip install 'onejob[openvino]'"),),
        ),
        ["/srv/onejob", "not here", "pip install 'onejob[openvino]'"],
    ),
    "why": (
        ["12/train"],
        WhyView(
            "12/train",
            (
                StepWhy(
                    "train",
                    12,
                    "ran",
                    "helper.py changed (function scale)",
                    "11/train",
                    (Change("code.helper.py", DIGEST, OTHER),),
                ),
            ),
        ),
        ["train ran in run 12: helper.py changed (function scale); compared with 11/train", DIGEST[:12], OTHER[:12]],
    ),
    "diff": (["11", "12"], DiffView("11", "12", (Change("options.lr", 0.001, 0.01),)), ["options.lr", "0.001", "0.01"]),
    "trace": (
        ["r-1"],
        TraceView("r-1", NODES),
        ["request  r-1", "\n  engine  flights/engine@champion", "\n    source  flights.csv"],
    ),
    "verify": (["12"], VerifyView("12", 3, 7, 4096), ["12: sound: 3 artifacts, 7 files, 4.0 KiB hashed again"]),
    "stop": (["12"], StopView("12", "run", "cancelled"), ["run 12 is cancelled"]),
    "gc": (["--dry-run"], GcView(True, 1, 2, 0, 4096), ["would free 4.0 KiB: 1 artifact, 2 blobs"]),
    "backup": (
        ["there"],
        BackupView("there", 5, 1024, 3),
        ["backed up to there: 3 runs, 5 blobs (1.0 KiB)"],
    ),
    "signal": (
        ["flights", "--reason", "new"],
        SignalView("flights", 7, "the next pass of `onejob up` starts a retraining"),
        ["signal 7 for flights: the next pass of `onejob up` starts a retraining"],
    ),
    "promote": (
        ["flights/engine@challenger"],
        PromotionView("flights", "ready", "ab" * 32, "cd" * 32, "probation"),
        ["endpoint flights serves abababababab, in the place of cdcdcdcdcdcd; on probation", "onejob rollback flights"],
    ),
    "rollback": (
        ["flights"],
        PromotionView("flights", "ready", "ab" * 32, "cd" * 32, "rolled_back", "by hand"),
        ["endpoint flights serves abababababab again; cdcdcdcdcdcd was rolled back"],
    ),
    "label": (
        ["flights", "arrived.csv"],
        LabelView(
            "flights", "arrived.csv", accepted=3, refused=1, rows=({"line": 4, "value": "x", "reason": "is no number"},)
        ),
        ["3 labels for flights, 1 row refused", "is no number"],
    ),
    "bench": (
        ["http://127.0.0.1:8000", "--rate", "100"],
        BenchView(
            (TargetView("http://127.0.0.1:8000", "http://127.0.0.1:8000", "POST", "/v2/models/m/infer", 342, "m"),),
            results=(measured("http://127.0.0.1:8000", load_of(1.0, 500)),),
            warnings=("too few",),
        ),
        [
            "POST /v2/models/m/infer of http://127.0.0.1:8000, 342 bytes",
            "open loop at 100/s",
            "500",
            "warning: too few",
        ],
    ),
    "restore": ([__file__], BackupView(__file__, 5, 1024, 3), [f"restored from {__file__}: 3 runs, 5 blobs"]),
}
"""Verb -> arguments, what its command gives, and what must be on the screen."""

ALL_VERBS = sorted(name for verbs in VERBS.values() for name in verbs)


class Calls:
    """Stands for the commands: remembers how they were called, and gives what a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.homes: list[str | None] = []
        monkeypatch.setattr(commands, "open", self._open)

    @contextlib.contextmanager
    def _open(self, home: str | None = None) -> Iterator[str]:
        self.homes.append(home)
        yield "session"

    def give(self, verb: str, result: Any) -> None:
        def command(*args: Any, **kwargs: Any) -> Any:
            self.made.append((args, kwargs))
            if isinstance(result, BaseException):
                raise result
            return result

        self.patch.setattr(commands, verb, command)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.fixture
def onejob(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line: exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(args)
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_every_verb_has_a_result_here() -> None:
    assert sorted(RESULTS) == ALL_VERBS


@pytest.mark.parametrize("verb", ALL_VERBS)
def test_a_verb_draws_its_result(verb: str, calls: Calls, onejob: Run) -> None:
    args, result, expected = RESULTS[verb]
    calls.give(verb, result)
    code, out, err = onejob(verb, *args)
    assert (code, err) == (0, "")
    for text in expected:
        assert text in out
    assert "\x1b" not in out, "no colours into a pipe"


@pytest.mark.parametrize("verb", ALL_VERBS)
def test_a_verb_prints_one_json_document(verb: str, calls: Calls, onejob: Run) -> None:
    args, result, _ = RESULTS[verb]
    calls.give(verb, result)
    code, out, err = onejob(verb, *args, "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    for name in ("job", "ref", "kind", "lineage", "changes", "damaged", "supports", "files"):
        if hasattr(result, name):
            assert name in data


@pytest.mark.parametrize("verb", ALL_VERBS)
@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_has_place_cure_and_exit_code(verb: str, as_json: bool, calls: Calls, onejob: Run) -> None:
    calls.give(verb, NotFoundError("there is no run 99", place="99", cure="`onejob ps -a` lists runs."))
    code, out, err = onejob(verb, *RESULTS[verb][0], *(["--json"] if as_json else []))
    assert code == NotFoundError.exit_code
    if as_json:
        assert json.loads(out)["error"] == {
            "error": "NotFoundError",
            "place": "99",
            "message": "there is no run 99",
            "cure": "`onejob ps -a` lists runs.",
            "exit_code": 3,
        }
        assert err == ""
    else:
        assert err == "error: 99: there is no run 99\ncure: `onejob ps -a` lists runs.\n"
        assert out == ""


def test_run_hands_its_options_on(calls: Calls, onejob: Run) -> None:
    calls.give("run", RUN)
    assert (
        onejob("run", "j.toml", "--set", "a.b=1", "--set", "c.d=2", "--from", "train", "--detach", "--home", "/h")[0]
        == 0
    )
    ((args, kwargs),) = calls.made
    assert args == ("session", "j.toml")
    del kwargs["on_view"]
    assert kwargs == {"sets": ("a.b=1", "c.d=2"), "force": False, "start_from": "train", "detach": True}
    assert calls.homes == ["/h"]


def test_flags_reach_their_commands(calls: Calls, onejob: Run) -> None:
    for verb, args, name in (
        ("ps", ["-a"], "all"),
        ("gc", ["--dry-run"], "dry_run"),
        ("stop", ["12", "--now"], "now"),
        ("logs", ["12", "-f"], "follow"),
    ):
        calls.give(verb, RESULTS[verb][1])
        assert onejob(verb, *args)[0] == 0
        assert calls.made[-1][1][name] is True
        assert onejob(verb, *[a for a in args if not a.startswith("-")])[0] == 0
        assert calls.made[-1][1][name] is False


def test_progress_goes_to_stderr_unless_quiet_or_json(
    calls: Calls, onejob: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(session: str, job: str, *, on_view: Callable[[RunView], None], **more: Any) -> RunView:
        on_view(RUN)
        return RUN

    monkeypatch.setattr(commands, "run", run)
    assert "run 12  data: cached" in onejob("run", "j.toml")[2]
    assert "onejob why 12" in onejob("run", "j.toml")[1]
    for quiet in (["-q"], ["--json"]):
        code, out, err = onejob("run", "j.toml", *quiet)
        assert (code, err) == (0, "")
        assert "onejob why" not in out


def test_all_mistakes_of_a_job_file_are_listed(calls: Calls, onejob: Run) -> None:
    mistakes = ["job.toml [train] lr: must be above 0", "job.toml [train]: unknown key 'epoch'. Did you mean 'epochs'?"]
    calls.give("check", JobFileError(mistakes, place="job.toml"))
    code, _, err = onejob("check")
    assert code == 2
    assert err.splitlines() == ["error: job.toml: 2 mistakes", *(f"  {mistake}" for mistake in mistakes)]
    calls.give("check", JobFileError(mistakes[:1], place="job.toml"))
    assert onejob("check")[2] == f"error: {mistakes[0]}\n"
    assert json.loads(onejob("check", "--json")[1])["error"]["mistakes"] == mistakes[:1]


@pytest.mark.parametrize("error", [RankError("rank 1 died"), StoreError("read-only"), CancelledError("stopped")])
def test_exit_codes_come_from_the_tree(error: Exception, calls: Calls, onejob: Run) -> None:
    calls.give("run", error)
    assert onejob("run")[0] == type(error).exit_code  # type: ignore[attr-defined]


def test_a_bug_names_the_file_with_its_traceback(
    calls: Calls, onejob: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    calls.give("ps", KeyError("gpu"))
    code, out, err = onejob("ps")
    assert (code, out) == (70, "")
    assert "error: this is a bug of onejob: KeyError: 'gpu'" in err
    (kept,) = tmp_path.iterdir()
    assert str(kept) in err
    assert "Traceback" in kept.read_text()
    assert "Traceback" not in err
    assert "Traceback" in onejob("ps", "-v")[2]


def test_ctrl_c_ends_with_130(calls: Calls, onejob: Run) -> None:
    calls.give("ps", KeyboardInterrupt())
    code, out, err = onejob("ps")
    assert (code, out, err.strip()) == (130, "", "stopped")


def test_damage_and_lacks_are_told_by_the_exit_code_too(calls: Calls, onejob: Run) -> None:
    damage = Damage(DIGEST, "checkpoint", "model.safetensors", "damaged", "/blobs/91/91bc", "run the job again")
    calls.give("verify", VerifyView("12", 3, 7, 4096, (damage,)))
    code, out, _ = onejob("verify", "12")
    assert code == 6
    assert "model.safetensors" in out
    assert "/blobs/91/91bc" in out
    calls.give(
        "check",
        CheckView("f", "job.toml", missing=(Support("torch", "engine", False, "not installed", "pip install torch"),)),
    )
    code, out, _ = onejob("check")
    assert code == 8
    assert "missing: engine torch: not installed\n  cure: pip install torch" in out
    calls.give("doctor", DoctorView("0.1.0", "/h", problems=("no disk",)))
    assert onejob("doctor")[0] == 8


def test_a_wrong_word_gets_the_nearest_right_one(onejob: Run) -> None:
    code, _, err = onejob("chekc")
    assert code == 2
    assert "there is no verb 'chekc'. Did you mean 'check'?" in err
    assert "cure: `onejob --help` explains it." in err


def test_wrong_arguments_name_the_verb(onejob: Run, calls: Calls) -> None:
    code, _, err = onejob("show")
    assert code == 2
    assert err.startswith("error: onejob show: Missing argument 'REF'")
    code, out, _ = onejob("run", "--force", "--from", "train", "--json")
    assert code == 2
    assert "give one of --force and --from" in json.loads(out)["error"]["message"]


def test_schema_needs_no_home(calls: Calls, onejob: Run) -> None:
    calls.give("schema", {"type": "object"})
    code, out, _ = onejob("check", "--schema")
    assert (code, json.loads(out), calls.homes) == (0, {"type": "object"}, [])


def test_the_help_of_the_whole_lists_verbs_by_what_one_wants(onejob: Run) -> None:
    code, out, _ = onejob("--help")
    assert code == 0
    assert [line for line in out.splitlines() if line in {f"{title}:" for title in VERBS}] == [
        f"{title}:" for title in VERBS
    ]
    for verbs in VERBS.values():
        for verb, text in verbs.items():
            assert f"  {verb}" in out
            assert text.split()[0] in out


CHOICE = {
    "chosen": "fp32",
    "why": "fp32 answers one row in 0.5 ms.",
    "metric": "auc",
    "reference": 0.7031,
    "rows": 1200,
    "budget": {"metric": "auc", "drop": 0.005},
    "candidates": {
        "fp32": {
            "accepted": True,
            "metric": 0.7031,
            "drop": 0.0,
            "size": 2048,
            "reason": "the same outputs",
            "latency": [
                {"batch": 1, "p50_ms": 0.5, "rows_per_second": 2000.0},
                {"batch": 64, "p50_ms": 2.5, "rows_per_second": 25600.0},
            ],
        },
        "int8": {"accepted": False, "reason": "loses too much of auc", "metric": None, "drop": None, "latency": []},
    },
}


def test_candidates_are_a_table_with_figures_verdicts_and_reasons(calls: Calls, onejob: Run) -> None:
    execution = ExecutionView("e1f2a3b4c5d6e7f8", "optimize.choose", "flights", 12, "done", measured=CHOICE)
    calls.give("show", ShowView("12/optimize.choose", "step", executions=(execution,)))
    out = onejob("show", "12/optimize.choose")[1]
    lines = [line.split() for line in out.splitlines()]
    assert ["fp32", "chosen", "0.7031", "0.0000", "0.5", "ms", "25,600", "2.0", "KiB"] in lines
    assert ["int8", "rejected", "-", "-", "-", "-", "-"] in lines
    assert "int8: loses too much of auc" in out
    assert "the checkpoint itself: auc 0.7031 on 1,200 held-out rows; may be lost: 0.005" in out
    calls.give("show", ShowView("12/optimize.choose", "step", executions=(execution,)))
    assert "budget.drop" in onejob("show", "12/optimize.choose", "-v")[1], "-v leaves nothing out"


def test_an_endpoint_says_where_to_ask_and_how_it_is_doing(calls: Calls, onejob: Run) -> None:
    counted = {"requests": 1234, "errors": 2, "rows": 5000, "p50_ms": 0.8, "p90_ms": 1.2, "p99_ms": 3.4}
    calls.give("show", ShowView("flights", "endpoint", endpoint=RUN.endpoint, details=counted))
    out = onejob("show", "flights")[1]
    assert "asked at         http://127.0.0.1:8080/v1/models/flights:predict" in out
    assert "p50 0.8 ms, p90 1.2 ms, p99 3.4 ms" in out
    assert ["errors", "2"] in [line.split() for line in out.splitlines()]


def test_a_tree_keeps_its_indentation_in_a_narrow_window() -> None:
    long = "flights/engine@champion, flights/engine@latest"
    drawn = output.plain(trace.tree((Node(0, "request", "r-1"), Node(2, "engine", long, DIGEST, "x " * 30))), width=60)
    lines = [line[:24] for line in drawn.splitlines()[3:]]
    assert len(lines) > 1, "it is folded"
    assert all(line.startswith("    ") for line in lines)


def test_advice_can_be_pasted_and_names_the_home_that_was_named(calls: Calls, onejob: Run, tmp_path: Path) -> None:
    home = tmp_path / "a home"
    calls.give("run", RUN)
    lines = onejob("run", "job.toml", "--home", str(home))[1].splitlines()
    assert f"onejob show 12 --home '{home}'" in lines
    calls.give("run", RUN)
    assert "onejob show 12" in onejob("run", "job.toml")[1].splitlines()
    calls.give("run", RUN)
    assert "onejob show" not in onejob("run", "job.toml", "-q")[1]


def test_a_demo_shows_each_row_beside_its_answer(calls: Calls, onejob: Run) -> None:
    question = {"instances": [{"carrier": "UA", "hour": 5}, {"carrier": "B6", "hour": 9}]}
    answer = {"predictions": [{"probability": 0.25}, {"probability": 0.5}], "onejob_request_id": "r-1"}
    calls.give("demo", DemoView("flights", "flights", RUN, question, answer, "curl -s x"))
    out = onejob("demo")[1]
    assert any("carrier B6" in line and "probability 0.5" in line for line in out.splitlines())
    assert "r-1" in out


def test_why_in_full_names_modules_not_each_function(calls: Calls, onejob: Run) -> None:
    code = {"project": {"helper.py": {"digest": DIGEST, "parts": {"function scale": OTHER, "function f": OTHER}}}}
    why = StepWhy("train", 12, "ran", "first time", components={"seed": 7, "code": code})
    calls.give("why", WhyView("12/train", (why,)))
    assert "helper.py" not in onejob("why", "12/train")[1]
    out = onejob("why", "12/train", "-v")[1]
    assert ["code.project.helper.py", DIGEST[:12]] in [line.split() for line in out.splitlines()]
    assert "scale" not in out


def test_diff_leaves_lists_to_json(calls: Calls, onejob: Run) -> None:
    changes = (Change("train.options.lr", 0.1, 0.2, "lr"), Change("measured.steps", [1], [2]))
    code = Change("train.code.project", DIGEST, OTHER, "helper.py changed (function scale)")
    calls.give("diff", DiffView("11", "12", (*changes, code)))
    out = onejob("diff", "11", "12")[1]
    assert "measured.steps" not in out
    assert "and 1 list: --json has them" in out
    assert "function scale" in out
    calls.give("diff", DiffView("11", "12"))
    assert onejob("diff", "11", "12")[1] == "11 and 12 don't differ\n"


def test_nothing_yet_is_a_hint(calls: Calls, onejob: Run) -> None:
    calls.give("ps", ListView())
    assert "onejob demo flights" in onejob("ps")[1]

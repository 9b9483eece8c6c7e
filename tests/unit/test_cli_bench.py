"""`onejob bench`: its options are read or refused, its result is drawn, and a load is told as it goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_world import World
from rich.console import Group

from onejob.cli import bench, curves, main, output
from onejob.errors import OnejobError, UsageError
from onejob.loop import commands
from onejob.loop.commands.bench import BenchView, Look, TargetView, Tick, Wish
from onejob.serve.bench.outcome import Outcome, Ratio
from onejob.serve.bench.report import Searched, Step, measured
from onejob.serve.bench.schedule import CLOSED, OPEN, PACED, Load
from onejob.serve.bench.search import Goals
from onejob.serve.bench.wish import loads_of

URL = "http://127.0.0.1:8000"
Run = Callable[..., tuple[int, str, str, Wish]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A command line with a command that measures nothing: exit code, stdout, stderr, what was asked for."""

    def run(*args: str, view: BenchView | None = None) -> tuple[int, str, str, Wish]:
        asked: list[Wish] = []

        def command(session: Any, targets: Any, wish: Wish, *, on_look: Any) -> BenchView:
            assert session is None, "URLs need no home"
            asked.append(wish)
            on_look(Look(URL, "closed loop, 16 connections", 1, 1, 10.0, ()))
            loads_of(wish)
            return view or BenchView((), (measured(URL, outcome()),))

        monkeypatch.setattr(commands, "bench", command)
        with pytest.raises(SystemExit) as end:
            main(["bench", URL, *args])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err, asked[0] if asked else Wish()

    return run


def outcome(load: Load | None = None, *, ms: float = 1.0, count: int = 1000) -> Outcome:
    made = Outcome(load or Load(CLOSED, 16), seconds=2.0, arrived=count)
    made.latency.record([round(ms * 1e6)] * count)
    return made


def test_options_are_read(run: Run, tmp_path: Path) -> None:
    body = tmp_path / "body.jsonl"
    body.write_text('{"a": 1}\n\n{"a": 2}\n')
    core = min(os.sched_getaffinity(0))
    args = "-m mlp -c 1,8 --arrivals even -d 2m --warmup 0 --timeout 500ms --turns 3 -b 4 --format json -p 1 --seed 7"
    more = f"--shape a:b:3,4 --cpus {core} --method put -n 1000"
    code, _, _, wish = run(*args.split(), *more.split(), "--data", str(body), "-H", "A: b", "-H", "C: d:e")
    assert code == 0
    assert wish == Wish(
        connections=(1, 8),
        arrivals="even",
        seconds=120.0,
        requests=1000,
        warmup=0.0,
        timeout=0.5,
        rounds=3,
        processes=1,
        cpus=(core,),
        model="mlp",
        batch=4,
        form="json",
        shapes={"a:b": (3, 4)},
        data=(b'{"a": 1}', b'{"a": 2}'),
        data_type="application/json",
        headers=(("A", "b"), ("C", "d:e")),
        method="PUT",
        seed=7,
    )


def test_rates_and_goals_are_read(run: Run) -> None:
    assert loads_of(run()[3]) == [Load(CLOSED, 16)]
    assert loads_of(run("--rate", "100,2e3")[3]) == [Load(OPEN, 128, 100.0), Load(OPEN, 128, 2000.0)]
    assert loads_of(run("--rate", "100", "--closed")[3]) == [Load(PACED, 16, 100.0, None, "even")]
    assert loads_of(run("--ramp", "10:500")[3]) == [Load(OPEN, 128, 10.0, 500.0)]
    assert run("--slo", "p99_ms=10", "--slo", "errors=0.5%")[3].goals == Goals({"p99": 10.0}, 0.005)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--rate 0", "--rate: '0' is not a number above zero"),
        ("--rate nan", "'nan' is not a number"),
        ("--connections 1.5", "not a whole number above zero"),
        ("--duration soon", "a duration is a number of seconds"),
        ("--duration 0", "no time to wait"),
        ("--ramp 5", "is no ramp"),
        ("--ramp 1:2 --rate 3", "a ramp has its own rates"),
        ("--ramp 1:2 -n 5", "a ramp takes its time"),
        ("--closed", "a closed loop is what there is without --rate"),
        ("--rate 1,2 -c 1,2", "only one of them may be a list"),
        ("--slo p99_ms=1 --rate 1,2", "the search chooses the rates"),
        ("-c 1 -p 2", "2 processes can't share 1 connections"),
        ("--cpus 4096", "core 4096 can't be used here"),
        ("--cpus a", "names no core"),
        ("--shape x", "is no shape"),
        ("--slo fast", "is no goal"),
        ("--header x", "is no header"),
        ("--data nowhere.json", "it can't be read"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_is_sent(run: Run, args: str, words: str) -> None:
    code, out, err, _ = run(*args.split())
    assert code in (2, 3)
    assert words in err
    assert out == ""


def test_an_empty_file_of_bodies_is_refused(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "b.ndjson"
    empty.write_text("\n")
    assert "it has no lines" in run("--data", str(empty))[2]


def test_exit_codes(run: Run) -> None:
    assert run()[0] == 0
    assert run(view=BenchView((), (measured(URL, Outcome(Load(CLOSED, 1), seconds=1.0)),)))[0] == 9
    assert run(view=BenchView((), (measured(URL, outcome()),), interrupted=True))[0] == 130
    none = Searched(URL, "p99 <= 1 ms", None, 5.0, ())
    assert run(view=BenchView((), searches=(none,)))[0] == 9


def test_the_document_is_whole(run: Run) -> None:
    code, out, err, _ = run("--json")
    assert (code, err) == (0, "")
    (result,) = json.loads(out)["results"]
    assert result["latency_ms"]["p50"] == pytest.approx(1.0, rel=0.001)
    assert result["settings"]["loop"] == "closed"
    assert result["requests_per_s"] == 500


def test_two_targets_are_drawn_side_by_side() -> None:
    load = Load(CLOSED, 16)
    view = BenchView(
        targets=(
            TargetView("a", "http://a", "POST", "/v2/models/m/infer", 10, "m", "binary tensors", 2),
            TargetView("http://b", "http://b", "GET", "/x", 0),
        ),
        results=(measured("a", outcome(load)), measured("http://b", outcome(load, ms=2.0, count=500))),
        ratios=(
            Ratio("requests_per_s", str(load), "http://b", "a", 0.5, 0.45, 0.55, 5),
            Ratio("cpu_us", str(load), "http://b", "a", 2.0, None, None, 1),
        ),
    )
    text = output.plain(bench.render(view))
    assert "a  POST /v2/models/m/infer of http://a, 10 bytes (binary tensors, batch 2)" in text
    assert "GET /x of http://b, 0 bytes" in text
    rows = [line.split() for line in text.splitlines()]
    assert [row[1] for row in rows if row[:1] == ["a"] and row[1] != "POST"] == ["500"]
    assert ["http://b", "requests/s", "0.500", "0.450", "to", "0.550"] in rows
    assert ["http://b", "CPU", "a", "request", "2.000", "one", "turn:", "none"] in rows
    assert "not corrected for coordinated omission: a closed loop has no schedule" in text
    assert "a: sent 0 B/s, received 0 B/s; sending took 0 us of CPU a request, 0.00 cores" in text


def test_errors_are_told_by_kind_with_their_words() -> None:
    failed = outcome()
    failed.errors.update({"status 503": 7, "timeout": 1})
    failed.samples["status 503"] = '{"error":\n "the queue is full"}'
    failed.unfinished = 3
    text = output.plain(bench.render(BenchView((), (measured(URL, failed),), interrupted=True)))
    assert '7 x status 503: {"error": "the queue is full"}' in text
    assert "1 x timeout" in text
    assert "3 requests without an answer yet" in text
    assert "stopped: the figures are of the time until then" in text


def test_a_search_is_drawn_step_by_step() -> None:
    latency = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "p99.9": 4.0, "max": 5.0}
    steps = (Step(100.0, 99.0, latency, 0, True, ""), Step(200.0, 150.0, latency, 9, False, "p99 3 ms"))
    search = Searched("a", "p99 <= 2 ms", 100.0, 200.0, steps)
    text = output.plain(bench.render(BenchView((), searches=(search,))))
    assert "kept up to 100/s; 200/s didn't" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["100", "99", "1", "2", "3", "4", "5", "0", "held"] in rows
    assert ["200", "150", "1", "2", "3", "4", "5", "9", "p99", "3", "ms"] in rows
    assert "no rate kept it" in output.plain(bench.ended(Searched("a", "", None, 1.0, ())))


def ticks(count: int) -> tuple[Tick, ...]:
    return tuple(Tick(0.5 * (n + 1), 0.5, 50 * (n + 1), n, 1.0, 2.0 + n) for n in range(count))


def test_into_a_pipe_goes_a_line_a_second() -> None:
    written: list[str] = []
    on_look = curves.logging(written.append)
    for number in (1, 2):
        for count in range(7):
            on_look(Look("a", "closed loop, 16 connections", number, 2, 3.0, ticks(count)))
    assert written[:4] == [
        "turn 1 of 2  a: closed loop, 16 connections\n",
        "  1.0 s  200/s  p50 1 ms  p99 3 ms  errors 1\n",
        "  2.0 s  400/s  p50 1 ms  p99 5 ms  errors 3\n",
        "  3.0 s  600/s  p50 1 ms  p99 7 ms  errors 5\n",
    ]
    assert len(written) == 8
    long: list[str] = []
    on_look = curves.logging(long.append)
    for count in range(200):
        on_look(Look("a", "x", 1, 1, 100.0, ticks(count)))
    assert len(long) == 10, "a tenth of a long turn"


def test_on_a_terminal_both_curves_are_drawn() -> None:
    drawn = output.plain(Group(curves.draw(Look("a", "closed loop", 3, 0, None, ticks(8)))))
    assert drawn.startswith("turn 3  a: closed loop\n4.0 s  800/s")
    assert drawn.count("┤") == 2 * curves.PLOT_HEIGHT
    assert "requests/s by second: 800" in drawn
    assert "p99 ms by second: 9" in drawn
    assert "┤" not in output.plain(Group(curves.draw(Look("a", "closed loop", 1, 1, None, ()))))


def test_progress_is_quiet_where_nobody_asked_for_it(run: Run) -> None:
    assert run()[2] == f"{URL}: closed loop, 16 connections\n"
    assert run("-q")[2] == run("--json")[2] == ""


def test_a_missing_package_has_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onejob.plugins.is_missing", lambda module: module == "uvloop")
    with pytest.raises(OnejobError, match=r"onejob\[serve\]"):
        commands.bench(None, [URL], Wish(), on_look=print)


def test_a_name_that_is_no_endpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = World(tmp_path, monkeypatch).supervisor()
    session.ledger.want_endpoint("tiny", artifact="ab" * 32, execution=None, options={})
    with pytest.raises(OnejobError, match="endpoint tiny: it is starting"):
        commands.bench(session, ["tiny"], Wish(), on_look=print)
    with pytest.raises(UsageError, match="a job, not an endpoint"):
        commands.bench(session, ["job.toml"], Wish(), on_look=print)

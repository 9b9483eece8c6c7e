"""The year of a demo: months, forecasts and figures; replayed traffic; what is told of it; the verb that plays it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onejob.cli import main
from onejob.cli import year as drawn
from onejob.core.records import Signal
from onejob.core.traffic import moment
from onejob.errors import DataError, JobFileError, NotFoundError
from onejob.families.tabular.metrics import score
from onejob.loop import commands, replay
from onejob.loop.commands.run import load_job
from onejob.loop.commands.start import copy_example
from onejob.loop.commands.year import (
    YearView,
    told_rows,
)
from onejob.loop.replay import Asker, Rows, by_month, known_by, plain, read_rules, replay_job, rows_of
from onejob.loop.story import _signals
from onejob.loop.views import DemoView, EndpointView, RunView
from onejob.loop.year import Figures, Month, Verdict, Year, constant_forecast, drawing, figures, months_of, verdict_of

DAY = 86400.0
MARCH = 1362114000.0
"""Midnight of 1 March 2013 in New York."""
ROLES = {"label": "late", "time": "departs", "id": "flight", "categories": ["carrier"], "numbers": ["distance"]}


def month(name: str, *, promoted: bool = False, **policies: tuple[float, float]) -> Month:
    given = {"static": (0.6, 0.6), "loop": (0.7, 0.5), "always": (0.7, 0.52), "constant": (0.5, 0.62), **policies}
    told = {policy: Figures(*pair) for policy, pair in given.items()}
    return Month(name, 1000, 0.25, told, Verdict("promote", "proven"), promoted, ("run 7: retrained",))


def rows(count: int = 5, step: float = DAY) -> Rows:
    carriers = np.array(["UA", None, "B6", "AA", "UA"] * count, object)[:count]
    distance = np.array([100.0, 200.0, math.nan, 400.0, 500.0] * count)[:count]
    keys = np.array([f"f{n}" for n in range(count)], object)
    return Rows(
        {"carrier": carriers, "distance": distance}, MARCH + step * np.arange(count), keys, np.arange(count) % 2
    )


# ---- figures -----------------------------------------------------------------------------------------------------


def test_months_go_by_the_clock_of_the_zone() -> None:
    times = np.array([MARCH - 60, MARCH, MARCH + 31 * DAY - 3700, MARCH + 31 * DAY - 3500])
    assert months_of(times, "America/New_York") == ["2013-02", "2013-03", "2013-03", "2013-04"]
    assert months_of(times[:1], "UTC") == ["2013-03"]


def test_the_constant_forecast_knows_only_labels_that_had_come() -> None:
    time = MARCH + np.repeat(np.arange(4), 300) * DAY + np.tile(np.arange(300.0), 4)
    label = np.repeat([1.0, 0.0, 0.0, 0.0], 300)
    found = constant_forecast(time, label, DAY, "America/New_York", 0.3, 28 * DAY).reshape(4, 300)
    assert found[0, 0] == found[1, 0] == pytest.approx(0.3), "nothing was known but the training rows"
    assert found[2, 0] > 0.99, "of the second day nothing is known yet"
    assert 0.4 < found[3, 0] < 0.6
    assert all(len(set(day.tolist())) == 1 for day in found)


def test_figures_leave_out_what_was_not_answered() -> None:
    label = np.array([0.0, 1.0, 0.0, 1.0])
    assert figures(score, label, np.array([0.1, 0.9, 0.2, math.nan])).auc == 1.0
    lone = figures(score, label[:1], np.array([0.5]))
    assert math.isnan(lone.auc)
    assert lone.log_loss == pytest.approx(math.log(2))
    assert lone.to_json() == {"auc": None, "log_loss": pytest.approx(math.log(2))}


def test_the_newest_decision_of_a_month_counts() -> None:
    assert verdict_of([]).decision == "none"
    two = [("hold", ["few blocks"], "held"), ("promote", ["proven", "sure"], "promoted")]
    assert verdict_of(two) == Verdict("promote", "proven; sure")
    waits = verdict_of([("promote", ["proven"], "waits for a person")])
    assert waits.reason == "proven; waits for a person"


def test_a_year_as_data_has_exactly_this_shape() -> None:
    year = Year((month("2013-03"), month("2013-04", loop=(0.8, 0.4))), 2, 123.456)
    assert year.to_json() == {
        "months": [
            {
                "month": name,
                "n": 1000,
                "late_share": 0.25,
                "static": {"auc": 0.6, "log_loss": 0.6},
                "loop": {"auc": auc, "log_loss": loss},
                "always": {"auc": 0.7, "log_loss": 0.52},
                "gate": {"decision": "promote", "reason": "proven"},
            }
            for name, auc, loss in (("2013-03", 0.7, 0.5), ("2013-04", 0.8, 0.4))
        ],
        "mean": {
            "static": {"auc": 0.6, "log_loss": 0.6},
            "loop": {"auc": 0.75, "log_loss": 0.45},
            "always": {"auc": 0.7, "log_loss": 0.52},
        },
        "failed_requests": 2,
        "seconds": 123.5,
    }


def test_a_plot_has_every_policy_but_no_auc_of_a_constant() -> None:
    told = drawing(Year((month("2013-03", promoted=True), month("2013-04")), 0, 1.0))
    assert list(told["curves"]["auc"]) == ["static", "loop", "always"]
    assert told["curves"]["log_loss"]["constant"] == [0.62, 0.62]
    assert (told["promoted"], told["shares"]) == ([True, False], [0.25, 0.25])


def test_a_plot_is_an_svg_and_a_png_and_the_svg_has_the_same_bytes_again(tmp_path: Path) -> None:
    from onejob.engines.plot import draw_months

    told = drawing(Year((month("2013-03", promoted=True), month("2013-04")), 0, 1.0))
    svg, png = draw_months(tmp_path / "year", **told)
    assert png.read_bytes()[:4] == b"\x89PNG"
    again, _ = draw_months(tmp_path / "again", **told)
    assert again.read_bytes() == svg.read_bytes()
    assert svg.read_text().startswith("<?xml")


# ---- traffic -----------------------------------------------------------------------------------------------------


def test_rows_are_asked_in_the_order_of_time_with_the_label_apart() -> None:
    times = np.array(["2013-03-02", "2013-03-01", "2013-03-02"], "datetime64[us]")
    columns = {
        "carrier": np.array(["b", "a", "c"], object),
        "distance": np.array([2.0, 1.0, 3.0]),
        "late": np.array([0, 1, 1]),
        "departs": times,
        "flight": np.array(["two", "one", "three"], object),
    }
    found = rows_of(columns, ROLES)
    assert found.key.tolist() == ["one", "two", "three"]
    assert found.label.tolist() == [1, 0, 1]
    assert found.time.tolist() == [1362096000.0, 1362182400.0, 1362182400.0]
    assert list(found.columns) == ["carrier", "distance"]
    with pytest.raises(DataError, match="only rows with a time and a key"):
        rows_of(columns, {**ROLES, "id": None})
    with pytest.raises(DataError, match="only rows with a time and a key"):
        rows_of({**columns, "departs": np.array([1.0, 2.0, 3.0])}, ROLES)


def test_a_label_is_known_a_delay_after_its_event_and_told_once() -> None:
    given = rows(5)
    assert known_by(given, MARCH + 2 * DAY, DAY, 0) == slice(0, 2)
    assert known_by(given, MARCH + 4 * DAY, DAY, 2) == slice(2, 4)
    assert known_by(given, MARCH, DAY, 0) == slice(0, 0)


def test_months_are_stretches_of_rows() -> None:
    assert list(by_month(np.arange(4.0), ["a", "a", "b", "c"])) == [
        ("a", slice(0, 2)),
        ("b", slice(2, 3)),
        ("c", slice(3, 4)),
    ]


def test_what_is_not_known_is_null() -> None:
    assert plain(np.array([1.0, math.nan])) == [1.0, None]
    assert plain(np.array(["a", None], object)) == ["a", None]


class FakeConnection:
    """Answers half for each row; the requests numbered in `broken` fail."""

    def __init__(self, broken: Mapping[int, Any] | None = None) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.broken = broken or {}
        self.closed = 0

    def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        self.sent.append((path, json.loads(body)))

    def getresponse(self) -> Any:
        path, message = self.sent[-1]
        bad = self.broken.get(len(self.sent))
        if isinstance(bad, Exception):
            raise bad
        if path.endswith("labels"):
            return Reply(200, {"accepted": len(message["labels"]), "refused": 0})
        count = message["inputs"][0]["shape"][0]
        return Reply(bad or 200, {"outputs": [{"name": "probability", "data": [0.5] * count}]})

    def close(self) -> None:
        self.closed += 1


class Reply:
    def __init__(self, status: int, body: Any) -> None:
        self.status, self.body = status, body

    def read(self) -> bytes:
        return json.dumps(self.body).encode()

    def getheaders(self) -> list[tuple[str, str]]:
        return [("X-Request-Id", "r-9"), ("X-Onejob-Engine", "e1")]


def asker(monkeypatch: pytest.MonkeyPatch, fake: FakeConnection) -> Asker:
    monkeypatch.setattr(replay.http.client, "HTTPConnection", lambda *args, **kwargs: fake)
    return Asker("http://127.0.0.1:1234", "flights", ROLES)


def test_a_request_carries_inputs_time_and_key_and_never_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeConnection()
    answers = asker(monkeypatch, fake).ask(rows(5), size=2)
    assert [path for path, _ in fake.sent] == ["/v2/models/flights/infer"] * 3
    first = {each["name"]: each for each in fake.sent[0][1]["inputs"]}
    assert list(first) == ["carrier", "distance", "departs", "flight"]
    assert first["carrier"] == {"name": "carrier", "datatype": "BYTES", "shape": [2], "data": ["UA", None]}
    assert first["departs"]["data"] == [MARCH, MARCH + DAY]
    assert fake.sent[1][1]["inputs"][1]["data"] == [None, 400.0]
    assert answers.chance.tolist() == [0.5] * 5
    assert (answers.requests, answers.failed, answers.last_id, answers.engines) == (3, 0, "r-9", {"e1": 5})


def test_a_request_that_fails_is_counted_and_its_rows_have_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeConnection({1: ConnectionResetError("gone"), 3: 503})
    answers = asker(monkeypatch, fake).ask(rows(5), size=2)
    assert np.isnan(answers.chance).tolist() == [True, True, False, False, True]
    assert (answers.requests, answers.failed, answers.engines) == (3, 2, {"e1": 2})
    assert answers.errors[0] == "ConnectionResetError: gone"
    assert "503" in answers.errors[1]
    assert fake.closed == 2, "the next request opens the connection anew"


def test_labels_carry_the_time_at_which_they_became_known(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeConnection()
    assert asker(monkeypatch, fake).tell(rows(2), DAY) == 2
    path, message = fake.sent[0]
    assert path == "/v1/models/flights/labels"
    assert message["labels"] == [
        {"flight": "f0", "late": 0, "label_time": MARCH + DAY},
        {"flight": "f1", "late": 1, "label_time": MARCH + 2 * DAY},
    ]
    assert asker(monkeypatch, FakeConnection()).tell(rows(0), DAY) == 0


# ---- the example -------------------------------------------------------------------------------------------------


def test_the_rows_of_the_year_are_made_by_the_jobs_own_steps(tmp_path: Path) -> None:
    place = copy_example("flights", tmp_path / "flights")
    job, rules = load_job(place), read_rules(place)
    assert rules.delay == DAY
    year = replay_job(job, rules)
    assert (year.name, list(year.stages)) == ("flights-replay", ["data"])
    before, after = job.stages["data"], year.stages["data"]
    assert [step.name for step in after.steps] == [step.name for step in before.steps if step.name != "split"]
    changed = [(a.options, b.options) for a, b in zip(before.steps, after.steps, strict=False) if a != b]
    assert changed == [
        (
            {"first": "2013-01-01", "last": "2013-02-28", "late_after": 15},
            {"first": "2013-03-01", "last": "2013-12-31", "late_after": 15},
        )
    ]
    assert after.columns == before.columns
    assert after.expect.holdout_min is None
    assert after.expect.unique == before.expect.unique
    with pytest.raises(JobFileError, match="changes the step 'mine:own', which isn't there: drop_duplicates"):
        replay_job(job, rules.model_copy(update={"step": "mine:own"}))


def test_the_examples_questions_are_older_than_its_year(tmp_path: Path) -> None:
    place = copy_example("flights", tmp_path / "flights")
    asked = json.loads((place / "example_request.json").read_text())["instances"]
    latest = max(moment(row["departs"]) for row in asked)
    assert latest < moment("2013-03-01T00:00:00-05:00"), "else the loop's clock, the newest event, would run ahead"


def test_mistakes_in_the_rules_of_a_year_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no year to play"):
        read_rules(tmp_path)
    (tmp_path / "year.toml").write_text("step = 'a'\noptions = {}\ndelays = '1d'\n")
    with pytest.raises(JobFileError, match=r"year.toml delays"):
        read_rules(tmp_path)
    (tmp_path / "year.toml").write_text("step = ")
    with pytest.raises(JobFileError, match="is not TOML"):
        read_rules(tmp_path)
    assert commands.has_year(tmp_path)
    assert not commands.has_year(tmp_path / "other")


# ---- what is told ------------------------------------------------------------------------------------------------


def test_signals_are_told_in_their_own_unit() -> None:
    def told(kind: str, value: float, threshold: float) -> str:
        given = Signal(1, "flights", kind, "2013-04-25", value, threshold, {}, None, None, 0, 0.0, 0.0, 7)
        return next(iter(_signals([given], ""))).text

    assert told("harm", 132.07, 100) == "harm of 2013-04-25: 132.1, 100 is the threshold"
    assert told("labels", 36639.0, 20000) == "labels of 2013-04-25: 36,639 fresh ones, 20,000 are asked"
    days = "schedule of 2013-04-25: 31.0 days since the last retraining, 30 are allowed"
    assert told("schedule", 31 * DAY, 30 * DAY) == days


def test_rows_are_told_with_what_came_back() -> None:
    splits = {"train": {"rows": 67883}, "holdout": {"rows": 9136}}
    assert told_rows({"splits": splits}) == "67,883 rows from the sources"
    assert told_rows({"splits": splits, "extended": {"captured_rows": 27010}}) == (
        "67,883 rows (27,010 came back, of which the newest 9,136 are held out)"
    )


def test_a_month_is_a_line_with_its_story_beneath() -> None:
    lines = drawn.block(month("2013-04", static=(math.nan, 0.7))).splitlines()
    assert lines[0].startswith("2013-04  1,000 flights, 25.0% late")
    assert "static - / 0.700" in lines[0]
    assert "loop 0.700 / 0.500" in lines[0]
    assert "constant 0.620" in lines[0]
    assert lines[1].strip() == "run 7: retrained"


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The demo without its work: what is in the list was asked for."""
    made: list[Any] = []
    endpoint = EndpointView("flights", "ready", "http://127.0.0.1:8080")
    view = DemoView(
        "flights", "flights", RunView("flights", 1, "done", endpoint=endpoint), tries=(("onejob show 1", "the run"),)
    )
    year = Year((month("2013-03"), month("2013-04")), 0, 10.0)

    def demo(*args: Any, **kwargs: Any) -> DemoView:
        made.append(kwargs["year"])
        return view

    def play(session: Any, folder: str, on_month: Any, on_view: Any) -> YearView:
        made.append("played")
        for each in year.months:
            on_month(each)
        return YearView("flights", year, "c" * 64, ("engine cccc", "its base"), ("flights/year/year.svg",))

    monkeypatch.setattr(commands, "demo", demo)
    monkeypatch.setattr(commands, "has_year", lambda folder: True)
    monkeypatch.setattr(commands, "play_year", play)
    monkeypatch.setenv("ONEJOB_HOME", str(tmp_path / "home"))
    return made


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["demo", *args])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_the_demo_plays_its_year_and_ends_with_a_table(played: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "flights")
    assert (code, err, played) == (0, "", [True, "played"])
    assert out.index("2013-03  1,000 flights") < out.index("The year: 2,000 flights, no request failed")
    means = next(line for line in out.splitlines() if line.startswith("mean"))
    assert "0.600 / 0.600" in means
    assert "0.700 / 0.500" in means
    for text in ("engine cccc", "wrote flights/year/year.svg", "onejob why flights", "onejob show 1"):
        assert text in out


def test_the_second_demo_in_a_home_says_that_the_year_was_played(
    played: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "looked_after", lambda session, view: True)
    code, out, err = call(capsys, "flights")
    assert (code, err, played) == (0, "", [True])
    assert "Its year was played in this home before" in out


def test_without_its_year_the_demo_stops_after_the_answer(
    played: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "flights", "--no-year")
    assert (code, played) == (0, [False])
    assert "The year" not in out
    assert "onejob why flights" not in out


def test_json_with_a_file_writes_the_year_there_and_prints_text(
    played: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    code, out, _ = call(capsys, "flights", "--json", str(file))
    data = json.loads(file.read_text())
    assert (code, list(data)) == (0, ["months", "mean", "failed_requests", "seconds"])
    assert "The year: 2,000 flights" in out
    code, out, _ = call(capsys, "flights", "--json")
    assert json.loads(out)["year"] == data, "alone it prints the one document of every verb"
    assert call(capsys, "--json", "flights")[0] == 2
    code, out, _ = call(capsys, "--json", str(tmp_path / "no" / "such.json"))
    assert code == 2
    assert "there is no such folder" in out

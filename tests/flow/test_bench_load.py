"""`onejob bench` on real servers: stalls of known length, rates, errors of every kind, servers that die, a person who
stops it, two servers side by side, and an endpoint of ours."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import Server, answering
from served_models import Endpoint, endpoint, save_affine

from onejob.errors import BadRequestError, InferenceError, NotFoundError, StepError
from onejob.loop import commands
from onejob.loop.commands.bench import BenchView, Look, Measured, Wish, parse_goals
from onejob.machines import processes
from onejob.serve.bench.schedule import OPEN, Load, arrivals
from onejob.testing.processes import no_orphans, wait_until

QUICK = {"warmup": 0.0, "connections": (8,)}


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with no_orphans():
        yield


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with answering() as server:
        yield server


def bench(*urls: str, **wish: Any) -> BenchView:
    return commands.bench(None, urls, Wish(**{**QUICK, **wish}), on_look=lambda look: None)


def one(url: str, **wish: Any) -> Measured:
    (result,) = bench(url, **wish).results
    return result


def figure(result: Measured, name: str) -> float:
    value = result.latency_ms[name]
    assert value is not None
    return value


def test_a_stall_is_in_the_percentiles_though_it_met_one_request_only() -> None:
    """Deaf for a second of four: a quarter of what was due waited from a second down to nothing.

    One connection sends nothing meanwhile, so from sending on all answers but one are quick.
    """
    with answering("--stall", 51, 1.0) as server:
        result = one(server.url, rates=(100.0,), arrivals="even", seconds=4.0, connections=(1,))
    assert result.requests == 400
    assert result.errors == 0
    raw = result.uncorrected_ms
    assert raw is not None
    assert figure(result, "max") >= 1000
    assert figure(result, "p99") >= 950, "of 400, 4 are above: 960 ms and more"
    assert figure(result, "p90") >= 590, "of 400, 40 are above: 600 ms and more"
    assert raw["p90"] is not None
    assert raw["p90"] < figure(result, "p90") / 3
    assert raw["max"] is not None
    assert raw["max"] >= 1000


def test_a_paced_closed_loop_fills_in_what_it_has_not_sent() -> None:
    with answering("--stall", 51, 1.0) as server:
        result = one(server.url, rates=(100.0,), closed=True, seconds=4.0, connections=(1,))
    assert result.correction.endswith("by the expected interval of 10 ms")
    assert 100 <= result.requests <= 310, "a hundred weren't sent; on a busy machine more"
    assert figure(result, "p90") >= 570
    assert result.uncorrected_ms is not None
    assert result.uncorrected_ms["p90"] is not None
    assert result.uncorrected_ms["p90"] < figure(result, "p90") / 3


@pytest.mark.parametrize("parts", [1, 2])
def test_rates_are_kept_to_the_request(plain: Server, parts: int) -> None:
    result = one(plain.url, rates=(300.0,), seconds=1.0, warmup=0.2, processes=parts, connections=(16,))
    load = Load(OPEN, 16, 300.0)
    due = [np.concatenate(list(arrivals(load, 0.2, 1.0, part=part, parts=parts))) for part in range(parts)]
    assert result.requests == sum(int((times >= 0.2).sum()) for times in due)
    assert result.errors == result.unfinished == 0
    shown = sum(point["requests_per_s"] for point in result.series) / 2
    late = 0.2 * 300  # of the warm-up's requests those that a busy machine answers after it are shown, too
    assert result.requests - 16 <= shown <= result.requests + late + 16
    assert len(result.series) == 2, "by half seconds"


def test_so_many_requests_are_sent_and_each_is_answered(plain: Server) -> None:
    result = one(plain.url, requests=500, processes=2)
    assert (result.requests, result.errors) == (500, 0)
    assert result.seconds < 30
    assert result.server is not None
    assert result.server.processes == 1


def test_what_is_not_a_good_answer_is_an_error_of_its_kind() -> None:
    with answering("--status", 4, 503) as server:
        result = one(server.url, requests=200, connections=(1,))
    assert result.errors_by_kind == {"status 503": 50}
    assert result.samples == {"status 503": '{"error":"the queue is full"}'}
    assert result.requests == 200


@pytest.mark.parametrize("end", ["close", "eof", "chunked"])
def test_answers_may_end_in_any_way(end: str) -> None:
    with answering("--end", end) as server:
        result = one(server.url, requests=60, connections=(2,))
    assert (result.requests, result.errors) == (60, 0)
    assert (result.reconnects >= 55) == (end != "chunked")


def test_a_unix_socket(tmp_path: Path) -> None:
    place = str(tmp_path / "s.sock")
    with answering(place=place) as server:
        assert server.answers()
        result = one(f"http+unix://{place.replace('/', '%2F')}/x", requests=50)
    assert (result.requests, result.errors) == (50, 0)
    assert result.server is not None, "its cost is seen too"


def test_no_answer_in_time_is_a_timeout_and_the_rest_goes_on() -> None:
    with answering("--stall", 20, 1.5) as server:
        result = one(server.url, rates=(50.0,), arrivals="even", seconds=2.0, timeout=0.5)
    assert set(result.errors_by_kind) == {"timeout"}
    assert 48 <= result.errors <= 65, "all that were due in the first second of the stall"
    assert result.requests == 100


@pytest.mark.parametrize("wish", [{"rates": (200.0,)}, {}, {"rates": (200.0,), "closed": True}])
def test_a_server_that_dies_meanwhile_is_counted_and_the_load_ends_well(wish: dict[str, Any]) -> None:
    with answering() as server:

        def kill(look: Look) -> None:
            if look.ticks and server.process.poll() is None:
                server.kill()

        view = commands.bench(None, [server.url], Wish(**{**QUICK, "seconds": 1.5, **wish}), on_look=kill)
    (result,) = view.results
    assert view.answered
    kinds = set(result.errors_by_kind)
    assert "connection refused" in kinds
    assert kinds <= {"connection refused", "connection closed", "connection reset"}
    assert result.requests_per_s > 0
    if result.settings["loop"] == "open":
        assert result.requests == pytest.approx(300, abs=70), "what was due is counted, whether anybody listened or not"


def test_a_server_that_comes_back_is_found_again() -> None:
    with answering() as server:

        def restart(look: Look) -> None:
            if len(look.ticks) == 1:
                server.kill()
                server.start()

        wish = Wish(**{**QUICK, "rates": (100.0,), "seconds": 3.0})
        (result,) = commands.bench(None, [server.url], wish, on_look=restart).results
    assert result.series[-1]["requests_per_s"] > 0
    assert result.series[-1]["errors"] == 0
    assert result.server is None, "the first process's cost is not known to its end"


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "onejob", "bench", *args]


def test_ctrl_c_shows_what_was_measured_so_far(plain: Server) -> None:
    asked = command(plain.url, "--rate", "100", "-d", "20s", "--warmup", "0", "-p", "2")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(plain.url)
        assert process.stderr.readline().startswith("  2.0 s")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped: the figures are of the time until then" in out
    assert "open loop at 100/s" in out
    assert "20 s" not in out


def _requests_seen(pid: int) -> bool:
    """Whether the load's processes hold connections."""
    held = 0
    for child in processes.descendants(pid):
        with contextlib.suppress(OSError):  # it was looked at as it closed something
            held += sum(os.readlink(link).startswith("socket:") for link in Path(f"/proc/{child.pid}/fd").iterdir())
    return held >= 16


def test_a_master_that_is_killed_leaves_nothing(plain: Server) -> None:
    asked = command(plain.url, "--rate", "100", "-d", "1h", "-p", "2", "-q")
    with subprocess.Popen(asked, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: _requests_seen(process.pid), "it is under way")
        process.kill()


def test_a_process_of_the_load_that_dies_is_told_of(plain: Server) -> None:
    def kill(look: Look) -> None:
        for child in processes.descendants(os.getpid()):
            if b"onejob.serve.bench.worker" in Path(f"/proc/{child.pid}/cmdline").read_bytes():
                os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(StepError, match="a process of the load ended with -9"):
        commands.bench(None, [plain.url], Wish(**QUICK), on_look=kill)


def test_two_servers_are_compared_turn_by_turn(plain: Server) -> None:
    with answering("--delay", 0.02) as slow:
        view = bench(plain.url, slow.url, seconds=0.9, rounds=3, connections=(2,))
    assert [result.target for result in view.results] == [plain.url, slow.url]
    ratios = {found.what: found for found in view.ratios}
    assert ratios["requests_per_s"].ratio < 0.5
    p50 = ratios["p50_ms"]
    assert p50.ratio > 2
    assert p50.low is not None
    assert p50.low > 1, "no chance"
    assert ratios["requests_per_s"].rounds == 3


def test_a_server_beside_itself_has_two_names(plain: Server) -> None:
    view = bench(plain.url, plain.url, requests=100, rounds=2)
    assert [result.target for result in view.results] == [plain.url, f"{plain.url} #2"]
    assert [result.requests for result in view.results] == [100, 100]


def test_steps_and_ramps(plain: Server) -> None:
    view = bench(plain.url, rates=(50.0, 150.0), seconds=0.6, arrivals="even")
    assert [result.requests for result in view.results] == [30, 90]
    ramp = one(plain.url, ramp=(20.0, 300.0), seconds=1.5, arrivals="even")
    assert ramp.requests == pytest.approx(240, abs=2)
    assert ramp.series[0]["requests_per_s"] < ramp.series[-1]["requests_per_s"] / 2


def test_the_search_ends_below_what_the_server_can() -> None:
    """20 ms for an answer and 4 connections: 200 a second at most."""
    with answering("--delay", 0.02) as server:
        view = bench(
            server.url, goals=parse_goals(["p50_ms=40"]), seconds=0.3, timeout=1.0, connections=(4,), arrivals="even"
        )
    (search,) = view.searches
    assert search.held is not None
    assert search.held <= 210
    assert search.failed is not None
    assert search.steps[-1].why or search.steps[-1].held
    assert view.answered


def test_there_may_be_more_connections_than_open_files_are_usual(plain: Server) -> None:
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))
    try:
        result = one(plain.url, seconds=0.7, connections=(200,))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    assert result.errors_by_kind == {}, "each connection that can't be made would be tried again, and counted"
    assert result.requests > 0


def test_what_cannot_be_measured_is_refused_at_once(plain: Server) -> None:
    with answering() as gone:
        url = gone.url
    with pytest.raises(InferenceError, match="no connection"):
        bench(url)
    with answering("--status", 1, 400) as refusing:
        with pytest.raises(BadRequestError, match="it answers 400 to the request: the queue is full"):
            bench(refusing.url)
        with pytest.raises(NotFoundError, match="which models"):
            bench(refusing.url.removesuffix("/x"))
    with pytest.raises(NotFoundError, match="host can't be found"):
        bench("http://nowhere.invalid/x")


# ---- an endpoint of ours


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("bench")
    with endpoint(folder / "affine") as made:
        made.want(save_affine(folder / "engine"), replicas=2)
        yield made.start().ready()


@pytest.mark.parametrize("form", ["binary", "json"])
def test_an_endpoint_is_asked_by_its_own_metadata(served: Endpoint, form: str) -> None:
    url = f"http://127.0.0.1:{served.port}"
    view = bench(url, requests=300, batch=3, form=form)
    (target,), (result,) = view.targets, view.results
    assert (target.model, target.path, target.batch) == ("affine", "/v2/models/affine/infer", 3)
    assert target.form == ("binary tensors" if form == "binary" else "JSON")
    assert (result.requests, result.errors) == (300, 0)
    assert result.server is not None
    assert result.server.processes == 3, "the host and its replicas"


def test_a_model_is_named_by_the_url_or_beside_it(served: Endpoint, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{served.port}"
    for name, wish in ((f"{url}/v2/models/affine/versions/1", {}), (url, {"model": "affine"})):
        assert one(name, requests=20, **wish).errors == 0
    with pytest.raises(NotFoundError, match="unknown model: 'other'"):
        bench(url, model="other")
    body = json.dumps({"instances": [{"x": [1, 2, 3, 4]}]}).encode()
    own = bench(f"{url}/v1/models/affine:predict", data=(body,), data_type="application/json", requests=20)
    assert own.results[0].errors == 0
    assert own.targets[0].method == "POST"
    with pytest.raises(BadRequestError, match="it answers 400"):
        bench(f"{url}/v2/models/affine", data=(b"{}",), data_type="application/json")


def test_the_verb_prints_one_document(served: Endpoint) -> None:
    url = f"http://127.0.0.1:{served.port}"
    done = subprocess.run(
        command(url, "-n", "200", "--warmup", "0", "-b", "2", "--json"), capture_output=True, text=True, check=True
    )
    (result,) = json.loads(done.stdout)["results"]
    assert result["requests"] == 200
    assert set(result["latency_ms"]) == {"mean", "p50", "p90", "p99", "p99.9", "max"}
    assert done.stderr == ""

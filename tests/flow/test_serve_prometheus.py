"""A real Prometheus scrapes an endpoint: it takes the page, counts requests, and answers the dashboard's queries."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_models import program
from served_models import Endpoint, endpoint, save_affine, wait_for
from test_serve_scrape import infer

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
EMPTY = ("nv_gpu", "> 0", "shed", "failure")
"""Of queries that have an answer only where there is a GPU, or where something goes wrong."""
REQUESTS = 24


class Prometheus:
    """A Prometheus with one target."""

    def __init__(self, folder: Path, target: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        config = folder / "prometheus.yml"
        scrape = f"  - job_name: models\n    static_configs: [{{ targets: ['127.0.0.1:{target}'] }}]\n"
        config.write_text(f"global: {{ scrape_interval: 500ms }}\nscrape_configs:\n{scrape}")
        self.process = subprocess.Popen(
            [
                str(program("prometheus", "prometheus")),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--log.level=error",
            ]
        )

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The series that a query gives now."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            told = json.loads(answer.read())
        assert told["status"] == "success"
        found: list[dict[str, Any]] = told["data"]["result"]
        return found

    def value(self, query: str) -> float:
        try:
            found = self.ask(query)
        except OSError:
            return -1.0  # it only starts
        return float(found[0]["value"][1]) if found else -1.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("scraped")
    with endpoint(folder / "ep") as one:
        one.want(save_affine(folder / "engine"), replicas=2)
        one.start().ready()
        yield one


@pytest.fixture(scope="module")
def scraped(made: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    found = Prometheus(tmp_path_factory.mktemp("prometheus"), made.port)
    try:
        wait_for(lambda: found.value("up") == 1)
        wait_for(lambda: found.value("sum(nv_inference_request_success)") == 0)
        for number in range(REQUESTS):
            infer(made, 1 + number % 3, binary=bool(number % 2))
        yield found
    finally:
        found.process.terminate()
        found.process.wait(20)


def test_it_counts_what_was_asked(scraped: Prometheus) -> None:
    wait_for(lambda: scraped.value("sum(nv_inference_request_success)") == REQUESTS)
    wait_for(lambda: scraped.value("sum(onejob_request_duration_seconds_count)") == REQUESTS)
    assert scraped.value("sum(nv_inference_count)") == 2 * REQUESTS
    assert scraped.value("sum(onejob_batch_rows_sum)") == 2 * REQUESTS
    assert scraped.value("onejob_model_ready") == 1
    assert scraped.value("scrape_samples_scraped") > 100


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


@pytest.mark.parametrize("query", queries())
def test_it_answers_each_query_of_the_dashboard(scraped: Prometheus, made: Endpoint, query: str) -> None:
    for name, value in (("$__rate_interval", "30s"), ("$job", ".*"), ("$model", ".*")):
        query = query.replace(name, value)
    assert "$" not in query
    if any(word in query for word in EMPTY):
        scraped.ask(query)
        return

    def answered() -> bool:
        infer(made, 1, binary=True)  # a rate wants two scrapes that differ
        return bool(scraped.ask(query))

    wait_for(answered)


def test_its_linter_knows_the_page(made: Endpoint) -> None:
    """Triton's names are as they are; ours are as Prometheus wants them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{made.port}/metrics", timeout=20) as answer:
        page = answer.read()
    tool = str(program("prometheus", "promtool"))
    done = subprocess.run([tool, "check", "metrics"], input=page, capture_output=True, timeout=30, check=False)
    told = (done.stdout + done.stderr).decode().splitlines()
    assert done.returncode in (0, 3), told
    assert [line for line in told if not re.match(r"nv_", line)] == []

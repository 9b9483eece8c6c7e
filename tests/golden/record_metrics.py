"""Records metrics.txt: the page that a real Triton shows Prometheus, without a GPU, after a good and a bad request.

    python bench/serve/triton.py install FOLDER
    python tests/golden/record_metrics.py FOLDER

Values differ from run to run, and are made 0.
"""

from __future__ import annotations

import re
import socket
import sys
import tempfile
from pathlib import Path
from subprocess import Popen
from urllib.error import HTTPError
from urllib.request import urlopen

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "bench" / "serve")]

from record import write_repository  # noqa: E402
from triton import QUIET, _wait, command, environment  # noqa: E402

BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[1]}]}'
MODELS = ("same_fp32", "broken")


def record(folder: Path) -> str:
    with tempfile.TemporaryDirectory() as temporary:
        repository = Path(temporary) / "models"
        write_repository(repository)
        http, metrics = _free_ports()
        options = ["--http-address=127.0.0.1", f"--http-port={http}", "--allow-grpc=0"]
        options += ["--metrics-address=127.0.0.1", f"--metrics-port={metrics}"]
        options += ["--model-control-mode=explicit", *(f"--load-model={model}" for model in MODELS), *QUIET]
        argv = [option for option in command(folder, repository, options) if option != "--allow-cpu-metrics=0"]
        process = Popen(argv, env=environment(folder))
        try:
            _wait(process, f"http://127.0.0.1:{http}/v2/health/ready")
            for model in MODELS:
                _ask(f"http://127.0.0.1:{http}/v2/models/{model}/infer")
            with urlopen(f"http://127.0.0.1:{metrics}/metrics") as answer:
                return re.sub(r"^([^#].*) \S+$", r"\1 0", answer.read().decode(), flags=re.MULTILINE) + "\n"
        finally:
            process.terminate()
            process.wait(30)


def _ask(url: str) -> None:
    try:
        urlopen(url, BODY).close()
    except HTTPError as error:
        error.close()


def _free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return [one.getsockname()[1], other.getsockname()[1]]


if __name__ == "__main__":
    (HERE / "metrics.txt").write_text(record(Path(sys.argv[1])))

"""Records the golden exchanges in http/: what a real Triton answers to each request of golden_cases.py.

    python bench/serve/triton.py install FOLDER
    python tests/golden/record.py FOLDER [NAME...]

One JSON file for each case: the server's version and options, and its exchanges in order. Bodies that are UTF-8 text
are kept as text, others as base64. Times and addresses, which differ from run to run, are made 0.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from time import sleep
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "bench" / "serve")]

from golden_cases import CASES, OPTIONS, Case, Sent  # noqa: E402
from golden_models import LABELS, MODELS, VERSIONS  # noqa: E402
from triton import VERSION, running  # noqa: E402

Answer = tuple[int, list[tuple[str, str]], bytes]
QUIET_HEADERS = {"date", "connection", "content-length"}
SCRUBBED = (
    (re.compile(rb'"(ns|last_inference)":\d+'), rb'"\1":0'),
    (re.compile(rb"/\S*/(?=python_backend_stub|backends/|models/)"), b"/"),
)


def write_repository(folder: Path) -> None:
    """All models as a model repository."""
    for name, model in MODELS.items():
        text = model.config()
        place = folder / name
        for version in VERSIONS.get(name, (1,)):
            (place / str(version)).mkdir(parents=True)
            shutil.copy(HERE / "golden_models.py", place / str(version) / "model.py")
        (place / "config.pbtxt").write_text(text)
        if "labels.txt" in text:
            (place / "labels.txt").write_text("".join(f"{label}\n" for label in LABELS))


def record(folder: Path, names: list[str]) -> None:
    """Start a server for each set of options, and play its cases."""
    with tempfile.TemporaryDirectory() as temporary:
        repository = Path(temporary) / "models"
        write_repository(repository)
        for setup, options in OPTIONS.items():
            cases = [case for case in CASES if case.setup == setup and (not names or case.name in names)]
            while cases:
                port = _free_port()
                with running(folder, repository, port, options) as process:
                    while cases and process.poll() is None:
                        case = cases.pop(0)
                        _write(case, [_recorded(sent, answer) for sent, answer in _play(port, case)])
                        if _ended(process):
                            print(f"case {case.name}: Triton ended with {process.returncode}", flush=True)


def _play(port: int, case: Case) -> list[tuple[Sent, Future[Answer | None]]]:
    with ThreadPoolExecutor() as pool:
        played = []
        for sent in case.exchanges:
            future = pool.submit(_ask, port, sent)
            if sent.aside:
                sleep(0.2)  # it is being computed, or waits in the queue, before the next one is sent
            else:
                future.result()
            played.append((sent, future))
    return played


def _ended(process: Popen[bytes]) -> bool:
    """Whether it is gone, or goes just now."""
    try:
        process.wait(0.02)
    except TimeoutExpired:
        return False
    return True


def _ask(port: int, sent: Sent) -> Answer | None:
    """What was answered; None if nothing was: Triton has crashed, or hangs."""
    try:
        return _exchange(port, sent)
    except (OSError, http.client.HTTPException) as error:
        print(f"{sent.method} {sent.path} {(sent.body or b'')[:200]!r}: {error!r}", flush=True)
        return None


def _exchange(port: int, sent: Sent) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(sent.method, sent.path, skip_accept_encoding=True)
    headers: Mapping[str, str] = sent.headers
    if sent.body is not None and "Content-Length" not in headers:
        connection.putheader("Content-Length", str(len(sent.body)))
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders(sent.body)
    answer = connection.getresponse()
    found = answer.status, answer.getheaders(), answer.read()
    connection.close()
    return found


def _recorded(sent: Sent, answer: Future[Answer | None]) -> dict[str, Any]:
    """An exchange; status 0 where there was no answer."""
    status, headers, body = answer.result() or (0, [], b"")
    return {
        "request": {
            "method": sent.method,
            "path": sent.path,
            "headers": dict(sent.headers),
            "body": _body(sent.body or b""),
            **({"aside": True} if sent.aside else {}),
        },
        "answer": {
            "status": status,
            "headers": {name: value for name, value in headers if name.lower() not in QUIET_HEADERS},
            "body": _body(_scrub(body)),
        },
    }


def _scrub(body: bytes) -> bytes:
    for pattern, instead in SCRUBBED:
        body = pattern.sub(instead, body)
    return body


def _body(data: bytes) -> dict[str, str]:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
    return {"text": text} if text.isprintable() or "\0" not in text else {"base64": base64.b64encode(data).decode()}


def _write(case: Case, exchanges: list[dict[str, Any]]) -> None:
    document = {
        "case": case.name,
        "triton": VERSION,
        "options": OPTIONS[case.setup],
        "exchanges": exchanges,
    }
    path = HERE / "http" / f"{case.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where bench/serve/triton.py has installed Triton")
    parser.add_argument("names", nargs="*", help="only these cases")
    arguments = parser.parse_args()
    record(arguments.folder, arguments.names)


if __name__ == "__main__":
    main()

"""What `[serve] host` names, and the URL that an endpoint goes by."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from onejob.core.address import LONGEST, check_host, socket_path, url_of
from onejob.serve.bench.target import split_url
from onejob.serve.spec import Spec


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("unix:/run/my model.sock", "http+unix://%2Frun%2Fmy%20model.sock"),
    ],
)
def test_urls(host: str, url: str) -> None:
    assert url_of(host, 8000) == url
    address, path = split_url(f"{url}/v2")
    assert path == "/v2"
    assert Path(address.socket or "/") == (socket_path(host) or Path("/"))


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("unix:", "absolute path"),
        ("unix:/", "absolute path"),
        ("unix:run/model.sock", "absolute path"),
        ("unix:/run/\0model", "absolute path"),
        ("unix:/" + "x" * LONGEST, "at most 107 bytes"),
        ("unix:/" + "é" * 60, "at most 107 bytes"),
    ],
)
def test_where_nobody_can_listen(host: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_host(host)
    with pytest.raises(ValidationError, match=why):
        Spec(host=host)


def test_a_socket_has_no_port() -> None:
    assert Spec(host="unix:/run//model.sock").host == "unix:/run/model.sock"
    with pytest.raises(ValidationError, match="a Unix socket has no port"):
        Spec(host="unix:/run/model.sock", port=8000)
    assert Spec(host="0.0.0.0", port=8000).port == 8000

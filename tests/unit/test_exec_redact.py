"""Secrets are taken out of text, JSON and streams, however the stream is cut."""

import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onejob.exec.redact import Redactor, Stream

MULTILINE = "-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQEF\n-----END KEY-----\n"


def stream(secrets: dict[str, str], pieces: list[bytes]) -> bytes:
    flow = Stream(Redactor(secrets))
    return b"".join([*(flow.feed(piece) for piece in pieces), flow.end()])


@pytest.mark.parametrize(
    "form", [str, lambda v: json.dumps(v)[1:-1], lambda v: quote(v, safe=""), lambda v: repr(v)[1:-1]]
)
def test_a_value_in_its_disguises(form) -> None:
    value = 'pä"ss\\w/ord\t'
    assert Redactor({"TOKEN": value}).text(f"<{form(value)}>") == "<***TOKEN***>"


def test_lines_of_a_long_secret() -> None:
    redactor = Redactor({"KEY": MULTILINE})
    assert redactor.text(f"a {MULTILINE} b") == "a ***KEY*** b"
    assert redactor.text("> kqhkiG9w0BAQEF") == "> ***KEY***"
    assert Redactor({"KEY": MULTILINE}, lines=False).text("> kqhkiG9w0BAQEF") == "> kqhkiG9w0BAQEF"


def test_the_longest_value_wins() -> None:
    assert Redactor({"A": "secret", "B": "secret-2"}).text("secret-2 secret") == "***B*** ***A***"


def test_json_with_its_keys() -> None:
    value = {"a": ["x token y", 1, None], "token": {"b": True}}
    assert Redactor({"T": "token"}).json(value) == {"a": ["x ***T*** y", 1, None], "***T***": {"b": True}}


def test_nothing_to_hide() -> None:
    redactor = Redactor({"EMPTY": ""})
    assert redactor.data(b"a\xffb") == b"a\xffb"
    assert redactor.found(b"abc") is None
    assert stream({}, [b"a", b"\xff"]) == b"a\xff"


def test_text_that_can_not_be_utf_8_comes_out_writable() -> None:
    assert Redactor({"T": "token"}).text("a\udcff token \ud800") == "a\\udcff ***T*** \\ud800"


def test_bytes_that_are_no_text_go_through() -> None:
    assert Redactor({"T": "token"}).data(b"\xff\x00token\xfe") == b"\xff\x00***T***\xfe"


@pytest.mark.parametrize("cut", range(1, 16))
def test_cut_anywhere(cut: int) -> None:
    text = b"is hunter2-x ok?"
    assert stream({"T": "hunter2-x"}, [text[:cut], text[cut:]]) == b"is ***T*** ok?"
    assert stream({"T": "hunter2-x"}, [text[n : n + 1] for n in range(len(text))]) == b"is ***T*** ok?"


def test_only_what_may_begin_a_secret_is_held_back() -> None:
    flow = Stream(Redactor({"T": "hunter2"}))
    assert flow.feed(b"progress 10%\r hun") == b"progress 10%\r "
    assert flow.feed(b"gry") == b"hungry"


def test_a_secret_cut_off_by_the_end() -> None:
    assert stream({"T": "hunter2-hunter2"}, [b"it is hunter2-hun"]) == b"it is ***T***"
    assert stream({"T": "hunter2-hunter2"}, [b"it is h"]) == b"it is h"


def test_secrets_that_overlap() -> None:
    for pieces in ([b"abcaz"], [b"abca", b"z"], [b"ab", b"ca", b"z"]):
        out = stream({"A": "abca", "B": "caz"}, pieces)
        assert out.startswith(b"***A***")


@given(
    st.dictionaries(st.sampled_from("XYZ"), st.text("ab\n", min_size=1, max_size=6), min_size=1),
    st.lists(st.text("ab\nc", max_size=8), max_size=8),
)
def test_no_cut_lets_a_secret_through(secrets: dict[str, str], texts: list[str]) -> None:
    redactor, pieces = Redactor(secrets), [text.encode() for text in texts]
    out = stream(secrets, pieces)
    assert redactor.found(out) is None
    if redactor.found(b"".join(pieces)) is None:
        assert out == b"".join(pieces) or out.endswith(b"***")

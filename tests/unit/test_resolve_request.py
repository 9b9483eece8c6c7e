"""A request that has only just been answered is found: its replica writes the log a few times a second."""

from types import SimpleNamespace

from onejob.loop import resolve


def test_a_request_that_is_not_in_the_log_yet_is_waited_for(monkeypatch, tmp_path):
    made = "0123456789ab0000010badcafe"
    looks = iter([None, None, {"id": made}])
    waited = []
    monkeypatch.setattr(resolve, "find_request", lambda folder, name: next(looks))
    monkeypatch.setattr(resolve.time, "sleep", waited.append)
    endpoint = SimpleNamespace(name="flights")
    session = SimpleNamespace(
        ledger=SimpleNamespace(list_endpoints=lambda: [endpoint]), home=SimpleNamespace(endpoint=lambda name: tmp_path)
    )
    found = resolve._request(session, made)
    assert found is not None
    assert found.request == {"id": made}
    assert len(waited) == 2


def test_any_other_name_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(resolve, "find_request", lambda folder, name: None)
    monkeypatch.setattr(resolve.time, "sleep", lambda seconds: 1 / 0)
    session = SimpleNamespace(
        ledger=SimpleNamespace(list_endpoints=lambda: [SimpleNamespace(name="flights")]),
        home=SimpleNamespace(endpoint=lambda name: tmp_path),
    )
    assert resolve._request(session, "flihgts") is None

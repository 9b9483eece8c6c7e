"""Who holds a lease: this process lives, a reused pid does not, and of other hosts nothing is known."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from onejob.core.records import Owner
from onejob.store import leases
from onejob.store.leases import alive, host_name, this_process


def test_this_process_is_alive() -> None:
    owner = this_process()
    assert owner.pid == os.getpid()
    assert owner.started > 0
    assert alive(owner) is True
    assert Owner.parse(str(owner)) == owner
    assert alive(Owner.parse(str(owner))) is True


def test_a_reused_pid_is_another_process() -> None:
    assert alive(replace(this_process(), started=this_process().started - 0.01)) is False


def test_a_pid_that_is_gone_is_dead() -> None:
    assert alive(replace(this_process(), pid=2**22 + 1)) is False


def test_of_another_host_or_boot_nothing_is_known() -> None:
    assert alive(replace(this_process(), host="elsewhere")) is None
    name, boot, namespace = host_name().rsplit("/", 2)
    assert alive(replace(this_process(), host=f"{name}/00000000/{namespace}")) is None
    assert alive(replace(this_process(), host=f"{name}/{boot}/1")) is None


@pytest.mark.parametrize(
    ("state", "started"),
    [("S", 12.34), ("R", 12.34), ("Z", None), ("X", None)],
    ids=["sleeps", "runs", "zombie", "dead"],
)
def test_a_zombie_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, started: float | None) -> None:
    (tmp_path / "7").mkdir()
    fields = [state, *["0"] * 18, str(round(12.34 * os.sysconf("SC_CLK_TCK"))), "0"]
    (tmp_path / "7" / "stat").write_text(f"7 (a (b) Z 1) {' '.join(fields)}\n")
    monkeypatch.setattr(leases, "PROC", tmp_path)
    assert leases._start_time(7) == started

"""The local executor passes the contract of executors."""

import pytest

from onejob.exec.local import LocalExecutor
from onejob.testing.executor_contract import Connect, ExecutorContract


class TestLocalExecutor(ExecutorContract):
    @pytest.fixture
    def connect(self) -> Connect:
        return LocalExecutor

    def test_slots_as_told(self) -> None:
        capacity = LocalExecutor(cpus=0.5, gpus=[1, 3]).capacity()
        assert (capacity["cpus"], capacity["gpus"]) == (0.5, [1, 3])

    def test_says_that_it_runs_here(self) -> None:
        support = LocalExecutor().supported()
        assert support.available
        assert "CPU" in support.detail

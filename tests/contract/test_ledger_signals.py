"""Signals, turns, decisions and promotions on SQLite and on PostgreSQL pass the contract."""

from onejob.testing.ledger_signals_contract import SignalsContract


class TestSqlSignals(SignalsContract):
    pass

"""The ledger on SQLite and on PostgreSQL passes the contract."""

from onejob.testing.ledger_contract import LedgerContract


class TestSqlLedger(LedgerContract):
    pass

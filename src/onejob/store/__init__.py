"""The store: the ledger on SQLite or PostgreSQL, blobs in a folder, and what keeps both sound."""

"""The loop: one level-triggered pass makes the ledger's wishes true; commands are how people speak to it."""

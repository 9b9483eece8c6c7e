"""Families: what a model is. Its columns, encoding, module, loss and metrics; see docs/families.md."""

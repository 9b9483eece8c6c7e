"""onejob: one file describes one AI job; one command takes it from raw data to a served model."""

__version__ = "0.1.0"

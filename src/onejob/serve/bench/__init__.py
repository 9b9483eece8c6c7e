"""A load generator for HTTP endpoints: what `onejob bench` sends, measures and reports (docs/bench.md)."""

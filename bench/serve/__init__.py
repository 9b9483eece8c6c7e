"""Serving beside its peers: what `bench/serving.py` measures, and with what."""

"""A job that stands still: where each rank is (`hostside/stall.py`, `model`), and who keeps whom waiting (`judgement`)."""

"""Benchmarks, each a command of its own: `python -m ops.bench.FAMILY.NAME --help`. Nothing imports them."""

"""Measuring servers over HTTP: what `mlxserve bench` and scripts/bench_serving are made of."""

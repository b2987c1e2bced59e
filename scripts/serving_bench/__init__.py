"""HTTP load on mlxserve and on other servers: what scripts/bench_serving.py is made of."""

"""One user at each limit, and another whose calls are measured: the programs of `benchmarks/tenants.py`."""

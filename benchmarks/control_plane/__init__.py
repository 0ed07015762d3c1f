"""Level (b) of the migration benchmark: the real coordinator, a real Redis and real gRPC in real time, loaded by
scripted workers in another process. See `level.run_level`.
"""

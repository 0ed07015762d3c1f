"""The real coordinator, a real Redis and real gRPC in real time, loaded by scripted workers in another process."""

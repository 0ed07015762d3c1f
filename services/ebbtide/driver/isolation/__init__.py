"""Runs environment code in a process that reaches neither tokens nor other processes, within limits."""

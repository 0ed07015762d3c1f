"""Runs one trainer on several devices: a process (rank) for each holds a share of network and optimiser.

The coordinator sees only rank 0: it holds the lease, reads trajectories, reports and commits. It sends the others one
order after another, and all do their part: so they load, train, publish and write checkpoints in the same order.
Nothing between them is pickled.
"""

"""One trainer on several devices: as many processes, its ranks, that hold a share of network and optimiser each.

Rank 0 is the trainer that the coordinator sees: it holds the lease, reads trajectories, reports and commits. It gives
the others orders, one after another, and each of them does its part: so all ranks load, train, publish and write
checkpoints in the same order. Nothing that travels between them is pickled.
"""

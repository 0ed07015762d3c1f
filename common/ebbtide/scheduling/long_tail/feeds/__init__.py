"""Decides which records of a group's rollouts go to a worker that makes others of the group."""

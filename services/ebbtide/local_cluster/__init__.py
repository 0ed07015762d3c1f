"""Starts, watches and ends the programs of a cluster on this machine."""

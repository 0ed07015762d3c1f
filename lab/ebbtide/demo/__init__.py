"""Runs demos: a whole job on this machine, with a report."""

"""Holds a coordinator's runs, attempts and workers, and notifies watchers of changes."""

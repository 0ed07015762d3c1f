"""Decides from records alone: no rule here has a clock, a store, an event loop or a connection."""

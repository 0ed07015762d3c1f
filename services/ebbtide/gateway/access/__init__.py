"""Decides who may ask the gateway for what, and how much at once."""

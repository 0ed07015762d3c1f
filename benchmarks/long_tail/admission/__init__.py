"""Admission by memory, on a real engine."""

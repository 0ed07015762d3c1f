"""Runs the co-serving demo: a served model under replayed traffic, beside a training run."""

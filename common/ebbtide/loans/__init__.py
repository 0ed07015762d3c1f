"""Lends a device to the engines beside its owner: who borrows, what each may do, and an end that needs no consent."""

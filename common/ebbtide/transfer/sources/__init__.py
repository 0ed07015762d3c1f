"""Reads blobs from relays, peers and static copies, and chooses among them."""

"""Sources of blobs: relays, peers and static copies, and which of them is asked next."""

"""Policy versions on this worker: pulled, verified, installed, and served to peers."""

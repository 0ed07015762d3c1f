"""Which served hosts are worth borrowing."""

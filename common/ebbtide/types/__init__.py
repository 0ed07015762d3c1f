"""Records: immutable, checked when they are parsed, and free of behaviour beyond their own consistency."""

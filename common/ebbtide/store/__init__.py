"""The only package that talks to Redis: the schema (`keys`), the scripts (`lua/`) and typed wrappers around them."""

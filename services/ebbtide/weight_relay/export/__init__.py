"""A static copy of a version, for web servers and object stores."""

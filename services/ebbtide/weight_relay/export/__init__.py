"""Static copies of versions, for web servers and object stores."""

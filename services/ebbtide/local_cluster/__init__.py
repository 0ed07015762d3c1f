"""A whole cluster on this machine: its programs started, watched and ended in order."""

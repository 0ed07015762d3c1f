"""The weight-relay: immutable policy versions as content-addressed tiles on disk, all of a version or nothing."""

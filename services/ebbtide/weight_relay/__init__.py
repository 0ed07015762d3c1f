"""The weight-relay keeps immutable policy versions as content-addressed tiles on disk, each whole or not at all."""

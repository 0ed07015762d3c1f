"""The rollout-worker generates on one engine, streams its tokens, and installs the versions that it pulls."""

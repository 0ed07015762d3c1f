"""Working on claimed runs: what trainer and driver share."""

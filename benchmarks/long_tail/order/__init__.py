"""Who starts first: rules in a model of slots, and what the live decision takes."""

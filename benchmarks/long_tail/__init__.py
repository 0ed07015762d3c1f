"""The long tail of a step: forecasts of lengths, and lengths of drafts, beside published rules."""

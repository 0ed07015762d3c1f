"""Messages into token ids, and sampled token ids into text."""

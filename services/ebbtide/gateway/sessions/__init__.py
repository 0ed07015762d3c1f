"""Sessions: which sampled tokens a new prompt repeats, and what became of all of them."""

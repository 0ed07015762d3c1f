"""Models machines and workers: their lives, engines and links, and what befalls them."""

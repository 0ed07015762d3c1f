"""Models runs: drivers that submit steps, trainers that learn from them, and devices that trainers lend."""

"""Makes figures, intervals and tables of what blocks measured."""

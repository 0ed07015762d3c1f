"""Claims runs and follows them: the parts that trainer and driver share."""

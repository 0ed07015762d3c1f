"""What passing siblings' tokens on costs a coordinator."""

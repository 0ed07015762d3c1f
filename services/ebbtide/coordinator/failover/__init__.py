"""Takes the fleet over: elects the leader, reads runs back, and reconciles a store that forgot."""

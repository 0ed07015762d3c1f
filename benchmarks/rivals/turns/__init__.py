"""Places an episode's turns as simple rules and ROSE do."""

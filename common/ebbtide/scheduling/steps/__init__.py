"""How a run goes step by step: open steps, groups, and which run a trainer claims."""

"""Lower bounds on the iteration of any plan."""

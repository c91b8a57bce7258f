"""Lower bounds: no plan can be faster than this."""

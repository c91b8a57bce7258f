"""All freedoms of a plan at once: the strategy `best`."""

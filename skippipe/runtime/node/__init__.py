"""A node: what it is told, what it computes, what it sends, and how it gets the state of its stage."""

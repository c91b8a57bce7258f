"""A node: its process, its state machine, the operations that it runs, and how it gets the state of its stage."""

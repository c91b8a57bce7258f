"""A node that holds a stage of the model and computes steps."""

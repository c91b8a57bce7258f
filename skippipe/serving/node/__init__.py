"""What a node does to serve a stage."""

"""What-if analysis: what limits a plan, and which edit would help most."""

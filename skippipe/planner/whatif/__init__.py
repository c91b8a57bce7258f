"""What limits a plan, and which change would help most."""

"""How the processes of nodes are started and ended."""

"""Nodes and coordinator as state machines, and what runs them: processes with sockets, or one thread in virtual time."""

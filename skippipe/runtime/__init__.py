"""Nodes and coordinator as state machines, and what runs them: processes and sockets, or a thread and virtual time."""

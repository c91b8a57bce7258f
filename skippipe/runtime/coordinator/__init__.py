"""The coordinator: who takes part, which iteration is on, what is committed, and what happens when nodes are lost."""

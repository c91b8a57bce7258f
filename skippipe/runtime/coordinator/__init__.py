"""The coordinator: membership, failure detection, commits, replanning, recovery and checkpoints of a training run."""

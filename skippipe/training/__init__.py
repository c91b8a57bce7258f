"""Training: from a job file to a trained model; its modules are listed in docs/architecture.md."""

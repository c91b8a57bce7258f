"""From a job file to a trained model."""

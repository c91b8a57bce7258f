"""HTTP as OpenAI's clients know it, in front of any engine."""

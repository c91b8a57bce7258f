"""From text to the microbatches of a training run.

Only numpy is needed to open a token file and to sample it; the libraries of Hugging Face are imported where text is
turned into ids, and torch nowhere.
"""

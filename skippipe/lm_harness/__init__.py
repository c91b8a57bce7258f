"""Scores of a trained model, whole or with stages missing, on tasks of the lm-evaluation-harness.

    parts     which stages are used, and how strongly those that are there are driven
    loading   a checkpoint or a Hugging Face folder, cut into stages
    model     log-likelihoods and the most likely next token, through a part
    passages  a text as sentences, and sentences as passages
    tasks     questions made of a text, and the files that the harness reads them from
    harness   a part as the harness's own kind of model, and the harness's verdict

Nothing here goes to a network. Only `harness` needs the package lm-eval.
"""

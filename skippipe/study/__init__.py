"""Studies: what a recipe does to the model. A study file has many variants and several seeds; results are JSONL.

    config         the study file: variants and what they have in common
    path_sampling  which stages every microbatch visits, drawn by the rules (or against one of them)
    engine         training in one process, fast: microbatches that are at the same stage go through it together
    evaluate       loss on held-out text, of the whole model and of parts of it; use of experts
    runner         variants × seeds, one after another; what is done already is not done again
    planned_time   what an iteration of every variant takes on a cluster, by the planner
    tables, plots  the results as Markdown and as pictures

No nodes and no sockets here: a test holds the engine to what real nodes compute.
"""

"""Studies: what a recipe does to the model. Many variants, several seeds, one file that says so, results as JSONL.

    settings  the study file: variants and what they have in common
    paths     which stages every microbatch visits, drawn by the rules (or against one of them)
    engine    training in one process, fast: microbatches that are at the same stage go through it together
    measure   loss on held-out text, of the whole model and of parts of it
    runner    variants × seeds, one after another; what is done already is not done again
    times     what an iteration of every variant takes on a cluster, by the planner
    tables    the results as Markdown
    plots     … and as pictures

No nodes and no sockets here: a test holds the engine to what real nodes compute.
"""

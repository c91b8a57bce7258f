"""From text to the microbatches of a training run.

    documents      text files and Hugging Face datasets, as pieces of documents in bounded memory
    tokenizer      text to ids and back: a Hugging Face tokenizer, or one trained here
    token_file     ids on disk, memory-mapped, with a fingerprint to compare between machines
    prepare        text into a token file
    batch_sampler  which part of it goes to which microbatch: a pure function of seed, iteration and index

Only numpy is needed to open a token file and to sample it; the libraries of Hugging Face are imported where text is
turned into ids, and torch nowhere.
"""

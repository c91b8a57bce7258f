"""From machine to machine: tensors as bytes, messages, keys, mailboxes and their fast lanes, and slower links.

`packed` and `message` need no sockets and import without pyzmq; torch is imported when the first tensor is packed.
Nothing is imported here, so that each of them comes alone.
"""

"""Messages between machines: tensors as bytes, keys, mailboxes and their fast paths, and emulated links.

`wire_codec` and `message` need no sockets and import without pyzmq; torch is imported when the first tensor is encoded.
Nothing is imported here, so that each module comes alone.
"""

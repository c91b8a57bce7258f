"""Messages between machines: tensors as bytes, keys, mailboxes and their fast paths, and emulated links.

`message` needs no sockets and imports without pyzmq; torch is imported when the first tensor is encoded (`codecs`).
Nothing is imported here, so that each module comes alone.
"""

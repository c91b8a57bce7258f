"""From machine to machine: tensors as bytes, messages, keys, mailboxes and their fast lanes, and slower links.

`message` needs no sockets and imports without pyzmq; torch is imported when the first tensor is encoded (`codecs`).
Nothing is imported here, so that each of them comes alone.
"""

"""The same coordinator and nodes under virtual time, with faults."""

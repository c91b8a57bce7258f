"""Serving: stages on nodes, requests on lanes, answers that go on when nodes are lost.

lanes      which node of every stage a lane goes through: the fastest way there is
streams    a request on its way to an answer
gateway    the state machine that puts streams on lanes, steps them, and moves them when nodes are lost
"""

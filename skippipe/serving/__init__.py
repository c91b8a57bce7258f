"""Serving: stages on nodes, requests on lanes, answers that go on when nodes are lost (see docs/serving.md).

gateway    the state machine that puts streams on lanes, steps them, and moves them when nodes are lost
node       the state machine of a node that holds a stage
api        HTTP, as OpenAI's clients know it
house      all of it in one process, and how it begins and ends
"""

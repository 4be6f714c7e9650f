"""Weights spread over ranks: DTensors, as FSDP2's ``fully_shard`` makes them.

Who holds what (:mod:`.placement`), messages between ranks (:mod:`.exchange`), whether ranks agree
(:mod:`.agreement`), distance and projection (:mod:`.manifold`), and what a step costs
(:mod:`.costs`). The step is :mod:`ortholand.optim.engines.sharded`.
"""

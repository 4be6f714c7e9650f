"""Weights spread over ranks: DTensors, as FSDP2's ``fully_shard`` makes them.

Who holds what (:mod:`.placement`), messages between ranks (:mod:`.exchange`), distance and
projection (:mod:`.manifold`), what a step costs (:mod:`.costs`), and the step (:mod:`.steps`).
"""

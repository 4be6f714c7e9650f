"""Weights spread over ranks: DTensors, as FSDP2's ``fully_shard`` makes them."""
